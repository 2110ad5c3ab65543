"""python -m evaluation.device_report: step times and checks on this device, as JSON and a page, in at most 8 minutes.

Needs only torch, transformers, safetensors and numpy, and fetches nothing. Random weights of a shape give step times
only. This project has never run its CUDA parts on a GPU; the report says so first. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

from .errors import INTERRUPTED, fail, user_errors
from .loading.devices import choose_device
from .loading.locks import exclusive
from .loading.settings import ModelSettings
from .timing.against import read_report
from .timing.page import failures
from .timing.plan import EMBEDDED, make_plan
from .timing.run import make_report


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evaluation.device_report", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/device_report"), help="folder of both files")
    parser.add_argument("--shapes", help="embedded, vicuna-7b, llama-3-8b, small, ...: a,b (default: the device's)")
    parser.add_argument("--dtype", default="auto", help="of the steps that are timed: a,b (default: float16 on CUDA)")
    parser.add_argument("--contexts", help="tokens before a step: a,b; the first one counts most")
    parser.add_argument("--executions", help="eager, static, graph, compiled, tree (compiled, with the kernel): a,b")
    parser.add_argument("--mat", help="of the published tree, for the forecast (default: as published, Vicuna-7B)")
    parser.add_argument("--against", type=Path, help="the report.json of another run, to compare with")
    parser.add_argument("--minutes", default="8", help="time budget; the report lists what was cut (default 8)")
    parser.add_argument("--no-tests", action="store_true", help="skip the tests for CUDA")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    return parser


def main() -> None:
    arguments = flags().parse_args()
    where = arguments.out / "report.html"
    with user_errors():
        before = None if arguments.against is None else read_report(arguments.against)
        plan = make_plan(
            choose_device(arguments.device),
            shapes=arguments.shapes,
            dtype=arguments.dtype,
            contexts=arguments.contexts,
            executions=arguments.executions,
            mat=arguments.mat,
            minutes=arguments.minutes,
            tests=not arguments.no_tests,
        )
        with exclusive(ModelSettings("device_report", EMBEDDED, device=arguments.device)) as settings:
            plan = dataclasses.replace(plan, device=choose_device(settings.device))
            if plan.device.type == "cuda":
                torch.cuda.set_device(plan.device)
            try:
                report = make_report(plan, arguments.out, before)
            except KeyboardInterrupt:
                fail(f"stopped; the report so far: {where}", code=INTERRUPTED)
        print(f"report: {where}")
    sys.exit(1 if failures(report.data) else 0)


if __name__ == "__main__":
    main()
