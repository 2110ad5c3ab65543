"""Run jobs alone, or interleave them question by question, so that a drifting machine favours none."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from model.errors import UserError
from model.tuning import choose_threads

from ..configuration.fingerprint import recorded_threads
from ..errors import noted
from ..loading.locks import exclusive, keep_devices
from ..loading.settings import ModelSettings
from ..records.identity import SAVED
from ..records.sweeps import note_done
from .progress import Progress
from .runner import Runner, answer_next


@dataclass
class Job:
    """A configuration with all its repeats; `overrides` if it is a job of a sweep."""

    config: dict[str, Any]
    overrides: list[str] = field(default_factory=list)
    folders: dict[int, Path] = field(default_factory=dict)  # of finished repeats

    @property
    def repeats(self) -> list[int]:
        repeat: int | None = self.config["repeat"]
        if not self.config["timed"]:  # every repeat would be the same
            return [repeat or 0]
        return list(range(self.config["repeats"])) if repeat is None else [repeat]

    @property
    def is_interleaved(self) -> bool:
        """True if it runs interleaved with others of its model and bench: it asks for that, or is untimed."""
        return bool(self.config["interleave"]) or not self.config["timed"]

    def note_finished(self, repeat: int, folder: Path) -> None:
        """Note a finished repeat; after the last one mark the job as done."""
        self.folders[repeat] = folder
        if self.overrides and len(self.folders) == len(self.repeats):
            folders = [self.folders[index] for index in self.repeats]
            note_done(self.config, self.overrides, folders)


Repeat = tuple[Job, int]  # a job and the number of one of its repeats


def run_jobs(jobs: Sequence[Job], failures: list[str] | None = None, answer_file: Path | None = None) -> None:
    """Run jobs alone first, then the interleaved ones question by question; at last those with start=saved.

    Args:
        failures: gets a line for each error that the user can fix, and the other jobs go on; None: it is raised.
    """
    with keep_devices():
        for last in (False, True):  # they start from what a hot run left
            batch = [job for job in jobs if (job.config["start"] == SAVED) is last]
            alone = [[(job, repeat)] for job in batch if not job.is_interleaved for repeat in job.repeats]
            for group in (*alone, *group_repeats([job for job in batch if job.is_interleaved])):
                with noted(failures):
                    _run(group, failures, answer_file)


def group_repeats(jobs: Sequence[Job]) -> list[list[Repeat]]:
    """Group what is interleaved: runs of the same model, bench and repeat number, by repeat."""
    groups: dict[str, list[Repeat]] = {}
    repeats = [(job, repeat) for job in jobs for repeat in job.repeats]
    for job, repeat in sorted(repeats, key=lambda pair: pair[1]):
        bench = {key: value for key, value in job.config["bench"].items() if key != "order"}
        groups.setdefault(json.dumps([repeat, job.config["model"], bench], sort_keys=True), []).append((job, repeat))
    return list(groups.values())


def _run(group: Sequence[Repeat], failures: list[str] | None, answer_file: Path | None) -> None:
    """Answer the remaining questions of all runs in a group."""
    first, timed = group[0][0], any(job.config["timed"] for job, _ in group)
    with exclusive(ModelSettings(**first.config["model"]), timed) as model, ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())  # as the caller had it
        if said := choose_threads(recorded_threads(first.config), "as this experiment's other runs"):
            print(said, file=sys.stderr)
        turns = _Turns(failures)
        for job, repeat in group:
            turns.add(job, repeat, model, answer_file)
        turns.begin(stack)
        turns.answer()


class _Turns:
    """Runs that take turns on one model. The error of one is noted in `failures`; the others go on.

    Runs that share a forward fail together: each keeps its answers, and the same command resumes them.
    """

    def __init__(self, failures: list[str] | None) -> None:
        self.failures = failures
        self.repeats: dict[Runner, list[Repeat]] = {}  # of each unfinished run, which several jobs may share

    def add(self, job: Job, repeat: int, model: ModelSettings, answer_file: Path | None) -> None:
        """Build a job's run, unless another job has the same one."""
        with self._catch_errors():
            runner = Runner(job.config | {"repeat": repeat}, model, answer_file)
            same = next((other for other in self.repeats if other.identity == runner.identity), None)
            if job.config["run_dir"] is not None and self.repeats and same is None:
                folder = job.config["run_dir"]
                raise UserError(f"run_dir={folder}: holds one run, and this sweep has several; leave it out")
            self.repeats.setdefault(same or runner, []).append((job, repeat))

    def begin(self, stack: ExitStack) -> None:
        """Lock the runs' directories, complete the finished runs and prepare the others."""
        for runner in list(self.repeats):
            with self._catch_errors(runner):
                stack.enter_context(runner.opened())
                if not runner.pending:
                    self._complete(runner)
        drafters = [runner.method.drafter for runner in self.repeats if runner.method.drafter is not None]
        if drafters:
            sizes = [drafter.max_nodes for drafter in drafters]
            nodes = max(sizes) if any(runner.config["timed"] for runner in self.repeats) else sum(sizes)
            with torch.inference_mode():  # one cache for all, as captured steps are bound to their cache
                next(iter(self.repeats)).loaded.target.reserve(nodes)
        for runner in list(self.repeats):
            with self._catch_errors(runner):
                runner.prepare()

    def answer(self) -> None:
        """Answer question by question; interrupted runs catch up with the others first."""
        if not self.repeats:
            return
        first, count = next(iter(self.repeats)), len(self.repeats)
        label = first.method.label if count == 1 else f"{count} configurations, interleaved"
        done = sum(len(runner.done) for runner in self.repeats)
        total = done + sum(len(runner.pending) for runner in self.repeats)
        progress = Progress(label, total, done)
        while self.repeats:
            position = min(len(runner.done) for runner in self.repeats)
            behind = [runner for runner in self.repeats if len(runner.done) == position]
            for sharing in group_by_question(behind):
                with self._catch_errors(*sharing):
                    answer_next(sharing)
                    progress.answered(len(sharing), sharing[0].rows, sharing[0].method.label)
                    for runner in sharing:
                        if not runner.pending:
                            self._complete(runner)

    def _complete(self, runner: Runner) -> None:
        runner.finish()
        for job, repeat in self._drop(runner):
            job.note_finished(repeat, runner.folder)

    def _drop(self, runner: Runner) -> list[Repeat]:
        """Remove a run and free the device memory that its method uses; returns its repeats."""
        runner.method.drafter = None
        return self.repeats.pop(runner, [])

    @contextmanager
    def _catch_errors(self, *runners: Runner) -> Iterator[None]:
        with noted(self.failures):
            try:
                yield
            except Exception:
                for runner in runners:
                    self._drop(runner)
                raise


def group_by_question(runners: Sequence[Runner]) -> list[list[Runner]]:
    """Group the runs that share forwards: untimed ones whose next question is the same. A timed one is alone."""
    groups: dict[Any, list[Runner]] = {}
    for runner in runners:
        shared = json.dumps([runner.pending[0].key, runner.config["num_choices"]])
        groups.setdefault(runner if runner.config["timed"] else shared, []).append(runner)
    return list(groups.values())
