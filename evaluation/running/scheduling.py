"""Run jobs alone, or interleave them question by question, so that a drifting machine favours none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from model.errors import UserError

from ..configuration.fingerprint import SAVED
from ..loading import processes
from ..loading.bench import load_bench
from ..loading.locks import exclusive, keep_devices
from ..loading.models import load_model
from ..loading.settings import ModelSettings
from ..records.sweeps import note_done
from .answering import answer_together
from .progress import Progress
from .runner import Runner


@dataclass
class Job:
    """A configuration with all its repeats; `overrides` if it is a job of Hydra's."""

    config: dict[str, Any]
    overrides: list[str] | None = None
    folders: dict[int, Path] = field(default_factory=dict)  # of finished repeats

    @property
    def repeats(self) -> list[int]:
        repeat: int | None = self.config["repeat"]
        if not self.config["timed"]:  # every repeat would be the same
            return [repeat or 0]
        return list(range(self.config["repeats"])) if repeat is None else [repeat]

    @property
    def model(self) -> ModelSettings:
        return ModelSettings(**self.config["model"])

    def note_finished(self, repeat: int, folder: Path) -> None:
        """Note a finished repeat; after the last one mark the job as done."""
        self.folders[repeat] = folder
        if self.overrides is not None and len(self.folders) == len(self.repeats):
            folders = [self.folders[index] for index in self.repeats]
            processes.on_first_rank(note_done, self.config, self.overrides, folders)


def uses_clock(job: Job) -> bool:
    """True if the job depends on a clock."""
    return bool(job.config["timed"])


def is_interleaved(job: Job) -> bool:
    """True if the job runs interleaved with others of its model and bench: it asks for that, or is untimed."""
    return bool(job.config["interleave"]) or not job.config["timed"]


Repeat = tuple[Job, int]  # a job and the number of one of its repeats
OnError = Callable[[Exception], object]


def _raise(error: Exception) -> None:
    raise error


def run_jobs(jobs: Sequence[Job], on_error: OnError = _raise, answer_file: Path | None = None) -> None:
    """Run jobs alone first, then the interleaved ones question by question; at last those with start=saved."""
    with keep_devices():
        for last in (False, True):  # they start from what a hot run left
            part = [job for job in jobs if (job.config["start"] == SAVED) is last]
            alone = [[(job, repeat)] for job in part if not is_interleaved(job) for repeat in job.repeats]
            for group in (*alone, *group_repeats([job for job in part if is_interleaved(job)])):
                _run(group, on_error, answer_file)


def group_repeats(jobs: Sequence[Job]) -> list[list[Repeat]]:
    """Group what is interleaved: runs of the same model, bench and repeat number, by repeat."""
    groups: dict[str, list[Repeat]] = {}
    repeats = [(job, repeat) for job in jobs for repeat in job.repeats]
    for job, repeat in sorted(repeats, key=lambda pair: pair[1]):
        bench = {key: value for key, value in job.config["bench"].items() if key != "order"}
        groups.setdefault(json.dumps([repeat, job.config["model"], bench], sort_keys=True), []).append((job, repeat))
    return list(groups.values())


def _run(group: Sequence[Repeat], on_error: OnError, answer_file: Path | None = None) -> None:
    """Answer the remaining questions of all runs in a group."""
    with ExitStack() as stack:
        try:
            model_settings = stack.enter_context(exclusive(group[0][0].model, any(uses_clock(job) for job, _ in group)))
        except Exception as error:
            on_error(error)
            return
        runs = _Interleaving(on_error)
        for job, repeat in group:
            runs.add(job, repeat, model_settings, answer_file)
        runs.begin(stack)
        runs.answer()


class _Interleaving:
    """Runners that are interleaved on one model. The error of one goes to `on_error`; the others go on.

    Runners that share a forward fail together: each keeps its answers, and the same command resumes them.
    """

    def __init__(self, on_error: OnError) -> None:
        self.on_error = on_error
        self.active: list[Runner] = []  # unfinished, in memory
        self.repeats_of: dict[str, list[Repeat]] = {}  # by run, which several jobs may share

    def add(self, job: Job, repeat: int, model: ModelSettings, answer_file: Path | None) -> None:
        """Build a job's runner, unless another job has the same run."""
        config = job.config | {"repeat": repeat}
        with self._catch_errors():
            load_bench(**config["bench"])  # raises for a wrong bench before weights are read
            runner = Runner(config, load_model(model), answer_file)
            if config["run_dir"] is not None and self.repeats_of and _run_key(runner) not in self.repeats_of:
                raise UserError(f"run_dir={config['run_dir']}: holds one run, and this sweep has several; leave it out")
            if _run_key(runner) not in self.repeats_of:
                self.active.append(runner)
            self.repeats_of.setdefault(_run_key(runner), []).append((job, repeat))

    def begin(self, stack: ExitStack) -> None:
        """Lock the runs' directories, complete the finished runs and prepare the others."""
        for runner in list(self.active):
            with self._catch_errors(runner):
                stack.enter_context(runner.opened())
                if not runner.pending:
                    runner.finish_if_interrupted()
                    self._complete(runner)
        drafters = [runner.method.drafter for runner in self.active if runner.method.drafter is not None]
        if drafters:
            sizes = [drafter.max_nodes for drafter in drafters]
            nodes = max(sizes) if any(runner.config["timed"] for runner in self.active) else sum(sizes)
            try:
                with torch.inference_mode():  # one cache for all, as captured steps are bound to their cache
                    self.active[0].loaded.target.reserve(nodes)
            except Exception as error:  # no memory for the cache: none of these can run, the next group may
                for runner in list(self.active):
                    self._release(runner)
                self.on_error(error)
        for runner in list(self.active):
            with self._catch_errors(runner):
                runner.prepare()

    def answer(self) -> None:
        """Answer question by question; interrupted runs catch up with the others first."""
        if not self.active:
            return
        label = (
            self.active[0].method.label if len(self.active) == 1 else f"{len(self.active)} configurations, interleaved"
        )
        done = sum(len(runner.done) for runner in self.active)
        total = done + sum(len(runner.pending) for runner in self.active)
        with Progress(label, total, done) as progress:
            while self.active:
                position = min(len(runner.done) for runner in self.active)
                behind = [runner for runner in self.active if len(runner.done) == position]
                if len(behind) == len(self.active):
                    progress.begin_round(len(behind))
                for sharing in group_by_question(behind):
                    with self._catch_errors(*sharing):
                        if sharing[0].config["timed"]:
                            sharing[0].answer(
                                sum(other.memory.bytes for other in self.active if other is not sharing[0])
                            )
                        else:
                            answer_shared(sharing)
                    answered = [runner for runner in sharing if runner in self.active]
                    if answered:
                        progress.answered([(runner.rows, runner.method.label) for runner in answered])
                    for runner in answered:
                        with self._catch_errors(runner):
                            if not runner.pending:
                                runner.finish()
                                self._complete(runner)

    def _release(self, runner: Runner) -> None:
        """Drop a runner and free the device memory that its method uses."""
        self.active.remove(runner)
        runner.method.drafter = None

    def _complete(self, runner: Runner) -> None:
        self._release(runner)
        for job, repeat in self.repeats_of[_run_key(runner)]:
            job.note_finished(repeat, runner.folder)

    @contextmanager
    def _catch_errors(self, *runners: Runner) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            for runner in runners:
                if runner in self.active:
                    self._release(runner)
            self.on_error(error)


def group_by_question(runners: Sequence[Runner]) -> list[list[Runner]]:
    """Group the runners that share forwards: untimed ones whose next question is the same. A timed one is alone."""
    groups: dict[Any, list[Runner]] = {}
    for runner in runners:
        key = (
            id(runner) if runner.config["timed"] else json.dumps([runner.pending[0].key, runner.config["num_choices"]])
        )
        groups.setdefault(key, []).append(runner)
    return list(groups.values())


def answer_shared(runners: Sequence[Runner]) -> None:
    """Answer the next question, the same for all these runners, in shared forwards."""
    questions = [runner.next_question() for runner in runners]
    rows = answer_together(questions[0], [(runner.method, runner.config) for runner in runners])
    for runner, row in zip(runners, rows, strict=True):
        runner.keep(row)


def _run_key(runner: Runner) -> str:
    return json.dumps([str(runner.folder), runner.settings], sort_keys=True)
