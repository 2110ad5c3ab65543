"""python -m evaluation.run model=... bench=... method=... tree=... start=...: one run; with -m and lists, a sweep."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from model.errors import UserError
from model.files import ROOT

from .configuration.config import checked_config
from .configuration.jobs import for_hydra
from .errors import Failure, config_errors, fail, one_line, user_errors
from .loading import processes
from .loading.locks import keep_devices
from .running.scheduling import Job, report_at_end, run_jobs

FLAGS = re.compile(r"Only one of --run|The --resolve flag")  # Hydra's ValueErrors: flags that do not go together


@hydra.main(version_base=None, config_path=str(ROOT / "configs"), config_name="config")
def _job(cfg: DictConfig) -> Failure | None:
    """Run a single run, or a job that a launcher started."""
    failure, hydra_config = None, HydraConfig.get()
    try:
        run_jobs([Job(checked_config(cfg), [*hydra_config.overrides.task])])
    except Exception as error:
        failure = processes.note_failure(error)
    if hydra_config.mode == RunMode.RUN:  # else the sweeper does it
        processes.on_first_rank(report_at_end, cfg, Path(cfg.results_dir) / str(cfg.name))
    return failure


def main() -> None:
    """The command line."""
    Failure.noted.clear()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, which are printed below as one line
    with user_errors(), processes.ranks(sys.argv[1:]), keep_devices():
        sys.argv[1:] = for_hydra(sys.argv[1:])
        try:
            with config_errors():
                _job()
        except ValueError as error:
            if not FLAGS.match(str(error)):
                raise
            raise UserError(one_line(error)) from None
    if Failure.noted:
        fail("; ".join(Failure.noted))


if __name__ == "__main__":
    main()
