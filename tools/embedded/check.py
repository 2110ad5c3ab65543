"""Measure the embedded model on held-out questions, or judge an answers file: `python -m tools.embedded.check`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.embedded.corpus import held_out
from tools.embedded.encoding import prompt
from tools.embedded.judge import right
from tools.embedded.tasks import subtask

MODEL = Path("data/embedded")
MAX_NEW_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Turn:
    """One judged answer. `ended` is whether EOS ended it, None where the file does not tell."""

    category: str
    tokens: int
    ended: bool | None
    right: bool


class Model:
    """The model and its tokenizer, answering greedily in float32 with transformers' own generate."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.model.eval()

    @torch.inference_mode()
    def answer(self, text: str) -> tuple[str, int, bool]:
        """The answer to a prompt, its number of tokens, EOS included, and whether EOS ended it."""
        inputs = self.tokenizer(text, return_tensors="pt")
        output = self.model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
        )
        ids = output[0, inputs.input_ids.size(1) :].tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip(), len(ids), ids[-1] == 2


def measure(model: Model, questions: Iterable[dict[str, Any]], show: bool = False) -> list[Turn]:
    """Answer and judge every turn; a later turn sees the model's own earlier answers."""
    judged = []
    for question in questions:
        answers: list[str] = []
        for i, reference in enumerate(question["reference"]):
            text, tokens, ended = model.answer(prompt(question["turns"][: i + 1], answers))
            answers.append(text)
            judged.append(Turn(question["category"], tokens, ended, right(question["category"], reference, text)))
            if show and not judged[-1].right:
                print(f"--- {question['category']}: {question['turns'][i]}\n  want: {reference}\n  got:  {text}")
    return judged


def judge_file(path: Path, questions: dict[int, dict[str, Any]], tokenizer: Any) -> list[Turn]:
    """Judge an answers file in Spec-Bench's format."""
    judged = []
    for row in read_lines(path):
        question = questions.get(row["question_id"])
        if question is None:
            raise ValueError(f"{path}: question {row['question_id']} is not in the question file")
        answers = row["choices"][0]["turns"]
        if len(answers) != len(question["reference"]):
            raise ValueError(f"{path}: question {row['question_id']} has {len(answers)} answers")
        for reference, answer in zip(question["reference"], answers, strict=True):
            tokens = len(tokenizer(answer, add_special_tokens=False).input_ids)
            category = question["category"]
            judged.append(Turn(category, tokens, None, right(category, reference, answer)))
    return judged


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file."""
    lines = path.read_text(encoding="utf-8").split("\n")  # not at U+2028 and others, which are text
    return [json.loads(line) for line in lines if line.strip()]


def summary(turns: Sequence[Turn]) -> dict[str, float | int | None]:
    """Figures of some turns."""
    told = [t.ended for t in turns if t.ended is not None]
    return {
        "turns": len(turns),
        "right": sum(t.right for t in turns) / len(turns),
        "ended": sum(told) / len(told) if told else None,
        "tokens": sum(t.tokens for t in turns) / len(turns),
    }


def report(turns: Sequence[Turn]) -> dict[str, dict[str, float | int | None]]:
    """Figures by subtask, by MT-bench label, and overall."""
    groups: dict[str, list[Turn]] = {}
    for turn in turns:
        for name in dict.fromkeys((subtask(turn.category), turn.category)):
            groups.setdefault(name, []).append(turn)
    return {**{name: summary(group) for name, group in groups.items()}, "overall": summary(turns)}


def table(name: str, figures: dict[str, dict[str, float | int | None]]) -> str:
    """A table for reading."""
    rows = [f"{name:<16} {'turns':>6} {'right':>7} {'by EOS':>7} {'tokens':>7}"]
    for group, f in figures.items():
        ended = "-" if f["ended"] is None else f"{100 * f['ended']:.1f}%"
        rows.append(f"{group:<16} {f['turns']:>6} {100 * (f['right'] or 0):>6.1f}% {ended:>7} {f['tokens'] or 0:>7.1f}")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    """Print a table for each set; the last line is the same as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tools.embedded.check", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model (default %(default)s)")
    parser.add_argument(
        "--sets", nargs="+", choices=["sample", "large"], default=["sample", "large"], help="held-out sets"
    )
    parser.add_argument("--answers", type=Path, help="judge this answers file instead of running the model")
    parser.add_argument(
        "--questions",
        type=Path,
        default=Path("data/sample/question.jsonl"),
        help="question file of --answers (default %(default)s)",
    )
    parser.add_argument("--show", action="store_true", help="print the answers that are wrong")
    options = parser.parse_args(arguments)
    try:
        results = {}
        if options.answers is not None:
            questions = {row["question_id"]: row for row in read_lines(options.questions)}
            tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
            results["answers"] = report(judge_file(options.answers, questions, tokenizer))
        else:
            model = Model(options.model)
            for name in options.sets:
                rows = [dialogue.row(i) for i, dialogue in enumerate(held_out()[name], 1)]
                results[name] = report(measure(model, rows, options.show))
        for name, figures in results.items():
            print(table(name, figures) + "\n")
        print(json.dumps(results))
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {error}".splitlines()[0], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
