"""Make a device report: run its sections one after the other, and save each at once."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import Any

import torch

from model.errors import UserError

from ..records.provenance import describe_device, git_state, versions
from .against import ratio_lines, ratios
from .checks import check_steps, run_tests, skipped_tests
from .floor import Rates, measure_rates
from .kernel import compare_kernels, compare_searches
from .page import UNTRIED, failures
from .plan import DTYPES, Budget, ReportPlan, dtype_name
from .report import Report
from .steps import time_steps

TESTS = 0.15  # share of the time, at most


def make_report(plan: ReportPlan, folder: Path, before: list[dict[str, Any]] | None = None) -> Report:
    """Measure, save and print all sections.

    Args:
        before: the cells of another report to compare with.

    Raises:
        UserError: the report cannot be written, or the device does not support a type to be timed.
        KeyboardInterrupt: the report so far is saved.
    """
    report = Report(folder, Budget(plan.minutes), plan.mat)
    print(UNTRIED)
    report.keep()  # raises now if the folder cannot be written to
    _device(plan, report, rates := dict[torch.dtype, Rates]())
    _checks(plan, report)
    measured = time_steps(plan, report, rates)
    kernel = compare_kernels(plan, report)
    report.keep(kernel=kernel)
    report.say(f"tree attention kernel: {kernel['problem'] or str(len(kernel['rows'])) + ' cases'}")
    searches = compare_searches(plan, report)
    report.say(f"greatest logits: {len(searches['rows'])} vocabularies")
    report.keep(**measured.sections(plan.mat))  # a headline even if nothing was timed
    if before is not None:
        compared = ratios(measured.cells, before)
        report.keep(against=compared)
        print("\n".join(ratio_lines(compared)))
    report.keep(done=True)
    for note in report.data["notes"]:
        print(f"note: {note}")
    for line in failures(report.data):
        print(f"FAILED: {line}")
    print(report.data["headline"])
    return report


def _device(plan: ReportPlan, report: Report, rates: dict[torch.dtype, Rates]) -> None:
    """Write section 1: the device and its rates."""
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
        except RuntimeError as error:  # this device does not multiply the type
            report.note(f"device: no {name} product ({' '.join(str(error).split())[:120]})")
            continue
        about["rates"][name] = dataclasses.asdict(rates[dtype])
        report.keep(device=about)
    for dtype in plan.dtypes:
        if dtype not in rates:
            raise UserError(f"--dtype {dtype_name(dtype)}: this device does not multiply it")
    first = rates[plan.dtypes[0]]
    report.say(
        f"device: {about['device']}, {first.bytes_per_second / 1e9:.0f} GB/s copied, "
        f"{first.flop_per_second / 1e12:.2f} TFLOP/s in {dtype_name(plan.dtypes[0])}"
    )


def _checks(plan: ReportPlan, report: Report) -> None:
    """Write section 2: checks and tests."""
    rows = check_steps(plan, report)
    if not plan.tests:
        tests = skipped_tests("left out by --no-tests")
    elif plan.device.type != "cuda":
        tests = skipped_tests("they are for CUDA")
    else:
        tests = run_tests(TESTS * report.budget.seconds)
    report.keep(checks=rows, tests=tests)
    passed = sum(row["passed"] for row in rows)
    report.say(f"checks: {passed} of {len(rows)} passed; tests: {tests['problem'] or str(tests['passed']) + ' passed'}")
