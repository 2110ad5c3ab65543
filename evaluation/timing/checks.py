"""Compare the steps of every execution with eager ones, token by token. Run the tests for CUDA."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from model.decoding import Draft, Generation, Target, Tree, generate
from model.decoding.linear import fastest_linear
from model.files import ROOT
from model.methods import make_method

from .plan import EMBEDDED, ReportPlan, conversation_prompts, dtype_name, load
from .report import Report

# Two draft on the device, two on the host; sizes are fixed, as sizes that follow step times differ between runs.
METHODS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "recycling": {"tree": "2.2.2"},
    "dynamic": {"nodes": 24},
    "pld": {},
}
PROMPTS, TOKENS = 2, 64
ROUNDINGS = 16  # two logits are a tie if they differ by less than that many roundings of the largest one
SHARE = 0.2  # of the time, with all sections before
LONGEST_COMPILE = {"cuda": 30.0, "cpu": 20.0}  # seconds to compile an execution; a guess until one is measured


@dataclass(frozen=True)
class Difference:
    """The first difference of an answer from the eager one.

    Attributes:
        at: the number of the token or step, from 0.
        what: `tokens`, or `accepted` if the same tokens came in other steps.
        gap: between the logits of the two tokens; None for accepted lengths.
        tie: the gap below which they count as a tie.
    """

    prompt: int
    what: str
    at: int
    eager: int
    other: int
    gap: float | None = None
    tie: float | None = None

    def __str__(self) -> str:
        place = f"prompt {self.prompt}, {'token' if self.what == 'tokens' else 'accepted length of step'} {self.at}"
        gap = "" if self.gap is None else f"; logit gap {self.gap:.2g}, a tie below {self.tie:.2g}"
        return f"{place}: {self.other}, eager has {self.eager}{gap}"


def answers(target: Target, method: str, prompts: list[list[int]]) -> list[Generation]:
    """Answer prompts one after the other, with state kept between them."""
    drafter = make_method(method, target, **METHODS[method])
    return [generate(target, drafter, prompt, max_new_tokens=TOKENS) for prompt in prompts]


def compare_answers(
    eager: Target, prompts: list[list[int]], expected: list[Generation], answered: list[Generation]
) -> Difference | None:
    """Return the first difference, tokens before accepted lengths; None if all is equal."""
    for number, (prompt, one, other) in enumerate(zip(prompts, expected, answered, strict=True)):
        if (tokens := _first_unequal(one.tokens, other.tokens)) is not None:
            at, a, b = tokens
            return Difference(number, "tokens", at, a, b, *logit_gap(eager, prompt + one.tokens[:at], a, b))
        if (accepted := _first_unequal(one.accept_lengths, other.accept_lengths)) is not None:
            return Difference(number, "accepted", *accepted)
    return None


def _first_unequal(one: list[int], other: list[int]) -> tuple[int, int, int] | None:
    """Return the first index at which two lists differ and both values, 0 past the end; None if equal."""
    pairs = enumerate(zip_longest(one, other, fillvalue=0))
    return next(((at, a, b) for at, (a, b) in pairs if a != b), None)


def logit_gap(target: Target, text: list[int], a: int, b: int) -> tuple[float, float]:
    """Return the gap between the logits of two tokens after a text, and the gap that is a tie in this type."""
    root = Draft(Tree.chain(0).on(target.device), torch.tensor(text[-1:], device=target.device))
    with target.cache(1) as cache:
        logits = target.prefill(cache, text, root)[-1].float()
    tie = ROUNDINGS * torch.finfo(target.dtype).eps * float(logits.abs().max())
    return abs(float(logits[a] - logits[b])), tie


def judge(dtype: torch.dtype, difference: Difference | None) -> tuple[bool, str]:
    """Return whether the check passes, and words. In float32 all must be equal, in other types tokens up to a tie."""
    if difference is None:
        return True, "equal"
    if dtype != torch.float32:
        if difference.what == "accepted":
            return True, f"equal tokens; {difference}"
        if difference.gap is not None and difference.tie is not None and difference.gap <= difference.tie:
            return True, f"equal up to a tie: {difference}"
    return False, str(difference)


def check_steps(plan: ReportPlan, report: Report) -> list[dict[str, Any]]:
    """Return a row for each type, execution and method, those that compile last; the report saves each at once."""
    rows, dtypes = list[dict[str, Any]](), dict.fromkeys((torch.float32, *plan.dtypes))
    if plan.device.type == "cpu":
        dtypes = dict.fromkeys((torch.float32,))  # other types are checked on CUDA only
    groups: list[list[str]] = [["static", "graph"], ["compiled", "tree"]]
    for group in groups:
        ways = [way for way in group if way == "static" or way in plan.executions]
        for dtype in dtypes if ways else ():
            _check_model(plan, report, dtype, ways, rows)
            torch.compiler.reset()  # compilations of this model must not count against the next one's limit
    return rows


def _check_model(
    plan: ReportPlan, report: Report, dtype: torch.dtype, ways: list[str], rows: list[dict[str, Any]]
) -> None:
    prompts, compile_seconds = conversation_prompts(PROMPTS), LONGEST_COMPILE[plan.device.type]
    model = load(EMBEDDED, plan.device, dtype)
    eager = Target(model, linear=fastest_linear(plan.device, dtype))
    expected = {name: answers(eager, name, prompts) for name in METHODS}
    for way in ways:
        row = {"dtype": dtype_name(dtype), "execution": way}
        target: Target | None = None
        for name in METHODS:
            if report.budget.left(SHARE) < (compile_seconds if way in ("compiled", "tree") and target is None else 0):
                report.note(
                    f"checks: {way} steps of {name} and what follows in {dtype_name(dtype)} were cut, for want of time"
                )
                break
            try:
                # the kernel changes the model's attention: it comes last, after the eager target has answered
                target = target or load_target(model, way)
                difference = compare_answers(eager, prompts, expected[name], answers(target, name, prompts))
                passed, words = judge(dtype, difference)
            except Exception as error:  # a failure is a result; check the others, too
                passed, words = False, error_line(error)
            rows.append(row | {"method": name, "passed": passed, "found": words})
            report.keep(checks=rows)


def load_target(model: Any, way: str, context: int | None = None) -> Target:
    """Build a target for one of `plan.EXECUTIONS`, with the fastest linear layers."""
    weight = model.get_input_embeddings().weight
    return Target(
        model,
        context=context,
        execution="compiled" if way == "tree" else way,
        tree_attention=way == "tree",
        linear=fastest_linear(weight.device, weight.dtype),
    )


def error_line(error: Exception) -> str:
    """Format an error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


FILES = tuple(f"tests/model/decoding/test_{name}.py" for name in ("attention", "selection", "step", "verification"))


def run_tests(seconds: float, files: tuple[str, ...] = FILES, root: Path = ROOT) -> dict[str, Any]:
    """Run tests for at most that many seconds.

    Returns:
        `passed`, `skipped`: counts; `failed`: names; `problem`: why not all were run, or None.
    """
    if importlib.util.find_spec("pytest") is None:
        return skipped_tests("pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-v", "--tb=no", "--color=no", "-k", "not without_one", *files]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:  # readable after a timeout
        problem = None
        try:
            done = subprocess.run(command, cwd=root, stdout=output, stderr=subprocess.STDOUT, timeout=seconds)
        except subprocess.TimeoutExpired:
            problem = f"cut after {seconds:.0f} s"
        output.seek(0)
        lines = output.read().splitlines()
    counts = read_lines(lines)
    if problem is None and done.returncode not in (0, 1):  # 1: some failed
        problem = f"pytest ended with exit code {done.returncode}: {(lines or ['nothing was said'])[-1][:200]}"
    return counts | {"problem": problem}


def read_lines(lines: list[str]) -> dict[str, Any]:
    """Count the outcomes that `pytest -v` printed; a test's name may contain blanks."""
    outcomes = [
        match.groups() for line in lines if (match := re.match(r"(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", line))
    ]
    counts = {word: sum(outcome == word for _, outcome in outcomes) for word in ("PASSED", "SKIPPED")}
    failed = [name for name, outcome in outcomes if outcome in ("FAILED", "ERROR")]
    return {"passed": counts["PASSED"], "skipped": counts["SKIPPED"], "failed": failed}


def skipped_tests(why: str) -> dict[str, Any]:
    """Return the result of `run_tests` if no test was run."""
    return {"passed": 0, "skipped": 0, "failed": [], "problem": f"skipped: {why}"}
