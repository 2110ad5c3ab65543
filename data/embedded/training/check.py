"""Measure the embedded model on held-out questions, or judge an answers file: `python -m data.embedded.training.check`.

The reference in the question file is all that an answer is judged by. Generated code runs in a separate, limited
process, after its syntax tree was checked: no import, no leading underscore, few methods and built-ins.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation.errors import user_errors
from evaluation.records.rows import subtask
from model.errors import UserError
from model.files import ROOT

from .corpus import held_out
from .dialogue import prompt

MAX_NEW_TOKENS = 512
SIMILAR = 0.9
EQUATION = re.compile(r"(\d+) ([*+-]) (\d+) = (\d+)")

SECONDS = 5
MEMORY = 512 * 2**20
ALLOWED_NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.For, ast.If,
    ast.Expr, ast.Call, ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.List, ast.Tuple,
    ast.Attribute, ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.IfExp, ast.ListComp,
    ast.comprehension, ast.GeneratorExp, ast.Continue, ast.Break, ast.Pass,
)  # fmt: skip
# An exponent or a long shift could fill the memory before the limit stops it.
FORBIDDEN_NODES = (ast.Pow, ast.LShift)
ALLOWED_METHODS = frozenset(
    ["append", "isdigit", "isalpha", "isupper", "islower", "isspace", "lower", "upper", "count"]
)
INPUTS: dict[str, list[object]] = {
    "numbers": [[], [0], [1, 2, 3, 4, 5, 6], list(range(-20, 21)), [7, -7, 14, 9, 27, 100, -100, 35]],
    "text": ["", "Hello World 42", "AEIOU aeiou xyz", "a1 B2 c3", "   "],
}
# Runs in the child with both sources on its standard input.
CHILD = """
import json, sys
job = json.load(sys.stdin)
safe = {"len": len, "sum": sum, "range": range, "str": str, "int": int, "max": max, "min": min}
safe["print"] = lambda *arguments: None
outputs = []
for source, name in job["functions"]:
    scope = {"__builtins__": safe}
    exec(source, scope)
    outputs.append([repr(scope[name](value)) for value in job["inputs"]])
print(json.dumps(outputs[0] == outputs[1]))
"""


def right(category: str, reference: str, answer: str) -> bool:
    """Judge one turn.

    Translation, summary, retrieval and extraction must be word for word; code must behave as the reference does;
    everything else may differ in a word or two, never in a number or a name.
    """
    if category in ("code", "coding"):
        return same_behaviour(reference, answer)
    if category in ("translation", "summarization", "rag", "extraction"):
        return _words(reference) == _words(answer)
    if category in ("math", "math_reasoning") and not _equations_hold(answer):
        return False
    similar = SequenceMatcher(None, _words(reference), _words(answer), autojunk=False)
    return _facts(reference) == _facts(answer) and similar.ratio() >= SIMILAR


def _words(text: str) -> list[str]:
    """Words, numbers and signs; line breaks count, since lists and tables are lines."""
    return re.findall(r"\w+|\n|[^\w\s]", text.strip())


def _facts(text: str) -> list[str]:
    """Numbers and capitalised words, in their order: names, places, days, results."""
    return re.findall(r"\d+|\b[A-Z]\w*", text)


def _equations_hold(text: str) -> bool:
    results = {"*": lambda a, b: a * b, "+": lambda a, b: a + b, "-": lambda a, b: a - b}
    return all(results[sign](int(a), int(b)) == int(c) for a, sign, b, c in EQUATION.findall(text))


def same_behaviour(reference: str, answer: str) -> bool:
    """Whether the answer's function has the reference's name, docstring and results, and the same calls beside it."""
    sources = [_source(reference), _source(answer)]
    wanted, given = (_parsed(source) for source in sources)
    if wanted is None or given is None:
        return False
    (one, beside_one), (two, beside_two) = wanted, given
    if one.name != two.name or beside_one != beside_two or ast.get_docstring(one) != ast.get_docstring(two):
        return False
    job = {"functions": [(s, one.name) for s in sources], "inputs": INPUTS[one.args.args[0].arg]}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", CHILD],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            preexec_fn=_limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and done.stdout.strip() == "true"


def _source(answer: str) -> str:
    """The text of the first Python block of an answer, or nothing."""
    _, opened, rest = answer.partition("```python\n")
    source, closed, _ = rest.partition("\n```")
    return source if opened and closed else ""


def _parsed(source: str) -> tuple[ast.FunctionDef, list[str]] | None:
    """The single function of a source that keeps to the allowed syntax, and the statements beside it."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED_NODES) or isinstance(node, FORBIDDEN_NODES):
            return None
        if isinstance(node, ast.Attribute) and node.attr not in ALLOWED_METHODS:
            return None
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            return None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if len(functions) != 1 or len(functions[0].args.args) != 1:
        return None
    return functions[0], [ast.dump(node) for node in tree.body if node is not functions[0]]


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


@dataclass(frozen=True, slots=True)
class Turn:
    """One judged answer. `ended` is whether EOS ended it, None where the file does not tell."""

    category: str
    tokens: int
    ended: bool | None
    right: bool


def measure(folder: Path, questions: Iterable[dict[str, Any]], show: bool = False) -> list[Turn]:
    """Answer every turn greedily in float32 with transformers' own generate, and judge it.

    A later turn sees the model's own earlier answers.

    Args:
        folder: of the model.
        show: print the answers that are wrong.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    judged = []
    for question in questions:
        category, answers = question["category"], list[str]()
        for i, reference in enumerate(question["reference"]):
            inputs = tokenizer(prompt(question["turns"][: i + 1], answers), return_tensors="pt")
            output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            ids = output[0, inputs.input_ids.size(1) :].tolist()
            answers.append(tokenizer.decode(ids, skip_special_tokens=True).strip())
            ended = ids[-1] == tokenizer.eos_token_id
            judged.append(Turn(category, len(ids), ended, right(category, reference, answers[-1])))
            if show and not judged[-1].right:
                print(f"--- {category}: {question['turns'][i]}\n  want: {reference}\n  got:  {answers[-1]}")
    return judged


def judge_file(path: Path, questions: Iterable[dict[str, Any]], tokenizer: Any) -> list[Turn]:
    """Judge an answers file in Spec-Bench's format. Raises UserError if it is of other questions."""
    asked = {question["question_id"]: question for question in questions}
    judged = []
    for row in read_lines(path):
        question = asked.get(row["question_id"])
        if question is None:
            raise UserError(f"{path}: question {row['question_id']} is not in the question file")
        answers = row["choices"][0]["turns"]
        if len(answers) != len(question["reference"]):
            raise UserError(f"{path}: question {row['question_id']} has {len(answers)} answers")
        for reference, answer in zip(question["reference"], answers, strict=True):
            tokens = len(tokenizer(answer, add_special_tokens=False).input_ids)
            category = question["category"]
            judged.append(Turn(category, tokens, None, right(category, reference, answer)))
    return judged


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file. Raises UserError if a line is none."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not at U+2028 and others, which are text
        return [json.loads(line) for line in lines if line.strip()]
    except ValueError as error:
        raise UserError(f"{path}: is not a JSON Lines file ({error})") from None


def report(turns: Sequence[Turn]) -> dict[str, dict[str, float | None]]:
    """Shares and mean tokens by subtask, by MT-bench label, and overall."""
    groups: dict[str, list[Turn]] = {}
    for turn in turns:
        for name in dict.fromkeys((subtask(turn.category), turn.category)):
            groups.setdefault(name, []).append(turn)
    figures: dict[str, dict[str, float | None]] = {}
    for name, group in [*groups.items(), ("overall", list(turns))]:
        ended = [t.ended for t in group if t.ended is not None]
        figures[name] = {
            "turns": len(group),
            "right": sum(t.right for t in group) / len(group),
            "ended": sum(ended) / len(ended) if ended else None,
            "tokens": sum(t.tokens for t in group) / len(group),
        }
    return figures


def table(name: str, figures: dict[str, dict[str, float | None]]) -> str:
    """A table for reading."""
    rows = [f"{name:<16} {'turns':>6} {'right':>7} {'by EOS':>7} {'tokens':>7}"]
    for group, f in figures.items():
        ended = "-" if f["ended"] is None else f"{f['ended']:.1%}"
        rows.append(f"{group:<16} {f['turns']:>6} {f['right']:>7.1%} {ended:>7} {f['tokens']:>7.1f}")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> None:
    """Print a table for each set; the last line is the same as JSON."""
    parser = argparse.ArgumentParser(prog="python -m data.embedded.training.check", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "data/embedded", help="folder (default: data/embedded)")
    parser.add_argument("--sets", nargs="+", choices=["sample", "large"], default=["sample", "large"], help="held out")
    parser.add_argument("--show", action="store_true", help="print the answers that are wrong")
    parser.add_argument("--answers", type=Path, help="judge this file's answers to the sample bench instead")
    with user_errors():
        options = parser.parse_args(arguments)
        if options.answers is not None:
            tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
            questions = read_lines(ROOT / "data/sample/question.jsonl")
            judged = {"answers": judge_file(options.answers, questions, tokenizer)}
        else:
            rows = {name: [d.row(i) for i, d in enumerate(held_out()[name], 1)] for name in options.sets}
            judged = {name: measure(options.model, questions, options.show) for name, questions in rows.items()}
        results = {name: report(turns) for name, turns in judged.items()}
        for name, figures in results.items():
            print(table(name, figures) + "\n")
        print(json.dumps(results))


if __name__ == "__main__":
    main()
