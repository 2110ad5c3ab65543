"""python -m evaluation.run model=... bench=... method=... tree=... start=...: one run; with -m and lists, a sweep.

A sweep's jobs are written down (`sweep.json`) before the first one starts, so that a report can name what is missing.
Jobs whose method lacks a companion are named, all together, and left out.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig

from model.errors import UserError
from model.files import ROOT

from .configuration.config import checked_config
from .configuration.fingerprint import SAVED
from .configuration.jobs import Composed, compose
from .errors import config_errors, fail, noted, one_line, user_errors
from .loading.locks import keep_devices
from .records.sweeps import Planned, available, write_down
from .report import report
from .running.scheduling import Job, run_jobs

BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"  # by name: Hydra imports its plugins anew


def run_command(composed: Composed, words: Sequence[str]) -> list[str]:
    """Run the jobs of a command line, in this process or by a launcher, and report their experiments.

    Returns:
        A line for each job's error that the user can fix.
    """
    jobs, config, failures = composed.jobs, composed.config, list[str]()
    if composed.is_sweep:
        if config.run_dir is None:
            write_down(jobs, f"bash eval.sh {shlex.join(words)}")
        jobs, notes = available(jobs)
        if notes:
            print("\n  ".join(notes), file=sys.stderr)
    if config.hydra.launcher._target_ == BASIC:
        checked = []
        for job in jobs:
            with noted(failures):
                checked.append(Job(checked_config(job.config), job.overrides))
        run_jobs(checked, failures)
    else:
        _launch(composed, [job for job in jobs if job.config.start != SAVED], failures)
        _launch(composed, [job for job in jobs if job.config.start == SAVED], failures)  # from what a hot run left
    for folder in dict.fromkeys(job.folder for job in composed.jobs):
        if config.run_dir is None and any(folder.glob("runs/*/answers.jsonl")):
            report(folder)
    return failures


def _launch(composed: Composed, jobs: Sequence[Planned], failures: list[str]) -> None:
    if jobs:
        context = HydraContext(composed.loader, hydra._internal.callbacks.Callbacks())
        launcher = Plugins.instance().instantiate_launcher(context, launched_job, composed.config)
        for done in launcher.launch([job.overrides for job in jobs], initial_job_idx=0):
            failures += [line for line in done.return_value if line not in failures]  # raises what the job raised


def launched_job(config: DictConfig) -> list[str]:
    """Run the job that a launcher started, perhaps in another process; return its error that the user can fix."""
    failures: list[str] = []
    with noted(failures):
        run_jobs([Job(checked_config(config), [*HydraConfig.get().overrides.task])])
    return failures


def main() -> None:
    """The command line; flags other than these are Hydra's, which prints configurations and help."""
    failures: list[str] = []
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--config-dir")
    flags, words = parser.parse_known_args()
    with user_errors(), keep_devices():
        if any(word.startswith("-") for word in words):
            _by_hydra()
        else:
            composed = compose(words, multirun=flags.multirun, config_dir=flags.config_dir)
            failures = run_command(composed, sys.argv[1:])
    if failures:
        fail("; ".join(failures))


def _by_hydra() -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, which are printed as one line
    try:
        with config_errors():
            hydra.main(version_base=None, config_path=str(ROOT / "configs"), config_name="config")(_run_nothing)()
    except ValueError as error:  # flags that do not go together
        raise UserError(one_line(error)) from None


def _run_nothing(config: DictConfig) -> None:
    raise UserError(
        "flags but -m and --config-dir are for printing configurations and help, and none of them was given"
    )


if __name__ == "__main__":
    main()
