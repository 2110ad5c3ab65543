"""python -m evaluation.speed: Spec-Bench's four lines a subtask, from two answer files of any origin."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from model.errors import UserError

from .records.answer_file import common_questions, read_answers
from .records.comparison import describe_files
from .records.questions import SUBTASKS
from .records.rows import Row, accept_lengths, check_records
from .running.errors import one_line, user_errors
from .statistics.metrics import OVERALL, by_subtask, mean

SPEC_BENCH = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


def speeds(rows: Sequence[Row], tokenizer: Any = None) -> float:
    """Spec-Bench's tokens per second: mean over questions of tokens / seconds, of the first choice.

    With a tokenizer the tokens are counted from the text, less the BOS of each turn, as that project does for its
    baseline; without one they are the answers' own new_tokens.
    """
    values = []
    for row in rows:
        choice = row["choices"][0]
        if tokenizer is None:
            tokens = sum(choice["new_tokens"])
        else:
            tokens = sum(len(tokenizer(text).input_ids) - 1 for text in choice["turns"])
        if sum(choice["wall_time"]) > 0:
            values.append(tokens / sum(choice["wall_time"]))
    return mean(values)


def compare(rows: dict[Any, Row], baseline: dict[Any, Row], tokenizer: Any = None) -> list[dict[str, Any]]:
    """One entry a subtask, over the questions that both files have; `mat` is over those, too."""
    common = {key: rows[key] for key in common_questions(rows, baseline)}
    out = []
    for name, group in by_subtask(common.values()).items():
        base = speeds([baseline[row["question_id"]] for row in group], tokenizer)
        own = speeds(group)
        mat = mean(n for row in group for n in accept_lengths({"choices": row["choices"][:1]}))
        out.append({"subtask": name, "mat": mat, "tokens_per_second": own, "baseline": base, "speedup": own / base})
    order = {name: i for i, name in enumerate((*SPEC_BENCH, *SUBTASKS, OVERALL))}
    return sorted(out, key=lambda entry: order.get(entry["subtask"], len(order) - 2))


def main() -> None:
    flags = argparse.ArgumentParser(prog="python -m evaluation.speed", description=__doc__)
    flags.add_argument("--file-path", type=Path, required=True, help="answer file of the method")
    flags.add_argument("--base-path", type=Path, required=True, help="answer file of the baseline")
    flags.add_argument("--tokenizer-path", help="tokenizer for --retokenize")
    flags.add_argument(
        "--retokenize", action="store_true", help="count the baseline's tokens from its text, as Spec-Bench does"
    )
    arguments = flags.parse_args()
    with user_errors():
        report(arguments)


def report(arguments: argparse.Namespace) -> None:
    """Print what is odd about the files, then the four lines of each subtask."""
    tokenizer = None
    if arguments.retokenize:
        if arguments.tokenizer_path is None:
            raise UserError("--retokenize needs --tokenizer-path")
        try:
            tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer_path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UserError(f"--tokenizer-path {arguments.tokenizer_path}: {one_line(error)[:200]}") from None
    elif arguments.tokenizer_path is not None:
        print("note: --tokenizer-path is read with --retokenize only; counting new_tokens on both sides")
    rows, damage = read_answers(arguments.file_path)
    baseline, base_damage = read_answers(arguments.base_path)
    check_records(rows.values(), arguments.file_path)
    for path, found in ((arguments.file_path, damage), (arguments.base_path, base_damage)):
        if str(found):
            print(f"note: {path}: {found}")
    for line in describe_files(arguments.file_path, rows, arguments.base_path, baseline):
        print(f"note: {line}; compared is what both have")
    if not common_questions(rows, baseline):
        raise UserError(f"{arguments.file_path} and {arguments.base_path} have no question in common")
    for entry in compare(rows, baseline, tokenizer):
        print("=" * 30, "Task: ", entry["subtask"], "=" * 30)
        print("#Mean accepted tokens: ", entry["mat"])
        print("Tokens per second: ", entry["tokens_per_second"])
        print("Tokens per second for the baseline: ", entry["baseline"])
        print("Speedup ratio: ", entry["speedup"])


if __name__ == "__main__":
    main()
