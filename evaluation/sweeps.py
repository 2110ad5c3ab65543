"""What a sweep was to do and what of it is done: jobs written down before the first starts, marked when finished."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .answers import write_json
from .distributed import rank


@dataclass(frozen=True)
class Missing:
    """Jobs of an experiment's last sweep that are not finished, and the command that completes them."""

    jobs: list[list[str]]
    total: int
    command: str

    def __str__(self) -> str:
        shown = "; ".join(" ".join(job) for job in self.jobs[:4])
        more = f"; and {len(self.jobs) - 4} more" if len(self.jobs) > 4 else ""
        return (
            f"missing: {len(self.jobs)} of {self.total} jobs ({shown}{more}); this completes the sweep: {self.command}"
        )


def job_key(job: Sequence[str]) -> str:
    """A file name for a job, from its overrides; their order does not matter."""
    return hashlib.sha256(json.dumps(sorted(job)).encode()).hexdigest()[:16]


def note_done(config: dict[str, Any], job: list[str], folders: Sequence[Path]) -> None:
    """Write down that this job of a sweep is done and where: several jobs may share a run."""
    folder = Path(config["results_dir"]) / str(config["name"])
    if (folder / "sweep.json").exists() and config["run_dir"] is None and rank() == 0:
        write_json(folder / "jobs" / f"{job_key(job)}.json", {"job": job, "runs": [path.name for path in folders]})


def missing_jobs(folder: Path) -> Missing | None:
    """What the last sweep into this folder has not finished; None if all is done or it was no sweep."""
    try:
        sweep = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
        jobs, command = list(sweep["jobs"]), str(sweep["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    left = [job for job in jobs if not _done(folder, job)]
    common = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()  # the command says it
    return Missing([[o for o in job if o not in common] for job in left], len(jobs), command) if left else None


def _done(folder: Path, job: Sequence[str]) -> bool:
    """Whether the job left its mark and all its runs are still there, finished."""
    try:
        runs = json.loads((folder / "jobs" / f"{job_key(job)}.json").read_text(encoding="utf-8"))["runs"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return all((folder / "runs" / str(run) / "summary.json").exists() for run in runs)
