"""python -m evaluation.run model=... bench=... method=... tree=... start=...: one run; with lists,
a sweep.

Jobs whose method lacks a companion, or candidates for its tree, are listed at the start and left
out.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from model.errors import Parser, UserError

from .audit import audit_served
from .configuration.config import checked_config
from .configuration.jobs import BASIC, Composed, compose
from .errors import noted, user_errors
from .loading.devices import keep_devices
from .records.runs import SAVED
from .records.store import available, write_down
from .report import report
from .running.scheduling import Job, run_jobs


def run_command(composed: Composed, words: Sequence[str]) -> None:
    """Run a command line's jobs, here or by a launcher, and report their experiments.

    Raises UserError if any of them fails by a mistake of the user, after the others.
    """
    config = composed.config
    jobs = available(composed.jobs)
    failures = set[str]()
    noting = failures if len(jobs) > 1 else None
    runs_here = config.hydra.runtime.choices["hydra/launcher"] == BASIC

    checked = []
    for job in jobs if runs_here else ():
        with noted(noting):
            checked.append(Job(checked_config(job.config), job.overrides))

    # a single run does not replace the list of a sweep into the same folder
    if config.run_dir is None and len(composed.jobs) > 1:
        write_down(composed.jobs, f"python -m evaluation.run {shlex.join(words)}")

    if runs_here:
        run_jobs(checked, noting, given=composed.given)
    else:
        context = HydraContext(composed.loader, Callback())  # a callback that does nothing
        # jobs with start=saved run last, as they read a hot run's state
        for saved in (False, True):
            if batch := [job.overrides for job in jobs if (job.config.start == SAVED) is saved]:
                launcher = Plugins.instance().instantiate_launcher(context, launched_job, config)
                for launched in launcher.launch(batch, initial_job_idx=0):
                    # return_value raises what the job raised
                    for line in launched.return_value:
                        with noted(failures):
                            raise UserError(line)

    for folder in dict.fromkeys(job.folder for job in composed.jobs):
        if failures and not (folder / "runs").exists():
            (folder / "sweep.json").unlink(missing_ok=True)
            with suppress(OSError):  # it holds other files, or was never made
                folder.rmdir()
        if config.run_dir is None and any(folder.glob("runs/*/answers.jsonl")):
            permissions = ("trust_remote_code", "allow_pickle")
            permitted = {key: bool(config.model[key]) for key in permissions}
            with noted(failures):
                audit_served(folder, permitted)
            report(folder)

    if failures:
        raise UserError("what was left out is named above")


def launched_job(config: DictConfig) -> list[str]:
    """Run the job that a launcher started, perhaps elsewhere; return its user error."""
    failures = set[str]()
    with noted(failures):
        run_jobs([Job(checked_config(config), [*HydraConfig.get().overrides.task])])
    return [*failures]


def main() -> None:
    parser = Parser(
        prog="python -m evaluation.run",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        help="settings and choices, as method=recycling method.k=4",
    )
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="as in Hydra; lists of settings are a sweep without it, too",
    )
    parser.add_argument("--config-dir", help="a further folder of configs")
    parser.add_argument(
        "-c",
        "--cfg",
        choices=["job"],
        help="print the configuration of each job and run none",
    )

    with user_errors(), keep_devices():
        options = parser.parse_intermixed_args()
        composed = compose(options.overrides, options.config_dir)
        if options.cfg:
            print("---\n".join(OmegaConf.to_yaml(job.config) for job in composed.jobs))
        else:
            run_command(composed, sys.argv[1:])


if __name__ == "__main__":
    main()
