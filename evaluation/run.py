"""python -m evaluation.run model=... bench=... method=... tree=... start=...: one run; with -m and lists, a sweep."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from model.errors import UserError
from model.files import ROOT

from .configuration.config import checked_config
from .configuration.jobs import listed
from .errors import Failure, fail, one_line, user_errors, user_message
from .loading import processes
from .loading.locks import keep_devices
from .running.scheduling import Job, defer, run_alone

FLAGS = re.compile(r"Only one of --run|The --resolve flag")  # Hydra's ValueErrors: flags that do not go together


def run(cfg: DictConfig, answer_file: Path | None = None) -> list[Path]:
    """Run all repeats of a configuration: load, warm up, answer the remaining questions, summarise.

    Returns:
        The directories, one per repeat.

    Raises:
        UserError: a mistake of the user.
    """
    return run_alone(Job(checked_config(cfg)), answer_file)


@hydra.main(version_base=None, config_path=str(ROOT / "configs"), config_name="config")
def _job(cfg: DictConfig) -> Failure | None:
    try:
        with processes.report_first_error():
            job = Job(checked_config(cfg), [str(override) for override in HydraConfig.get().overrides.task])
            if not defer(job):
                run_alone(job)
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        return Failure(message)  # noted, not raised: the other jobs of a sweep go on
    return None


def main() -> None:
    """The command line."""
    Failure.noted.clear()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, which are printed below as one line
    with user_errors(), processes.report_first_error(), keep_devices():
        processes.check_launcher(sys.argv[1:])
        sys.argv[1:] = listed(sys.argv[1:])
        try:
            _job()
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(config_error(error)) from None
        except ValueError as error:
            if not FLAGS.match(str(error)):
                raise
            raise UserError(one_line(error)) from None
        processes.destroy_group()
    if Failure.noted:
        fail("; ".join(Failure.noted))


def config_error(error: Exception) -> str:
    """Return Hydra's message on one line, without its hints about stack traces."""
    text = one_line(error)
    if "hydra/launcher" in text:
        return "this launcher is not installed; requirements-cluster.txt has its pip line"
    return re.sub(r"\s*(full_key: \S+|object_type=\S+|Config search path:.*|Set the environment variable.*)", "", text)


if __name__ == "__main__":
    main()
