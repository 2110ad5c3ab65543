"""What a command writes: the store of each run, and the list of its jobs.

A run survives a kill at any point: after each question or batch, the drafter's state is written
first, then the answers' lines, flushed to the disk. So a resumed run continues from the state after
the last line.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from filelock import lock_descriptor
from omegaconf import DictConfig
from torch import Tensor

from model.errors import UserError
from model.files import PARTIAL, load_state, local_path, save_state, write_json

from .provenance import without_passwords
from .rows import Row, check_schema, difference, read_answers, read_object
from .runs import without_paths


class AnswerStore:
    def __init__(self, folder: Path, answers: Path | None = None) -> None:
        self.folder = folder
        self.answers = answers or folder / "answers.jsonl"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory for one process. Raises UserError if another one is at work in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "run.lock").open("a") as handle:
            if not lock_descriptor(handle.fileno(), blocking=False):
                raise UserError(
                    f"{self.folder}: another run is at work in this directory;"
                    " wait for it or stop it"
                )
            yield

    def begin(self, metadata: dict[str, Any]) -> dict[Any, Row]:
        """Start or resume a run, cut off an unfinished line or batch, and return stored answers.

        Raises UserError, and changes nothing, if the directory holds a run of another
        configuration, or one begun under other circumstances.
        """
        path = self.folder / "metadata.json"
        data = self.answers.read_bytes() if self.answers.exists() else b""
        answered = data.count(b"\n")
        # killed while a batch was written: it is answered again
        if answered < metadata["questions"]:
            answered -= answered % metadata["settings"]["batch"]
        recorded = read_object(path)
        if recorded:
            self._check(recorded, metadata, answered)
        elif data:
            raise UserError(
                f"{self.answers} holds answers of an unknown configuration"
                " (no metadata.json next to it); move it away"
            )

        if not answered:  # no answer depends on earlier metadata
            write_json(path, metadata)
        elif "config" in recorded and recorded["config"]["method"] != metadata["config"]["method"]:
            # They differ in settings that decide no answer, as a server's type: the last command's
            # count.
            recorded["config"]["method"] = metadata["config"]["method"]
            write_json(path, recorded)

        states = set(self.folder.glob("state-*.safetensors")) - {self._state_path(answered)}
        # a killed run's; the directory is locked
        for stale in [*self.folder.glob(PARTIAL), *states]:
            stale.unlink()

        if not data:
            return {}
        complete = sum(len(line) + 1 for line in data.split(b"\n")[:answered])
        if complete < len(data):
            os.truncate(self.answers, complete)
        rows, damage = read_answers(self.answers)
        if damage:
            raise UserError(
                f"{self.answers}: {damage};"
                " this file was changed from outside, delete the directory to start anew"
            )

        return rows

    def _check(self, recorded: dict[str, Any], metadata: dict[str, Any], answered: int) -> None:
        check_schema(recorded.get("settings"), self.folder)
        before = without_paths(recorded["settings"])
        different = difference(before, without_paths(metadata["settings"]))
        if different:
            raise UserError(
                f"{self.folder} holds a run of another configuration: {different};"
                " use another run_dir or delete it"
            )
        if answered and not self.is_finished():
            different = difference(recorded.get("circumstances"), metadata["circumstances"])
            if different:
                raise UserError(
                    f"{self.folder} holds {answered} answers given under other circumstances:"
                    f" {different}; finish it under those, or delete it to start anew"
                )

    def is_finished(self) -> bool:
        return (self.folder / "summary.json").exists()

    def state_at(self, answered: int) -> dict[str, Tensor]:
        """Load the drafter's state after `answered` questions. Raises UserError if it is gone."""
        path = self._state_path(answered)
        return load_state(path if path.exists() else self.folder / "state.safetensors")

    def append(self, rows: Sequence[Row], state: dict[str, Tensor], answered: int) -> None:
        """Write the state after answer number `answered` (from 1), then the answers up to it."""
        if state:
            save_state(state, self._state_path(answered))
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self.answers.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.answers.open("ab") as handle:
                handle.write(lines.encode(errors="replace"))
                handle.flush()
                os.fsync(handle.fileno())
        except OSError as error:  # a part that was written is cut off by `begin`
            raise UserError(
                f"{self.answers}: cannot be written ({error.strerror}); {answered - len(rows)}"
                " answers are kept, make room and give the same command again"
            ) from None

        if state:
            self._state_path(answered - len(rows)).unlink(missing_ok=True)

    def finish(self, summary: dict[str, Any], state: dict[str, Tensor], answered: int) -> None:
        """Write the summary; the last state stays, to start another run from."""
        if state and self._state_path(answered).exists():
            self._state_path(answered).replace(self.folder / "state.safetensors")
        write_json(self.folder / "summary.json", summary)

    def _state_path(self, answered: int) -> Path:
        return self.folder / f"state-{answered}.safetensors"


def experiment_folder(config: Any) -> Path:
    return local_path(config["results_dir"]) / str(config["name"])


class Planned(NamedTuple):
    """A job of a sweep; `not_available` says why it cannot run, if it cannot."""

    overrides: list[str]
    config: DictConfig
    not_available: str

    @property
    def folder(self) -> Path:
        return experiment_folder(self.config)


def mark_of(folder: Path, job: Sequence[str]) -> Path:
    """Return the file that marks a job as done; the order of its overrides does not matter."""
    name = json.dumps(sorted(without_passwords(job)))
    return folder / "jobs" / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


def note_done(config: dict[str, Any], job: list[str], run: Path) -> None:
    """Mark a job as done; other jobs may share its run."""
    folder = experiment_folder(config)
    if config["run_dir"] is None:
        write_json(mark_of(folder, job), {"job": without_passwords(job), "run": run.name})


def write_down(jobs: Sequence[Planned], command: str) -> None:
    """Write each experiment's jobs to its folder, and remove their old marks."""
    for folder in dict.fromkeys(job.folder for job in jobs):
        sweep: dict[str, Any] = {"command": command, "jobs": [], "not_available": []}
        for words, config, why in (job for job in jobs if job.folder == folder):
            if why:
                names = {group: str(config[group].name) for group in ("model", "bench", "method")}
                sweep["not_available"].append(names | {"why": why})
            else:
                sweep["jobs"].append(words)
                mark_of(folder, words).unlink(missing_ok=True)
        write_json(folder / "sweep.json", without_passwords(sweep))


def available(jobs: Sequence[Planned]) -> list[Planned]:
    """Return the jobs that can run; name the others on stderr. Raises UserError if none can run."""
    runnable = [job for job in jobs if not job.not_available]
    others = [job for job in jobs if job.not_available]
    reasons = [*dict.fromkeys(f"{job.config.method.name}: {job.not_available}" for job in others)]
    if not runnable:
        raise UserError(f"none of the {len(jobs)} jobs can run: {'; '.join(reasons[:3])}")
    if reasons:
        head = f"not available, {len(others)} of {len(jobs)} jobs are left out:"
        print("\n  ".join([head, *reasons]), file=sys.stderr)
    return runnable


def not_available(folder: Path) -> list[dict[Any, Any]]:
    """Return model, bench, method and `why` of the jobs that the last sweep left out."""
    jobs = read_object(folder / "sweep.json").get("not_available", [])
    return pd.DataFrame(jobs).drop_duplicates().to_dict("records")


def missing_jobs(folder: Path) -> str:
    """Name the unfinished jobs of the last sweep, and its command; empty if all are done."""
    sweep = read_object(folder / "sweep.json")
    jobs: list[list[str]] = sweep.get("jobs", [])
    unfinished = []
    for job in jobs:
        run = read_object(mark_of(folder, job)).get("run", "")
        if not (folder / "runs" / run / "summary.json").exists():
            unfinished.append(job)

    if not unfinished:
        return ""
    common = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()  # already in the command
    words = [" ".join(o for o in job if o not in common) for job in unfinished[:4]]
    words += [f"and {len(unfinished) - 4} more"] if len(unfinished) > 4 else []
    missing = f"missing: {len(unfinished)} of {len(jobs)} jobs ({'; '.join(words)})"
    return f"{missing}; to complete the sweep: {sweep.get('command')}"
