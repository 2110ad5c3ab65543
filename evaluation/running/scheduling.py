"""Run jobs alone, or interleave them question by question, so that a drift favours none."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from model.files import local_path
from model.tuning import choose_threads

from ..errors import noted
from ..loading.devices import exclusive, keep_devices
from ..loading.models import ModelSettings
from ..records.provenance import describe_device
from ..records.rows import read_object
from ..records.runs import SAVED
from ..records.store import note_done
from .runner import Runner, answer_next, runs_folder

LOG_SECONDS = 60.0  # between two updates of progress in a log: more would fill it
tqdm.monitor_interval = 0  # no monitor thread during timed runs


@dataclass
class Job:
    """A configuration to run; `overrides` name it in the list of the command's jobs."""

    config: dict[str, Any]
    overrides: list[str] = field(default_factory=list)


def run_jobs(
    jobs: Sequence[Job],
    failures: set[str] | None = None,
    answer_file: Path | None = None,
    given: Container[str] = (),
) -> list[Path]:
    """Run jobs, those of a group question by question; return the folders of the finished runs.

    Args:
        failures: gets the errors that the user can fix, and the other jobs go on; None: one is
            raised.
        given: names of settings; a group says first which runs ignore which.
    """
    folders: list[Path] = []
    printed: set[str] = set()
    with keep_devices():
        for group in grouped(jobs):
            with noted(failures):
                _run(group, _Turns(failures, folders, given), answer_file, printed)

    return folders


def grouped(jobs: Sequence[Job]) -> list[list[Job]]:
    """Group jobs in the order in which they run; those with start=saved read hot runs' states.

    A job is alone, or interleaved with those of the same model, bench and repeat.
    """

    def place(job: Job) -> tuple[bool, int]:
        return job.config["start"] == SAVED, job.config["repeat"]

    groups = defaultdict[str, list[Job]](list)
    for number, job in enumerate(sorted(jobs, key=place)):
        config = job.config
        bench = {key: value for key, value in config["bench"].items() if key != "order"}
        is_alone = config["timed"] and not config["interleave"]
        shared = [number] if is_alone else [config["model"], bench]
        groups[json.dumps([*place(job), *shared], sort_keys=True)].append(job)

    return [*groups.values()]


def _run(
    group: Sequence[Job],
    turns: _Turns,
    answer_file: Path | None,
    printed: set[str],
) -> None:
    first = group[0].config

    timed = any(job.config["timed"] for job in group)

    with exclusive(ModelSettings(**first["model"]), timed) as model, ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())  # as the caller had it
        if about := choose_threads(recorded_threads(first), "as this experiment's other runs"):
            print(about, file=sys.stderr)

        for job in group:
            turns.add(job, model, answer_file)

        ignored = "; ".join(f"{key} by {', '.join(by)}" for key, by in turns.ignored.items())
        if ignored and ignored not in printed:
            printed.add(ignored)
            print(f"ignored: {ignored}", file=sys.stderr)

        turns.begin(stack)
        turns.answer()


def recorded_threads(config: dict[str, Any]) -> int | None:
    """Return the number of threads that an experiment's runs used on this processor, or None.

    So a run is resumed with its own number, however busy the machine is then.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return None

    counts = []
    run_dir = config["run_dir"]
    for folder in [local_path(run_dir)] if run_dir else runs_folder(config).glob("*"):
        recorded = read_object(folder / "metadata.json")
        threads = recorded.get("threads")
        if threads and recorded.get("device") == describe_device(torch.device("cpu"), threads):
            counts.append(((folder / "summary.json").exists(), threads))

    return min(counts)[1] if counts else None


class _Turns:
    """Runs that take turns on one model; those that share a forward fail together."""

    def __init__(
        self, failures: set[str] | None, folders: list[Path], given: Container[str]
    ) -> None:
        self.failures = failures
        self.folders = folders  # of finished runs
        self.given = given
        # by setting, the labels of the runs that ignore it, as keys
        self.ignored = defaultdict[str, dict[str, None]](dict)
        # of each unfinished run, which several jobs may share
        self.jobs: dict[Runner, list[Job]] = {}

    def add(self, job: Job, model: ModelSettings, answer_file: Path | None) -> None:
        with self._dropped_on_error():
            runner = Runner(job.config, model, answer_file)
            for key in runner.ignored(self.given):
                self.ignored[key][runner.answerer.label] = None
            same = next((other for other in self.jobs if other.key == runner.key), runner)
            self.jobs.setdefault(same, []).append(job)

    def begin(self, stack: ExitStack) -> None:
        for runner in list(self.jobs):
            with self._dropped_on_error(runner):
                stack.enter_context(runner.store.locked())
                runner.resume()
                if not runner.pending:
                    print(f"{runner.folder}: was finished already", file=sys.stderr)
                self._complete(runner)

        on_engine = [runner for runner in self.jobs if runner.answerer.on_engine]
        if on_engine:
            sizes = [runner.answerer.drafter.max_nodes for runner in on_engine]
            timed = any(runner.config["timed"] for runner in on_engine)
            # one cache for all, as captured steps are bound to their cache
            on_engine[0].loaded.target.reserve(max(sizes) if timed else sum(sizes))

        for runner in list(self.jobs):
            with self._dropped_on_error(runner):
                runner.prepare()

    def answer(self) -> None:
        """Answer question by question; interrupted runs catch up with the others first."""
        if not self.jobs:
            return
        labels = [runner.answerer.label for runner in self.jobs]
        what = labels[0] if len(labels) == 1 else f"{len(labels)} configurations, interleaved"
        done = sum(len(runner.done) for runner in self.jobs)
        pending = sum(len(runner.pending) for runner in self.jobs)

        with progress_bar(what, done + pending, done) as progress:
            while self.jobs:
                position = min(len(runner.done) for runner in self.jobs)
                behind = [runner for runner in self.jobs if len(runner.done) == position]

                for sharing in group_by_question(behind):
                    with self._dropped_on_error(*sharing):
                        count = answer_next(sharing)
                        label = f"{sharing[0].answerer.label}: " if len(labels) > 1 else ""
                        progress.set_postfix_str(label + sharing[0].figures, refresh=False)
                        progress.update(count)
                        for runner in sharing:
                            self._complete(runner)

    def _complete(self, runner: Runner) -> None:
        if not runner.pending:
            runner.finish()
            self.folders.append(runner.folder)

            for job in self._drop(runner):
                if job.overrides:
                    note_done(job.config, job.overrides, runner.folder)

    def _drop(self, runner: Runner) -> list[Job]:
        del runner.answerer
        jobs = self.jobs.pop(runner)
        if not self.jobs:
            runner.loaded.release()
        return jobs

    @contextmanager
    def _dropped_on_error(self, *runners: Runner) -> Iterator[None]:
        with noted(self.failures):
            try:
                yield
            except Exception:
                for runner in runners:
                    if runner in self.jobs:
                        self._drop(runner)
                raise


def group_by_question(runners: Sequence[Runner]) -> list[list[Runner]]:
    groups = defaultdict[Any, list[Runner]](list)
    for runner in runners:
        question = json.dumps([runner.pending[0].key, runner.config["num_choices"]])
        groups[question if runner.shares_forwards else runner].append(runner)

    return list(groups.values())


def progress_bar(label: str, total: int, done: int = 0) -> tqdm:
    """Return a bar that shows progress and `postfix`, in a log once a minute."""
    return tqdm(
        desc=label,
        total=total,
        initial=done,
        bar_format="{desc}: {n_fmt} of {total_fmt} answers{postfix}; {remaining} left",
        mininterval=0.1 if sys.stderr.isatty() else LOG_SECONDS,
        miniters=1,
        smoothing=0,
    )
