"""Run jobs alone, or interleave them question by question.

Interleaved, a drifting machine favours none.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from model.errors import UserError
from model.tuning import choose_threads

from ..configuration.fingerprint import recorded_threads
from ..errors import Failures, noted
from ..loading.devices import exclusive, keep_devices
from ..loading.settings import ModelSettings
from ..records.runs import SAVED
from ..records.sweeps import note_done
from .runner import Runner, answer_next, check_unloaded

LOG_SECONDS = 60.0  # between two lines of progress in a log: more would fill it


@dataclass
class Job:
    """A configuration to run, all its repeats if `repeat` is None.

    It has `overrides` if it is a job of a sweep.
    """

    config: dict[str, Any]
    overrides: list[str] = field(default_factory=list)


def run_jobs(
    jobs: Sequence[Job],
    failures: Failures | None = None,
    answer_file: Path | None = None,
    given: Container[str] = (),
) -> list[Path]:
    """Run jobs that are not interleaved, then interleaved ones question by question.

    Those with start=saved come last.

    Args:
        failures: gets a line for each error that the user can fix, and the other jobs go on; None:
            it is raised.
        given: names of settings; before the first answer, one line says which runs ignore which.

    Returns:
        The folders of the finished runs.
    """
    turns = _Turns(failures, given)
    with keep_devices():
        groups = grouped([job for job in jobs if job.config["start"] != SAVED])
        # these read hot runs' states
        groups += grouped([job for job in jobs if job.config["start"] == SAVED])
        _check(groups, turns)
        for group in groups:
            with noted(failures):
                _run(group, turns, answer_file)

    return turns.folders


def _check(groups: Sequence[list[Job]], turns: _Turns) -> None:
    """Build the runs of the first repeat and drop them.

    So an impossible job is reported before another has run for hours. A further model's jobs are
    checked without its weights.
    """
    for group in reversed(groups[1:] and groups):  # the first group's model is then loaded
        for job in group:
            config = job.config
            first = groups[0][0].config

            if config["repeat"] == first["repeat"] and config["start"] != SAVED:
                with noted(turns.failures):
                    settings = ModelSettings(**config["model"])
                    if settings.path != first["model"]["path"]:
                        check_unloaded(config, settings)
                    else:
                        with exclusive(settings, config["timed"]) as model:
                            turns.add(job, model)
                turns.jobs.clear()  # a run keeps its model


def grouped(jobs: Sequence[Job]) -> list[list[Job]]:
    """Split jobs to single repeats and group them.

    Each is alone, or interleaved with those of the same model, bench and repeat.

    Untimed jobs are interleaved and have one repeat, as further repeats would be the same.
    """
    alone = list[list[Job]]()
    interleaved = dict[str, list[Job]]()

    for job in jobs:
        config = job.config
        timed = config["timed"]
        bench = {key: value for key, value in config["bench"].items() if key != "order"}

        repeats = [config["repeat"]]
        if repeats == [None]:
            repeats = [*range(config["repeats"] if timed else 1)]

        for repeat in repeats:
            single = Job(config | {"repeat": repeat}, job.overrides)
            if timed and not config["interleave"]:
                alone.append([single])
            else:
                key = json.dumps([repeat, config["model"], bench], sort_keys=True)
                interleaved.setdefault(key, []).append(single)

    return alone + sorted(interleaved.values(), key=lambda group: group[0].config["repeat"])


def _run(group: Sequence[Job], turns: _Turns, answer_file: Path | None) -> None:
    """Answer the remaining questions of all runs in a group."""
    first = group[0].config
    timed = any(job.config["timed"] for job in group)

    with exclusive(ModelSettings(**first["model"]), timed) as model, ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())  # as the caller had it
        if said := choose_threads(recorded_threads(first), "as this experiment's other runs"):
            print(said, file=sys.stderr)

        turns.jobs.clear()
        for job in group:
            turns.add(job, model, answer_file)

        if ignored := [f"{key} by {', '.join(by)}" for key, by in turns.ignored.items()]:
            print(f"ignored: {'; '.join(ignored)}", file=sys.stderr)

        turns.given = turns.ignored = {}  # said once: later groups were checked, or are repeats
        turns.begin(stack)
        turns.answer()


class _Turns:
    """Runs that take turns on one model. The error of one is noted in `failures`; the others go on.

    Runs that share a forward fail together: each keeps its answers, and the same command resumes
    them.
    """

    def __init__(self, failures: Failures | None, given: Container[str]) -> None:
        self.failures = failures
        self.given = given
        self.ignored: dict[str, Any] = defaultdict(dict)  # labels of runs, as keys, by setting
        self.folders: list[Path] = []  # of finished runs
        # of each unfinished run, which several jobs may share
        self.jobs: dict[Runner, list[Job]] = {}

    def add(self, job: Job, model: ModelSettings, answer_file: Path | None = None) -> None:
        """Build a job's run, unless another job has the same one."""
        with self._catch_errors():
            runner = Runner(job.config, model, answer_file)

            for key in runner.ignored(self.given):
                self.ignored[key][runner.answerer.label] = None

            same = next((other for other in self.jobs if other.identity == runner.identity), None)
            folder = job.config["run_dir"]
            if folder is not None and self.jobs and same is None:
                raise UserError(
                    f"run_dir={folder}: holds one run, and this sweep has several; leave it out"
                )

            self.jobs.setdefault(same or runner, []).append(job)

    def begin(self, stack: ExitStack) -> None:
        """Lock the runs' directories, complete the finished runs and prepare the others."""
        for runner in list(self.jobs):
            with self._catch_errors(runner):
                stack.enter_context(runner.store.locked())
                runner.resume()
                self._complete(runner)

        answerers = [runner.answerer for runner in self.jobs]
        sizes = [each.drafter.max_nodes for each in answerers if each.on_engine]

        if sizes:
            timed = any(runner.config["timed"] for runner in self.jobs)
            nodes = max(sizes) if timed else sum(sizes)
            # one cache for all, as captured steps are bound to their cache
            with torch.inference_mode():
                next(iter(self.jobs)).loaded.target.reserve(nodes)

        for runner in list(self.jobs):
            with self._catch_errors(runner):
                runner.prepare()

    def answer(self) -> None:
        """Answer question by question; interrupted runs catch up with the others first."""
        labels = [runner.answerer.label for runner in self.jobs]
        what = labels[0] if len(labels) == 1 else f"{len(labels)} configurations, interleaved"
        done = sum(len(runner.done) for runner in self.jobs)
        pending = sum(len(runner.pending) for runner in self.jobs)

        with Progress(what, done + pending, done) as progress:
            while self.jobs:
                position = min(len(runner.done) for runner in self.jobs)
                behind = [runner for runner in self.jobs if len(runner.done) == position]

                for sharing in group_by_question(behind):
                    with self._catch_errors(*sharing):
                        count = answer_next(sharing)
                        label = f"{sharing[0].answerer.label}: " if len(labels) > 1 else ""
                        progress.set_postfix_str(label + sharing[0].figures, refresh=False)
                        progress.update(count)
                        for runner in sharing:
                            self._complete(runner)

    def _complete(self, runner: Runner) -> None:
        """Finish a run that has no question left."""
        if not runner.pending:
            runner.finish()
            self.folders.append(runner.folder)
            for job in self._drop(runner):
                if job.overrides:
                    note_done(job.config, job.overrides, [runner.folder])

    def _drop(self, runner: Runner) -> list[Job]:
        """Remove a run and free the device memory that its method uses; return its jobs."""
        vars(runner).pop("answerer", None)
        return self.jobs.pop(runner, [])

    @contextmanager
    def _catch_errors(self, *runners: Runner) -> Iterator[None]:
        """Drop these runs if an error ends them, and note an error that the user can fix."""
        with noted(self.failures):
            try:
                yield
            except Exception:
                for runner in runners:
                    self._drop(runner)
                raise


def group_by_question(runners: Sequence[Runner]) -> list[list[Runner]]:
    """Group the runs that share forwards.

    They are untimed, unbatched runs on this engine with the same next question.
    """
    groups: dict[Any, list[Runner]] = {}
    for runner in runners:
        shared = json.dumps([runner.pending[0].key, runner.config["num_choices"]])
        alone = runner.config["timed"] or runner.size > 1 or not runner.answerer.on_engine
        groups.setdefault(runner if alone else shared, []).append(runner)

    return list(groups.values())


class Progress(tqdm):
    """Show progress, and `postfix`: tqdm's line in a terminal, elsewhere a line a minute."""

    monitor_interval = 0  # no monitor thread during timed runs

    def __init__(self, label: str, total: int, done: int = 0, unit: str = "answers") -> None:
        self.terminal = sys.stderr.isatty()
        super().__init__(
            desc=label,
            total=total,
            initial=done,
            unit=unit,
            bar_format="{desc}: {n_fmt} of {total_fmt} {unit}{postfix}; {remaining} left",
            mininterval=0.1 if self.terminal else LOG_SECONDS,
            miniters=1,
            smoothing=0,
            delay=1e-9,
        )

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Write the line."""
        if self.terminal:
            super().display(msg, pos)
        else:
            print(self, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line."""
        if self.terminal:
            super().close()
