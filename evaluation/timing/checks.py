"""Compare steps of every execution with eager ones, token by token; run the tests that need CUDA."""

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

from .plan import EMBEDDED, Plan, load, named, spoken_prompts
from .report import Report

# Two that draft on the device, two that draft on the host; of fixed sizes, as sizes that follow the clock differ.
METHODS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "recycling": {"tree": "2.2.2"},
    "dynamic": {"nodes": 24},
    "pld": {},
}
PROMPTS, TOKENS = 2, 64
# Two tokens whose logits are nearer than so many roundings of the largest one are a tie, which may fall either way.
ROUNDINGS = 16
SHARE = 0.2  # of the time, with all before
LONGEST_COMPILE = {"cuda": 30.0, "cpu": 20.0}  # seconds of an execution that compiles; a guess until one was seen


@dataclass(frozen=True)
class Difference:
    """Where an answer leaves the eager one.

    Attributes:
        at: the first new token, or the first step, that differs, from 0.
        what: `tokens`, or `accepted` where the same tokens came in other steps.
        gap, tie: between the logits of the two tokens, and below which it is one; None for accepted lengths.
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
    """What a method says to these prompts, one after the other with one state."""
    drafter = make_method(method, target, **METHODS[method])
    return [generate(target, drafter, prompt, max_new_tokens=TOKENS) for prompt in prompts]


def first_difference(
    eager: Target, prompts: list[list[int]], expected: list[Generation], found: list[Generation]
) -> Difference | None:
    """The first one, tokens before accepted lengths; None where all is equal."""
    for number, (prompt, one, other) in enumerate(zip(prompts, expected, found, strict=True)):
        if (tokens := _parting(one.tokens, other.tokens)) is not None:
            at, a, b = tokens
            return Difference(number, "tokens", at, a, b, *logit_gap(eager, prompt + one.tokens[:at], a, b))
        if (accepted := _parting(one.accept_lengths, other.accept_lengths)) is not None:
            return Difference(number, "accepted", *accepted)
    return None


def _parting(one: list[int], other: list[int]) -> tuple[int, int, int] | None:
    """Where two lists part, and what each has there; 0 behind the end of the shorter one."""
    pairs = enumerate(zip_longest(one, other, fillvalue=0))
    return next(((at, a, b) for at, (a, b) in pairs if a != b), None)


def logit_gap(target: Target, text: list[int], a: int, b: int) -> tuple[float, float]:
    """How far apart the logits of two tokens behind a text are, and what would be a tie in this type."""
    root = Draft(Tree.chain(0).on(target.device), torch.tensor(text[-1:], device=target.device))
    with target.cache(1) as cache:
        logits = target.prefill(cache, text, root)[-1].float()
    tie = ROUNDINGS * torch.finfo(target.dtype).eps * float(logits.abs().max())
    return abs(float(logits[a] - logits[b])), tie


def judged(dtype: torch.dtype, difference: Difference | None) -> tuple[bool, str]:
    """Whether it passes, and in words. In float32 everything is to be equal; else tokens, up to a tie."""
    if difference is None:
        return True, "equal"
    if dtype != torch.float32:
        if difference.what == "accepted":
            return True, f"equal tokens; {difference}"
        if difference.gap is not None and difference.tie is not None and difference.gap <= difference.tie:
            return True, f"equal up to a tie: {difference}"
    return False, str(difference)


def check_steps(plan: Plan, report: Report) -> list[dict[str, Any]]:
    """A row for each type, execution and method; the report keeps them as they come. What compiles stands last."""
    rows, dtypes = list[dict[str, Any]](), dict.fromkeys((torch.float32, *plan.dtypes))
    if plan.device.type == "cpu":
        dtypes = dict.fromkeys((torch.float32,))  # shorter types differ on devices that are made for them
    groups: list[list[str]] = [["static", "graph"], ["compiled", "tree"]]
    for group in groups:
        ways = [way for way in group if way == "static" or way in plan.executions]
        for dtype in dtypes if ways else ():
            _check_model(plan, report, dtype, ways, rows)
            torch.compiler.reset()  # what was compiled for this model must not count against the next one's limit
    return rows


def _check_model(plan: Plan, report: Report, dtype: torch.dtype, ways: list[str], rows: list[dict[str, Any]]) -> None:
    prompts, guess = spoken_prompts(PROMPTS), LONGEST_COMPILE[plan.device.type]
    model = load(EMBEDDED, plan.device, dtype)
    eager = Target(model, linear=fastest_linear(plan.device, dtype))
    expected = {name: answers(eager, name, prompts) for name in METHODS}
    for way in ways:
        row = {"dtype": named(dtype), "execution": way}
        target: Target | None = None
        for name in METHODS:
            if report.budget.left(SHARE) < (guess if way in ("compiled", "tree") and target is None else 0):
                report.note(
                    f"checks: {way} steps of {name} and what follows in {named(dtype)} were cut, for want of time"
                )
                break
            try:
                # the kernel changes how the model attends: it stands last, and the eager target has answered by then
                target = target or load_target(model, way)
                difference = first_difference(eager, prompts, expected[name], answers(target, name, prompts))
                passed, words = judged(dtype, difference)
            except Exception as error:  # one that fails is a finding, and the others are still to be looked at
                passed, words = False, failure(error)
            rows.append(row | {"method": name, "passed": passed, "found": words})
            report.keep(checks=rows)


def load_target(model: Any, way: str, context: int | None = None) -> Target:
    """A target of an execution as `plan.EXECUTIONS` names them, with the fastest products there."""
    weight = model.get_input_embeddings().weight
    return Target(
        model,
        context=context,
        execution="compiled" if way == "tree" else way,
        tree_attention=way == "tree",
        linear=fastest_linear(weight.device, weight.dtype),
    )


def failure(error: Exception) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


FILES = tuple(f"tests/model/decoding/test_{name}.py" for name in ("attention", "selection", "step", "verification"))


def run_tests(seconds: float, files: tuple[str, ...] = FILES, root: Path = ROOT) -> dict[str, Any]:
    """Run them for at most so long.

    Returns:
        `passed`, `skipped`: how many; `failed`: names; `problem`: why not all of them were run, or None.
    """
    if importlib.util.find_spec("pytest") is None:
        return skipped("pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-v", "--tb=no", "--color=no", "-k", "not without_one", *files]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as told:  # kept where the time runs out
        problem = None
        try:
            done = subprocess.run(command, cwd=root, stdout=told, stderr=subprocess.STDOUT, timeout=seconds)
        except subprocess.TimeoutExpired:
            problem = f"cut after {seconds:.0f} s"
        told.seek(0)
        lines = told.read().splitlines()
    found = read_lines(lines)
    if problem is None and done.returncode not in (0, 1):  # 1: some failed
        problem = f"pytest ended with exit code {done.returncode}: {(lines or ['nothing was said'])[-1][:200]}"
    return found | {"problem": problem}


def read_lines(lines: list[str]) -> dict[str, Any]:
    """Count what `pytest -v` printed; a test's name may hold blanks."""
    outcomes = [
        match.groups() for line in lines if (match := re.match(r"(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", line))
    ]
    counts = {word: sum(outcome == word for _, outcome in outcomes) for word in ("PASSED", "SKIPPED")}
    failed = [name for name, outcome in outcomes if outcome in ("FAILED", "ERROR")]
    return {"passed": counts["PASSED"], "skipped": counts["SKIPPED"], "failed": failed}


def skipped(why: str) -> dict[str, Any]:
    """No test was run."""
    return {"passed": 0, "skipped": 0, "failed": [], "problem": f"skipped: {why}"}
