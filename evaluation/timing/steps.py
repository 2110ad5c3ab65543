"""Measure T(n), the seconds of a step by nodes, context and execution; also setup and device calls."""

from __future__ import annotations

import gc
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from model.decoding import Target
from model.decoding.static_step import BUCKET

from .checks import LONGEST_COMPILE, error_line, load_target
from .floor import Rates, step_cost
from .forecast import forecasts, headline
from .plan import POSITIONS, PUBLISHED, ReportPlan, dtype_name, load, random_prompt
from .report import Report
from .stepper import Burst, Stepper

SHARE = 0.88  # of the time, with all sections before
MOST_ROUNDS = 5
Sizes = tuple[int | None, ...]


@dataclass
class Measurements:
    """Rows of the sections, one per cell: a model, type, execution and context."""

    cells: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    setup: list[dict[str, Any]] = field(default_factory=list)

    def sections(self, mat: float) -> dict[str, Any]:
        """Return the report's sections, with forecast and headline so far, in case the run is cut off."""
        rows = forecasts(self.cells, mat)
        return {
            "steps": {"cells": self.cells, "failures": self.failures},
            "calls": self.calls,
            "setup": self.setup,
            "forecast": rows,
            "headline": headline(rows, mat),
        }


def time_steps(plan: ReportPlan, report: Report, rates: dict[torch.dtype, Rates]) -> Measurements:
    """Time all models and types in turn, each in its share of the remaining time; the report saves each cell."""
    measured, subjects = Measurements(), [(model, dtype) for dtype in plan.dtypes for model in plan.models]
    for number, (name, dtype) in enumerate(subjects):
        left = report.budget.left(SHARE)
        if left <= 0 and number:
            report.note(f"steps: {name} in {dtype_name(dtype)} was cut, the time was used up")
            continue
        until = report.budget.spent() + left / (len(subjects) - number)
        where = {"model": name, "dtype": dtype_name(dtype)}
        try:
            _ModelTimer(plan, report, measured, load(name, plan.device, dtype), where, rates[dtype], until).run()
        except Exception as error:  # usually too large for the device; others may fit
            measured.failures.append(where | {"execution": "-", "context": None, "error": error_line(error)})
        torch.compiler.reset()
        gc.collect()  # target and hooks, drafter and steps refer to each other
        if plan.device.type == "cuda":
            torch.cuda.empty_cache()
        report.keep(**measured.sections(plan.mat))
        report.say(f"steps: {name} in {dtype_name(dtype)}: {_summary(measured, where)}")
    return measured


def _summary(measured: Measurements, where: dict[str, str]) -> str:
    cells = [cell for cell in measured.cells if where.items() <= cell.items()]
    best = min(cells, key=lambda cell: float(cell["plain_s"]), default=None)
    plain = "" if best is None else f", plain from {1e3 * best['plain_s']:.2f} ms ({best['execution']})"
    failed = sum(where.items() <= row.items() for row in measured.failures)
    return f"{len(cells)} contexts and executions timed{plain}, {failed} failed"


class _ModelTimer:
    """Times one model in one type.

    Args:
        until: the end of its time, in seconds since the report's start.
    """

    def __init__(
        self,
        plan: ReportPlan,
        report: Report,
        measured: Measurements,
        model: Any,
        where: dict[str, str],
        rates: Rates,
        until: float,
    ) -> None:
        self.plan, self.report, self.measured, self.model, self.where = plan, report, measured, model, where
        self.rates, self.until = rates, until
        self.sizes: Sizes = (None, *plan.sizes)
        self.compile_seconds = LONGEST_COMPILE[plan.device.type]

    def run(self) -> None:
        """Time groups of interleaved executions; on CUDA those that compile, which takes minutes, come later."""
        if self.plan.device.type == "cuda":
            groups = [[way for way in self.plan.executions if way in ("eager", "static", "graph")], ["compiled"]]
        else:
            groups = [[way for way in self.plan.executions if way != "tree"]]
        for group in [*groups, ["tree"]]:  # the kernel changes the model's attention, so it comes last
            with ExitStack() as opened:
                self._group([way for way in group if way in self.plan.executions], opened)

    def _group(self, ways: list[str], opened: ExitStack) -> None:
        steppers = []
        for way in ways:
            if way in ("compiled", "tree") and self._left() < self.compile_seconds:
                self._cut(f"{way}: compiling would not fit into the time")
                continue
            try:
                target = load_target(self.model, way, min(max(self.plan.contexts) + BUCKET, POSITIONS))
                steppers.append(opened.enter_context(Stepper.opened(way, target, self.plan.sizes)))
            except Exception as error:
                self._failed(way, None, error)
        for number, context in enumerate(self.plan.contexts):
            for stepper in list(steppers) if number else ():
                # the second context compiles again, with a symbolic size, which serves all further ones
                again = self.compile_seconds if number == 1 and stepper.name in ("compiled", "tree") else 0.0
                if self._left() <= again:
                    self._cut(f"{stepper.name} from {context} tokens on: the time was used up")
                    steppers.remove(stepper)
            steppers = [stepper for stepper in steppers if self._prepare(stepper, context)]
            self._time(steppers, context, self._left() / (len(self.plan.contexts) - number))
            self.report.keep(**self.measured.sections(self.plan.mat))

    def _prepare(self, stepper: Stepper, context: int) -> bool:
        """Build the steps of all sizes at a context; False if one fails."""
        started, setup = self.report.budget.spent(), []
        reserved = _reserved(self.plan.device)
        try:
            stepper.go_to(random_prompt(stepper.target.vocab_size, context))
            for n in self.sizes:
                setup.append(stepper.burst(n, 1).setup_s)
        except Exception as error:
            self._failed(stepper.name, context, error)
            return False
        if stepper.name in ("compiled", "tree") and context == self.plan.contexts[0]:
            self.compile_seconds = self.report.budget.spent() - started
        if stepper.name != "eager":
            row = {"execution": stepper.name, "context": context, "steps": len(setup), "first_s": setup[0]}
            row |= {"others_s": sum(setup[1:]), "slowest_other_s": max(setup[1:])}
            row["bytes"] = None if reserved is None else (_reserved(self.plan.device) or 0) - reserved
            self.measured.setup.append(self.where | row)
        return True

    def _time(self, steppers: list[Stepper], context: int, seconds: float) -> None:
        """Run rounds of interleaved sizes and executions, at least one; then count a step's device calls."""
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
            self.measured.cells.append(
                where | cell(bursts, rounds) | floor(stepper.target, context, bursts, self.rates)
            )
            for n in (None, PUBLISHED) if context == self.plan.contexts[0] else ():
                try:
                    calls = stepper.calls(n)
                except Exception as error:  # the machine may forbid the profiler
                    calls = error_line(error)
                self.measured.calls.append(where | {"nodes": n, "calls": calls})

    def _left(self) -> float:
        return self.until - self.report.budget.spent()

    def _cut(self, what: str) -> None:
        self.report.note(f"steps: {self.where['model']} in {self.where['dtype']}, {what}; cut")

    def _failed(self, way: str, context: int | None, error: Exception) -> None:
        self.measured.failures.append(self.where | {"execution": way, "context": context, "error": error_line(error)})


def cell(bursts: dict[int | None, list[Burst]], rounds: int) -> dict[str, Any]:
    """Return medians over rounds: of plain decoding, and T(n) by nodes (text, as JSON's keys are)."""
    medians = {n: statistics.median(burst.seconds for burst in timed) for n, timed in bursts.items()}
    return {
        "rounds": rounds,
        "plain_s": medians[None],
        "step_s": {str(n): seconds for n, seconds in medians.items() if n is not None},
    }


def floor(target: Target, context: int, bursts: dict[int | None, list[Burst]], rates: Rates) -> dict[str, float]:
    """Return the bytes that plain decoding reads (weights, used cache), and their copy time as a share of its step."""
    cost = step_cost(target, 1, context)
    least = cost.bytes / rates.bytes_per_second
    plain = statistics.median(burst.seconds for burst in bursts[None])
    return {"plain_bytes": cost.bytes, "floor_s": least, "floor_share": least / plain}


def _reserved(device: torch.device) -> int | None:
    """Return the GPU bytes that torch has reserved; None without a GPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else None
