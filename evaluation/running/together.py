"""The runs of a command: each alone, or taking turns question by question, so that a drifting machine favours none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from model.errors import UserError

from ..configuration.methods import AUTO, ONLINE
from ..errors import Failure, told
from ..loading import processes
from ..loading.bench import load_bench
from ..loading.locks import exclusive
from ..loading.models import load_model
from ..loading.settings import ModelSettings
from ..records.sweeps import note_done
from .answering import answer_together
from .progress import Progress
from .runner import Runner


@dataclass
class Job:
    """A configuration, as often as it says; `overrides` where it is a job of Hydra's."""

    config: dict[str, Any]
    overrides: list[str] | None = None
    folders: dict[int, Path] = field(default_factory=dict)  # of the repeats that are done

    @property
    def repeats(self) -> list[int]:
        repeat: int | None = self.config["repeat"]
        if not self.config["timed"]:  # it would be the same each time
            return [repeat or 0]
        return list(range(self.config["repeats"])) if repeat is None else [repeat]

    @property
    def model(self) -> ModelSettings:
        return ModelSettings(**self.config["model"])

    def note(self, repeat: int, folder: Path) -> None:
        """A repeat is done; after the last one the job is marked as done."""
        self.folders[repeat] = folder
        if self.overrides is not None and len(self.folders) == len(self.repeats) and processes.rank() == 0:
            note_done(self.config, self.overrides, [self.folders[index] for index in self.repeats])


def clocked(job: Job) -> bool:
    """Whether a clock decides something of it: its own times, or the step times that it chooses trees by."""
    return bool(job.config["timed"]) or job.config["tree"]["name"] in (AUTO, ONLINE)


def takes_turns(job: Job) -> bool:
    """Whether it is to run together with others of its model and bench: it says so, or it takes no times."""
    return bool(job.config["interleave"]) or not job.config["timed"]


Turn = tuple[Job, int]  # a job and one of its repeats
Failed = Callable[[Exception], None]

_waiting: list[Job] | None = None


def waits(job: Job) -> bool:
    """Whether this job will be run together with others; else it is for its caller to run."""
    if _waiting is None or not takes_turns(job):
        return False
    _waiting.append(job)
    return True


@contextmanager
def collected() -> Iterator[None]:
    """Jobs that are to take turns wait inside this block and run at its end. What fails is noted, the others go on."""
    global _waiting
    _waiting = []
    try:
        yield
        jobs = _waiting
    finally:
        _waiting = None
    with processes.one_voice():
        for group in groups(jobs):
            _run(group, _note)


def run_jobs(jobs: Sequence[Job]) -> None:
    """Those that interleave or take no times in turn, question by question, the others alone.

    Raises the first error that there is.
    """
    for job in jobs:
        if not takes_turns(job):
            run_alone(job)
    for group in groups([job for job in jobs if takes_turns(job)]):
        _run(group, _raise)


def run_alone(job: Job, answer_file: Path | None = None) -> list[Path]:
    """One repeat after the other. Returns their directories. Raises UserError for whatever a user can mend."""
    with exclusive(job.model, clocked(job)):  # from the first to the last
        for repeat in job.repeats:
            _run([(job, repeat)], _raise, answer_file)
    return [job.folders[repeat] for repeat in job.repeats]


def groups(jobs: Sequence[Job]) -> list[list[Turn]]:
    """What takes turns: runs of one model on one bench, repeat by repeat."""
    found: dict[str, list[Turn]] = {}
    turns = [(job, repeat) for job in jobs for repeat in job.repeats]
    for job, repeat in sorted(turns, key=lambda turn: turn[1]):
        bench = {key: value for key, value in job.config["bench"].items() if key != "order"}
        found.setdefault(json.dumps([repeat, job.config["model"], bench], sort_keys=True), []).append((job, repeat))
    return list(found.values())


def _note(error: Exception) -> None:
    message = told(error)
    if message is None or processes.world_size() > 1:
        raise error
    Failure(message)


def _raise(error: Exception) -> None:
    raise error


def _run(group: Sequence[Turn], failed: Failed, answer_file: Path | None = None) -> None:
    """Answer what is not answered yet, all runs of the group together."""
    with ExitStack() as held:
        try:
            placed = held.enter_context(exclusive(group[0][0].model, any(clocked(job) for job, _ in group)))
        except Exception as error:
            failed(error)
            return
        runs = _Runs(failed)
        for job, repeat in group:
            runs.add(job, repeat, placed, answer_file)
        runs.begin(held)
        runs.answer()


class _Runs:
    """Runners at work on one model; one that fails is told to `failed` and leaves the others alone, but for those whose
    forwards it shares: they are left where they are, and the same command goes on there.
    """

    def __init__(self, failed: Failed) -> None:
        self.failed = failed
        self.runners: list[Runner] = []  # those at work
        self.built: list[Runner] = []  # those in memory
        self.whose: dict[str, list[Turn]] = {}  # several jobs may share a run

    def add(self, job: Job, repeat: int, model: ModelSettings, answer_file: Path | None) -> None:
        """Build a job's runner, unless its run is there already."""
        config = job.config | {"repeat": repeat}
        with self._caught():
            load_bench(**config["bench"])  # what is wrong with it is told before weights are read
            runner = Runner(config, load_model(model), answer_file)
            if config["run_dir"] is not None and self.whose and _key(runner) not in self.whose:
                raise UserError(f"run_dir={config['run_dir']}: holds one run, and this sweep has several; leave it out")
            if _key(runner) not in self.whose:
                self.runners.append(runner)
                self.built.append(runner)
            self.whose.setdefault(_key(runner), []).append((job, repeat))

    def begin(self, held: ExitStack) -> None:
        """Take the runs' directories, leave those that are finished alone, and warm up the others."""
        for runner in list(self.runners):
            with self._caught(runner):
                held.enter_context(runner.begun())
                if not runner.pending:
                    runner.finish_late()
                    self._done(runner)
        drafters = [runner.method.drafter for runner in self.runners if runner.method.drafter is not None]
        if drafters:
            sizes = [drafter.max_nodes for drafter in drafters]
            nodes = max(sizes) if any(runner.config["timed"] for runner in self.runners) else sum(sizes)
            try:
                with torch.inference_mode():  # one cache for all, as steps that were captured stay with theirs
                    self.runners[0].loaded.target.reserve(nodes)
            except Exception as error:  # no room for it: for none of them, and the next group may have it
                for runner in list(self.runners):
                    self._leave(runner)
                self.failed(error)
        for runner in list(self.runners):
            with self._caught(runner):
                runner.prepare()

    def answer(self) -> None:
        """Question after question; what was interrupted catches up with the others first."""
        if not self.runners:
            return
        label = (
            self.runners[0].method.label
            if len(self.runners) == 1
            else f"{len(self.runners)} configurations, interleaved"
        )
        done = sum(len(runner.done) for runner in self.runners)
        total = done + sum(len(runner.pending) for runner in self.runners)
        with Progress(label, total, done) as progress:
            while self.runners:
                place = min(len(runner.done) for runner in self.runners)
                for turn in turns([runner for runner in self.runners if len(runner.done) == place]):
                    with self._caught(*turn):
                        if turn[0].config["timed"]:
                            turn[0].answer(sum(other.holding.bytes for other in self.built if other is not turn[0]))
                        else:
                            answer_at_once(turn)
                    for runner in [runner for runner in turn if runner in self.runners]:
                        with self._caught(runner):
                            progress.answered(runner.rows, runner.method.label)
                            if not runner.pending:
                                runner.finish()
                                self._done(runner)

    def _leave(self, runner: Runner) -> None:
        """It is at work no more: what its method holds on the device is the others' to use."""
        self.runners.remove(runner)
        self.built.remove(runner)
        runner.method.drafter = None

    def _done(self, runner: Runner) -> None:
        self._leave(runner)
        for job, repeat in self.whose[_key(runner)]:
            job.note(repeat, runner.folder)

    @contextmanager
    def _caught(self, *concerned: Runner) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            for runner in concerned:
                if runner in self.runners:
                    self._leave(runner)
            self.failed(error)


def turns(runners: Sequence[Runner]) -> list[list[Runner]]:
    """Who answers its next question by itself, and who does so together: untimed ones whose question is the same."""
    found: dict[Any, list[Runner]] = {}
    for runner in runners:
        key = (
            id(runner) if runner.config["timed"] else json.dumps([runner.pending[0].key, runner.config["num_choices"]])
        )
        found.setdefault(key, []).append(runner)
    return list(found.values())


def answer_at_once(runners: Sequence[Runner]) -> None:
    """The next question of them all, which is one question, in shared forwards."""
    questions = [runner.next_question() for runner in runners]
    rows = answer_together(questions[0], [(runner.method, runner.config) for runner in runners])
    for runner, row in zip(runners, rows, strict=True):
        runner.keep(row)


def _key(runner: Runner) -> str:
    return json.dumps([str(runner.folder), runner.settings], sort_keys=True)
