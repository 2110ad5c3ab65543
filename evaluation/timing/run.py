"""The sections one after the other, each kept as soon as it is done."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import Any

import torch

from model.errors import UserError

from ..records.provenance import describe_device, git_state, versions
from .against import ratios, told
from .checks import check_steps, run_tests, skipped
from .floor import Rates, measure_rates
from .kernel import compare_kernels, compare_searches
from .page import UNTRIED, failed
from .plan import DTYPES, Budget, Plan, named
from .report import Report
from .steps import time_steps

TESTS = 0.15  # of the time, at most


def make_report(plan: Plan, folder: Path, before: list[dict[str, Any]] | None = None) -> Report:
    """Measure, keep and print all of it.

    Args:
        before: the cells of another report, to lay beside.

    Raises:
        UserError: the disk refuses the report, or the device a type that is to be timed.
        KeyboardInterrupt: with the report so far on the disk.
    """
    report = Report(folder, Budget(plan.minutes), plan.mat)
    print(UNTRIED)
    report.keep()  # so that a folder that cannot be written to is told now
    _device(plan, report, rates := dict[torch.dtype, Rates]())
    _checks(plan, report)
    found = time_steps(plan, report, rates)
    kernel = compare_kernels(plan, report)
    report.keep(kernel=kernel)
    report.say(f"tree attention kernel: {kernel['problem'] or str(len(kernel['rows'])) + ' cases'}")
    searches = compare_searches(plan, report)
    report.say(f"greatest logits: {len(searches['rows'])} vocabularies")
    report.keep(**found.sections(plan.mat))  # with nothing timed there is a headline, too
    if before is not None:
        beside = ratios(found.cells, before)
        report.keep(against=beside)
        print("\n".join(told(beside)))
    report.keep(done=True)
    for note in report.data["notes"]:
        print(f"note: {note}")
    for line in failed(report.data):
        print(f"FAILED: {line}")
    print(report.data["headline"])
    return report


def _device(plan: Plan, report: Report, rates: dict[torch.dtype, Rates]) -> None:
    """Section 1."""
    about: dict[str, Any] = {
        "device": describe_device(plan.device),
        "platform": platform.platform(),
        "versions": versions(),
    }
    about |= {"cuda": torch.version.cuda, "threads": torch.get_num_threads(), "git": git_state()}
    about["rates"] = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        try:
            rates[dtype] = measure_rates(plan.device, dtype)
        except RuntimeError as error:  # a type that this device does not multiply
            report.note(f"device: no {name} product ({' '.join(str(error).split())[:120]})")
            continue
        about["rates"][name] = dataclasses.asdict(rates[dtype])
        report.keep(device=about)
    for dtype in plan.dtypes:
        if dtype not in rates:
            raise UserError(f"--dtype {named(dtype)}: this device does not multiply it")
    first = rates[plan.dtypes[0]]
    report.say(
        f"device: {about['device']}, {first.bytes_per_second / 1e9:.0f} GB/s copied, "
        f"{first.flop_per_second / 1e12:.2f} TFLOP/s in {named(plan.dtypes[0])}"
    )


def _checks(plan: Plan, report: Report) -> None:
    """Section 2."""
    rows = check_steps(plan, report)
    if not plan.tests:
        tests = skipped("left out by --no-tests")
    elif plan.device.type != "cuda":
        tests = skipped("they are for CUDA")
    else:
        tests = run_tests(TESTS * report.budget.seconds)
    report.keep(checks=rows, tests=tests)
    good = sum(row["passed"] for row in rows)
    report.say(f"checks: {good} of {len(rows)} passed; tests: {tests['problem'] or str(tests['passed']) + ' passed'}")
