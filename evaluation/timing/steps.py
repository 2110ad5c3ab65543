"""T(n): seconds of a step by nodes below the root, context and execution; and what making and running steps takes."""

from __future__ import annotations

import gc
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from model.decoding import Target
from model.decoding.static_step import BUCKET

from .checks import LONGEST_COMPILE, failure, load_target
from .floor import Rates, step_cost
from .forecast import forecasts, headline
from .plan import POSITIONS, PUBLISHED, Plan, load, named, random_prompt
from .report import Report
from .stepper import Burst, Stepper

SHARE = 0.88  # of the time, with all before
MOST_ROUNDS = 5
Sizes = tuple[int | None, ...]


@dataclass
class Found:
    """What the sections say, a row a cell: a model, type, execution and context."""

    cells: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    setup: list[dict[str, Any]] = field(default_factory=list)

    def sections(self, mat: float) -> dict[str, Any]:
        """As the report keeps them, with what follows so far: a run that is cut off has its headline."""
        rows = forecasts(self.cells, mat)
        return {
            "steps": {"cells": self.cells, "failures": self.failures},
            "calls": self.calls,
            "setup": self.setup,
            "forecast": rows,
            "headline": headline(rows, mat),
        }


def time_steps(plan: Plan, report: Report, rates: dict[torch.dtype, Rates]) -> Found:
    """All models and types in turn, each for its part of the time that is left; the report keeps each cell."""
    found, subjects = Found(), [(model, dtype) for dtype in plan.dtypes for model in plan.models]
    for number, (name, dtype) in enumerate(subjects):
        left = report.budget.left(SHARE)
        if left <= 0 and number:
            report.note(f"steps: {name} in {named(dtype)} was cut, the time was used up")
            continue
        until = report.budget.spent() + left / (len(subjects) - number)
        where = {"model": name, "dtype": named(dtype)}
        try:
            _Subject(plan, report, found, load(name, plan.device, dtype), where, rates[dtype], until).run()
        except Exception as error:  # too large for the device, as a rule; the others may fit
            found.failures.append(where | {"execution": "-", "context": None, "error": failure(error)})
        torch.compiler.reset()
        gc.collect()  # a target and its hooks, a drafter and its steps name one another
        if plan.device.type == "cuda":
            torch.cuda.empty_cache()
        report.keep(**found.sections(plan.mat))
        report.say(f"steps: {name} in {named(dtype)}: {_summary(found, where)}")
    return found


def _summary(found: Found, where: dict[str, str]) -> str:
    cells = [cell for cell in found.cells if where.items() <= cell.items()]
    best = min(cells, key=lambda cell: float(cell["plain_s"]), default=None)
    told = "" if best is None else f", plain from {1e3 * best['plain_s']:.2f} ms ({best['execution']})"
    failed = sum(where.items() <= row.items() for row in found.failures)
    return f"{len(cells)} contexts and executions timed{told}, {failed} failed"


class _Subject:
    """One model in one type.

    Args:
        until: seconds since the report's start when its time is used up.
    """

    def __init__(
        self,
        plan: Plan,
        report: Report,
        found: Found,
        model: Any,
        where: dict[str, str],
        rates: Rates,
        until: float,
    ) -> None:
        self.plan, self.report, self.found, self.model, self.where = plan, report, found, model, where
        self.rates, self.until = rates, until
        self.sizes: Sizes = (None, *plan.sizes)
        self.compiling = LONGEST_COMPILE[plan.device.type]

    def run(self) -> None:
        """Executions that are timed in turns; on CUDA compiling takes minutes, so what needs none is kept before."""
        if self.plan.device.type == "cuda":
            groups = [[way for way in self.plan.executions if way in ("eager", "static", "graph")], ["compiled"]]
        else:
            groups = [[way for way in self.plan.executions if way != "tree"]]
        for group in [*groups, ["tree"]]:  # the kernel changes how the model attends, so it stands last
            with ExitStack() as opened:
                self._group([way for way in group if way in self.plan.executions], opened)

    def _group(self, ways: list[str], opened: ExitStack) -> None:
        steppers = []
        for way in ways:
            if way in ("compiled", "tree") and self._left() < self.compiling:
                self._cut(f"{way}: compiling would not fit into the time")
                continue
            try:
                target = load_target(self.model, way, min(max(self.plan.contexts) + BUCKET, POSITIONS))
                steppers.append(opened.enter_context(Stepper.opened(way, target, self.plan.sizes)))
            except Exception as error:
                self._failed(way, None, error)
        for number, context in enumerate(self.plan.contexts):
            for stepper in list(steppers) if number else ():
                # the second context compiles once more, with its size as a symbol, which then serves all
                again = self.compiling if number == 1 and stepper.name in ("compiled", "tree") else 0.0
                if self._left() <= again:
                    self._cut(f"{stepper.name} from {context} tokens on: the time was used up")
                    steppers.remove(stepper)
            steppers = [stepper for stepper in steppers if self._prepared(stepper, context)]
            self._timed(steppers, context, self._left() / (len(self.plan.contexts) - number))
            self.report.keep(**self.found.sections(self.plan.mat))

    def _prepared(self, stepper: Stepper, context: int) -> bool:
        """Make all steps at a context; False if one fails."""
        started, made = self.report.budget.spent(), []
        reserved = _reserved(self.plan.device)
        try:
            stepper.go_to(random_prompt(stepper.target.vocab_size, context))
            for n in self.sizes:
                made.append(stepper.burst(n, 1).setup_s)
        except Exception as error:
            self._failed(stepper.name, context, error)
            return False
        if stepper.name in ("compiled", "tree") and context == self.plan.contexts[0]:
            self.compiling = self.report.budget.spent() - started
        if stepper.name != "eager":
            row = {"execution": stepper.name, "context": context, "steps": len(made), "first_s": made[0]}
            row |= {"others_s": sum(made[1:]), "slowest_other_s": max(made[1:])}
            row["bytes"] = None if reserved is None else (_reserved(self.plan.device) or 0) - reserved
            self.found.setup.append(self.where | row)
        return True

    def _timed(self, steppers: list[Stepper], context: int, seconds: float) -> None:
        """Rounds in which sizes and executions take turns, at least one; then what a step asks of the device."""
        until, rounds = self.report.budget.spent() + seconds, 0
        times: dict[str, dict[int | None, list[Burst]]] = {s.name: {n: [] for n in self.sizes} for s in steppers}
        while steppers and rounds < MOST_ROUNDS and (not rounds or self.report.budget.spent() < until):
            rounds += 1
            for n in self.sizes:
                for stepper in list(steppers):
                    try:
                        times[stepper.name][n].append(stepper.burst(n))
                    except Exception as error:
                        self._failed(stepper.name, context, error)
                        steppers.remove(stepper)
        for stepper in steppers:
            where = self.where | {"execution": stepper.name, "context": context}
            bursts = times[stepper.name]
            self.found.cells.append(where | cell(bursts, rounds) | floor(stepper.target, context, bursts, self.rates))
            for n in (None, PUBLISHED) if context == self.plan.contexts[0] else ():
                try:
                    calls = stepper.calls(n)
                except Exception as error:  # a profiler that this machine forbids
                    calls = failure(error)
                self.found.calls.append(where | {"nodes": n, "calls": calls})

    def _left(self) -> float:
        return self.until - self.report.budget.spent()

    def _cut(self, what: str) -> None:
        self.report.note(f"steps: {self.where['model']} in {self.where['dtype']}, {what}; cut")

    def _failed(self, way: str, context: int | None, error: Exception) -> None:
        self.found.failures.append(self.where | {"execution": way, "context": context, "error": failure(error)})


def cell(bursts: dict[int | None, list[Burst]], rounds: int) -> dict[str, Any]:
    """Medians over rounds: of plain decoding, and T(n) by nodes, as text, which JSON's keys are."""
    middle = {n: statistics.median(burst.seconds for burst in own) for n, own in bursts.items()}
    return {
        "rounds": rounds,
        "plain_s": middle[None],
        "step_s": {str(n): seconds for n, seconds in middle.items() if n is not None},
    }


def floor(target: Target, context: int, bursts: dict[int | None, list[Burst]], rates: Rates) -> dict[str, float]:
    """What plain decoding has to read (weights and used cache), and its share of the step at the rate of a copy."""
    cost = step_cost(target, 1, context)
    least = cost.bytes / rates.bytes_per_second
    plain = statistics.median(burst.seconds for burst in bursts[None])
    return {"plain_bytes": cost.bytes, "floor_s": least, "floor_share": least / plain}


def _reserved(device: torch.device) -> int | None:
    """Bytes that torch holds of a GPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else None
