"""python -m evaluation.speed: Spec-Bench's four lines a subtask, from two answer files of any origin."""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoTokenizer

from model.errors import UserError

from .errors import one_line, user_errors
from .records.rows import check_rows, common_questions, describe_files, read_answers
from .statistics.metrics import compare


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
    """Print notes on the files, then the four lines of each subtask."""
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
    check_rows(rows.values(), arguments.file_path)
    for path, problem in ((arguments.file_path, damage), (arguments.base_path, base_damage)):
        if str(problem):
            print(f"note: {path}: {problem}")
    for line in describe_files(arguments.file_path, rows, arguments.base_path, baseline):
        print(f"note: {line}; only common questions are compared")
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
