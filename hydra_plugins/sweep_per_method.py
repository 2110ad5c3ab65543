"""The sweeper of `python -m evaluation.run -m`. Hydra finds plugins in a package of this name and nowhere else.

`evaluation/configuration/jobs.py` expands the jobs. They are written down (`sweep.json`) before the first one starts,
so that a report can name what is missing. Jobs whose method lacks a companion are named, all together, and left out.
"""

from __future__ import annotations

import shlex
import sys
from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from evaluation.configuration.config import register_names
from evaluation.configuration.fingerprint import SAVED
from evaluation.configuration.jobs import plan
from evaluation.loading.processes import on_first_rank
from evaluation.records.sweeps import Planned, available, write_down
from evaluation.running.scheduling import report_at_end, run_planned

BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"  # by name: Hydra imports its plugins anew

register_names()  # for whoever composes configs/: Hydra imports its plugins first


class PerMethodSweeper(Sweeper):
    """Runs the jobs of a sweep: in this process, or by a launcher."""

    def __init__(self, **_: Any) -> None:  # `plan` reads the settings
        pass

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.loader = config, hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        jobs = plan(self.config, self.loader)
        if self.config.run_dir is None:
            on_first_rank(write_down, jobs, command(self.config.hydra.sweeper.typed))
        left, notes = available(jobs)
        if notes:
            print("\n  ".join(notes), file=sys.stderr)
        if self.config.hydra.launcher._target_ == BASIC:
            run_planned(left)
        else:
            self._launch([job for job in left if job.config.start != SAVED])
            self._launch([job for job in left if job.config.start == SAVED])  # from what a hot run left
        for folder in dict.fromkeys(job.folder for job in jobs):
            on_first_rank(report_at_end, self.config, folder)

    def _launch(self, jobs: list[Planned]) -> None:
        for done in self.launcher.launch([job.overrides for job in jobs], initial_job_idx=0) if jobs else ():
            _ = done.return_value  # raises what the job raised


def command(words: list[str]) -> str:
    """Return what to type to give the same sweep again."""
    return f"bash eval.sh {shlex.join(words)}"
