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

from model.errors import UserError, new_names
from model.files import ROOT

from .configuration.config import checked
from .configuration.jobs import listed
from .errors import Failure, fail, one_line, told, user_errors
from .loading import processes
from .loading.locks import keeping
from .running.together import Job, run_alone, waits


def run(cfg: DictConfig, answer_file: Path | None = None) -> list[Path]:
    """A configuration, as often as it says: load, warm up, answer what is not answered yet, summarise.

    Returns:
        The directories, one a repeat.

    Raises:
        UserError: whatever a user can mend.
    """
    return run_alone(Job(checked(cfg)), answer_file)


@hydra.main(version_base=None, config_path=str(ROOT / "configs"), config_name="config")
def _job(cfg: DictConfig) -> Failure | None:
    try:
        with processes.one_voice():
            job = Job(checked(cfg), [str(override) for override in HydraConfig.get().overrides.task])
            if not waits(job):
                run_alone(job)
    except Exception as error:
        message = told(error)
        if message is None:
            raise
        return Failure(message)  # noted and not raised: the other jobs of a sweep go on
    return None


def main() -> None:
    """The command line."""
    Failure.noted.clear()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let Hydra's own errors come through to us, to be told in one line
    with user_errors(), processes.one_voice(), keeping():
        processes.check_launcher(sys.argv[1:])
        sys.argv[1:] = listed(sys.argv[1:])
        try:
            _job()
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(config_error(error)) from None
        processes.leave()
    if Failure.noted:
        fail("; ".join(Failure.noted))


def config_error(error: Exception) -> str:
    """Hydra's message on one line, without its hints about stack traces."""
    text = one_line(error)
    if "hydra/launcher" in text:
        return "this launcher is not installed; requirements-cluster.txt has its pip line"
    known = re.search(r"Could not override '(\S+)'", text)
    if known and (renamed := new_names(known[1])):
        return f"{known[1]}: no such setting{renamed}"
    return re.sub(r"\s*(full_key: \S+|object_type=\S+|Config search path:.*|Set the environment variable.*)", "", text)


if __name__ == "__main__":
    main()
