"""python -m evaluation.run model=... bench=... method=... tree=... start=...: one run; with -m and lists, a sweep.

A sweep's jobs are written down (`sweep.json`) before the first one starts, so that a report can name what is missing.
Jobs whose method lacks a companion are named, all together, and left out.
"""

from __future__ import annotations

import argparse
import os
import re
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
from .errors import Failure, config_errors, fail, one_line, user_errors
from .loading import processes
from .loading.locks import keep_devices
from .records.sweeps import Planned, available, write_down
from .report import report
from .running.scheduling import Job, run_jobs

BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"  # by name: Hydra imports its plugins anew
FLAGS = re.compile(r"Only one of --run|The --resolve flag")  # Hydra's ValueErrors: flags that do not go together


def run_command(composed: Composed, words: Sequence[str]) -> None:
    """Run the jobs of a command line, in this process or by a launcher, and report their experiments."""
    jobs, config = composed.jobs, composed.config
    if composed.is_sweep:
        if config.run_dir is None:
            processes.on_first_rank(write_down, jobs, f"bash eval.sh {shlex.join(words)}")
        jobs, notes = available(jobs)
        if notes:
            print("\n  ".join(notes), file=sys.stderr)
    if config.hydra.launcher._target_ == BASIC:
        run_jobs(_checked(jobs), processes.note_failure)
    else:
        _launch(composed, [job for job in jobs if job.config.start != SAVED])
        _launch(composed, [job for job in jobs if job.config.start == SAVED])  # from what a hot run left
    for folder in dict.fromkeys(job.folder for job in composed.jobs):
        if config.run_dir is None and any(folder.glob("runs/*/answers.jsonl")):
            processes.on_first_rank(report, folder)


def _checked(planned: Sequence[Planned]) -> list[Job]:
    """Return the jobs whose settings are right, and note the others."""
    jobs = []
    for job in planned:
        try:
            jobs.append(Job(checked_config(job.config), job.overrides))
        except Exception as error:
            processes.note_failure(error)
    return jobs


def _launch(composed: Composed, jobs: Sequence[Planned]) -> None:
    if jobs:
        context = HydraContext(composed.loader, hydra._internal.callbacks.Callbacks())
        launcher = Plugins.instance().instantiate_launcher(context, launched_job, composed.config)
        for done in launcher.launch([job.overrides for job in jobs], initial_job_idx=0):
            _ = done.return_value  # raises what the job raised


def launched_job(config: DictConfig) -> Failure | None:
    """Run the job that a launcher started, perhaps in another process."""
    try:
        run_jobs([Job(checked_config(config), [*HydraConfig.get().overrides.task])])
    except Exception as error:
        return processes.note_failure(error)
    return None


def main() -> None:
    """The command line; flags other than these are Hydra's, which prints configurations and help."""
    Failure.noted.clear()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--config-dir")
    flags, words = parser.parse_known_args()
    with user_errors(), processes.ranks(sys.argv[1:]), keep_devices():
        if any(word.startswith("-") for word in words):
            _by_hydra()
        else:
            run_command(compose(words, multirun=flags.multirun, config_dir=flags.config_dir), sys.argv[1:])
    if Failure.noted:
        fail("; ".join(Failure.noted))


def _by_hydra() -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, which are printed as one line
    try:
        with config_errors():
            hydra.main(version_base=None, config_path=str(ROOT / "configs"), config_name="config")(launched_job)()
    except ValueError as error:
        if not FLAGS.match(str(error)):
            raise
        raise UserError(one_line(error)) from None


if __name__ == "__main__":
    main()
