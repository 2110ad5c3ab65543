"""python -m evaluation.run model=... bench=... method=... tree=... start=...: one run; with -m and lists, a sweep."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import NoneType
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from model.errors import UserError
from model.files import ROOT

from .running import processes
from .running.companions import make_ready
from .running.errors import Failure, fail, one_line, told, user_errors
from .running.locks import keeping
from .running.together import Job, run_alone, waits

_NUMBER, _TEXT = ((int, NoneType), "a whole number or null"), ((str,), "a text")
KINDS: dict[str, tuple[tuple[type, ...], str]] = {  # what would otherwise fail far from here
    "seed": ((int,), "a whole number"),
    "bench.path": _TEXT,
    "bench.order": _TEXT,
    "bench.begin": _NUMBER,
    "bench.end": _NUMBER,
    "bench.per_category": _NUMBER,
    "bench.categories": ((list, NoneType), "a list of subtasks or null, as [qa,rag]"),
    "model.context": _NUMBER,
}


def run(cfg: DictConfig, answer_file: Path | None = None) -> list[Path]:
    """A configuration, as often as it says: load, warm up, answer what is not answered yet, summarise.

    Returns:
        The directories, one a repeat.

    Raises:
        UserError: whatever a user can mend.
    """
    return run_alone(Job(_checked(cfg)), answer_file)


def _checked(cfg: DictConfig) -> dict[str, Any]:
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    for key in ("max_new_tokens", "num_choices", "repeats"):
        if not isinstance(config[key], int) or config[key] < 1:
            raise UserError(f"{key}={config[key]}: must be a whole number, at least 1")
    repeats, repeat = config["repeats"], config["repeat"]
    if repeat is not None and (not isinstance(repeat, int) or repeat < 0):
        raise UserError(f"repeat={repeat}: must be null or a whole number from 0")
    for key, (kinds, words) in KINDS.items():
        value: Any = config
        for part in key.split("."):
            value = value[part]
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise UserError(f"{key}={value}: must be {words}")
    for key in ("phases", "mixed", "interleave"):
        if not isinstance(config[key], bool):
            raise UserError(f"{key}={config[key]}: must be true or false")
    if config["run_dir"] is not None and repeats > 1 and repeat is None:
        raise UserError(f"run_dir={config['run_dir']}: holds one run, but repeats={repeats}; leave out one of the two")
    make_ready(config["method"], config["model"]["name"])  # before the model is loaded, and devices are waited for
    return config


@hydra.main(version_base=None, config_path=str(ROOT / "configs"), config_name="config")
def _job(cfg: DictConfig) -> Failure | None:
    try:
        with processes.one_voice():
            job = Job(_checked(cfg), [str(override) for override in HydraConfig.get().overrides.task])
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
        return "this launcher is not installed; its pip line stands in requirements-cluster.txt"
    return re.sub(r"\s*(full_key: \S+|object_type=\S+|Config search path:.*|Set the environment variable.*)", "", text)


if __name__ == "__main__":
    main()
