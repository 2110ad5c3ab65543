"""Keep track of a sweep.

Its jobs are written down before the first one starts, and marked when finished.

A job whose method lacks a companion, or candidates for its tree, is marked at the start with the
reason and never runs. It does not count as missing, and a note below the tables gives the
reason.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from model.errors import UserError
from model.files import write_json

from .provenance import without_passwords
from .rows import read_object


class Planned(NamedTuple):
    """A job of a sweep: its overrides, and the configuration they compose to.

    `not_available` says why it cannot run, if it cannot.
    """

    overrides: list[str]
    config: DictConfig
    not_available: str

    @property
    def folder(self) -> Path:
        """The experiment's folder."""
        return Path(self.config.results_dir) / str(self.config.name)


def mark_of(folder: Path, job: Sequence[str]) -> Path:
    """Return the file that marks a job as done or not available.

    The order of its overrides does not matter.
    """
    name = json.dumps(sorted(without_passwords(job)))
    return folder / "jobs" / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


def note_done(config: dict[str, Any], job: list[str], folders: Sequence[Path]) -> None:
    """Mark this job of a sweep as done, with the folders of its runs.

    Several jobs may share a run.
    """
    folder = Path(config["results_dir"]) / str(config["name"])
    if (folder / "sweep.json").exists() and config["run_dir"] is None:
        write_json(
            mark_of(folder, job),
            {"job": without_passwords(job), "runs": [path.name for path in folders]},
        )


def write_down(jobs: Sequence[Planned], command: str) -> None:
    """Write each experiment's jobs to its folder.

    Those not available are marked, and old marks of the others are removed.
    """
    for folder in dict.fromkeys(job.folder for job in jobs):
        planned = [job for job in jobs if job.folder == folder]
        names = without_passwords([job.overrides for job in planned])
        write_json(folder / "sweep.json", {"command": without_passwords(command), "jobs": names})
        for job, (overrides, config, why) in zip(names, planned, strict=True):
            about = {group: str(config[group].name) for group in ("model", "bench", "method")}
            if why:
                write_json(mark_of(folder, overrides), {"job": job, "not_available": why} | about)
            else:
                mark_of(folder, overrides).unlink(missing_ok=True)


def available(jobs: Sequence[Planned]) -> list[Planned]:
    """Return the jobs that can run; name the others on stderr, each reason once.

    Raises UserError if none can run.
    """
    left = [job for job in jobs if not job.not_available]
    others = [job for job in jobs if job.not_available]
    said = (f"{job.config.method.name}: {job.not_available}" for job in others)
    reasons = [*dict.fromkeys(said)]
    if jobs and not left:
        raise UserError(f"none of the {len(jobs)} jobs can run: {'; '.join(reasons[:3])}")
    if reasons:
        head = f"not available, {len(others)} of {len(jobs)} jobs are left out:"
        print("\n  ".join([head, *reasons]), file=sys.stderr)
    return left


def not_available(folder: Path) -> list[dict[str, str]]:
    """Return the jobs that sweeps into this folder left out.

    Each has its model, bench and method, and `why`.
    """
    reasons = {}
    for path in sorted(folder.glob("jobs/*.json")):
        mark = read_object(path)
        if "not_available" in mark:
            job = {group: mark[group] for group in ("model", "bench", "method")}
            reasons[tuple(job.values())] = job | {"why": mark["not_available"]}
    return [reasons[names] for names in sorted(reasons)]


def missing_jobs(folder: Path) -> str:
    """Name the jobs that the last sweep into this folder has not finished.

    The sweep's command is named, too. The text is empty if all are done.
    """
    sweep = read_object(folder / "sweep.json")
    jobs: list[list[str]] = sweep.get("jobs", [])
    left = []
    for job in jobs:
        mark = read_object(mark_of(folder, job))
        runs = [folder / f"runs/{run}/summary.json" for run in mark.get("runs", [])]
        if not mark or not all(path.exists() for path in runs):
            left.append(job)

    if not left:
        return ""
    common = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()  # already in the command
    words = [" ".join(o for o in job if o not in common) for job in left[:4]]
    words += [f"and {len(left) - 4} more"] if len(left) > 4 else []
    missing = f"missing: {len(left)} of {len(jobs)} jobs ({'; '.join(words)})"
    return f"{missing}; to complete the sweep: {sweep.get('command')}"
