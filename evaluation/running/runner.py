"""One run, a question at a time: its settings, its resumed state, its answers, its summary.

A runner does nothing between two answers, so that the runs of a sweep can be interleaved (`scheduling.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from model.engine.sampling import Sampling
from model.errors import UserError
from model.files import write_text
from model.tuning import Load, threads_why

from ..configuration.fingerprint import default_folder, execution_used, run_settings, saved_start
from ..configuration.methods import CATEGORY, COLD, HOT, Method, build_method
from ..loading.bench import Bench, load_bench, ordered, prompt_ids, template_hash
from ..loading.models import LoadedModel, choose_execution, devices_in_words, load_model
from ..loading.settings import ModelSettings
from ..records.identity import SAVED, fingerprint
from ..records.provenance import circumstances, collect
from ..records.questions import FILE_ORDER, Question, subtask
from ..records.rows import Row
from ..records.store import AnswerStore
from ..statistics.metrics import measure
from .acceptance import acceptance_lines
from .answering import answer, warm_up


class Runner:
    """A run of one repeat of one configuration.

    Args:
        config: the whole configuration, with `repeat` a number.
        model: its model's settings, with the device chosen.
        answer_file: another file for the answers.

    Raises:
        UserError: a mistake of the user.
    """

    def __init__(self, config: dict[str, Any], model: ModelSettings, answer_file: Path | None = None) -> None:
        bench = load_bench(**config["bench"] | {"order": FILE_ORDER})  # a wrong one raises before weights are read
        order = config["bench"]["order"]
        # In the order asked for, even if it changes no answer: interleaved runs stay at the same question.
        self._questions = ordered(bench.questions, order)
        self.config, self.loaded = config, load_model(model)
        check_prompts(bench, self.loaded)
        reads_text = Sampling(**config["sampling"]).reads_text
        self.execution = choose_execution(str(config["execution"]), self.loaded, config["timed"], reads_text)
        saved = config["start"] == SAVED
        self.method = self._build(HOT if saved else str(config["start"]))
        if self.keeps_state:  # else there is one record for all orders
            bench = replace(bench, questions=self._questions, order=order)
        self.settings = run_settings(config, bench, self.method)
        if saved and self.keeps_state:
            self.method = self._build(saved_start(config, self.settings))
            self.settings = run_settings(config, bench, self.method)
        self.bench = bench
        given: str | None = config["run_dir"]
        self.folder = Path(given) if given else default_folder(config, self.settings, self.method)
        self.store = AnswerStore(self.folder, answer_file)
        self.done: dict[Any, Row] = {}
        self.pending: list[Question] = list(self._questions)

    def _build(self, start: str) -> Method:
        return build_method(self.loaded, self.config["method"], self.config["tree"], start, self.execution.name)

    @property
    def identity(self) -> str:
        """The same for runs that are one."""
        return json.dumps([str(self.folder), fingerprint(self.settings)], sort_keys=True)

    @property
    def rows(self) -> list[Row]:
        """The answers so far, in the order given."""
        return list(self.done.values())

    @property
    def keeps_state(self) -> bool:
        return self.method.start not in (None, COLD)

    @contextmanager
    def opened(self) -> Iterator[Runner]:
        """Lock the run's directory and read its finished answers.

        Raises:
            UserError: another process uses the directory, or it holds another run.
        """
        with self.store.locked():
            self.done = self.store.begin(self._metadata())
            self.pending = [q for q in self._questions if q.question_id not in self.done]
            self._resumed_at = len(self.done)
            yield self

    def prepare(self) -> None:
        """Warm up if the run is timed, and restore the state at which it stopped."""
        if self.config["timed"]:
            warm_up(self.method)
        torch.manual_seed(self.config["seed"])
        if self.done and self.keeps_state:
            self.method.drafter.load_state_dict(self.store.state_at(len(self.done)))  # type: ignore[union-attr]

    def _metadata(self) -> dict[str, Any]:
        loaded, method = self.loaded, self.method
        saved, timed = self.config["start"] == SAVED, self.config["timed"]
        more = {
            "label": method.label.replace("state)", f"{SAVED})") if saved else method.label,
            "execution_used": execution_used(method),
            **({"execution_why": self.execution.why} if self.execution.why and method.drafter else {}),
            **({"cudnn_attention": False} if loaded.target.device.type == "cuda" else {}),
            "questions": len(self.bench.questions),
            "question_hashes": [question.key for question in self.bench.questions],
            "template_sha256": template_hash(loaded.template, loaded.tokenizer),
            "vocab_size": loaded.target.vocab_size,
            "generation_config_left_out": loaded.left_out,
            **({"converted_from": loaded.converted_from} if loaded.converted_from else {}),
            "cores_busy_elsewhere": Load().cores_busy() if timed and loaded.target.device.type == "cpu" else None,
            **({"threads_why": why} if loaded.target.device.type == "cpu" and (why := threads_why()) else {}),
            "draft_tree": " ".join(",".join(map(str, p)) for p in method.tree.rank_paths[1:]) if method.tree else None,
            "config": self.config,
        }
        packages = ("torchao",) if loaded.settings.quantize else ()
        now = circumstances(devices_in_words(loaded), loaded.target.linear, *packages)
        return collect(self.settings, now, more)

    def forget_other_subtask(self) -> None:
        """With start=category, reset the state if the next question is the first of a subtask."""
        if self.method.start != CATEGORY or not self.done:
            return
        if subtask(self.pending[0].category) != subtask(str(self.rows[-1]["category"])):
            self.method.prepare()

    def keep(self, row: Row) -> None:
        """Save the answer of the next question, and the state after it."""
        self.done[row["question_id"]] = row
        state = self.method.drafter.state_dict() if self.method.drafter and self.keeps_state else {}
        self.store.append(row, state, len(self.done))
        del self.pending[0]

    def finish(self) -> None:
        """Write the summary, and keep the last state for runs with start=saved; leave a finished run untouched."""
        drafter, summary = self.method.drafter, measure(self.rows)
        if self.store.is_finished():
            return
        if drafter is not None and self._resumed_at == len(self.done):  # killed after its last answer
            if self.keeps_state:
                drafter.load_state_dict(self.store.last_state(len(self.done)))
            else:  # the final state was not saved: answer again
                answer(self._questions[-1], [(self.method, self.config)])
        state = drafter.state_dict() if drafter is not None else {}
        summary["state_bytes"] = sum(t.numel() * t.element_size() for t in state.values())
        if drafter is not None and (description := drafter.describe()):
            if self.method.start == COLD:  # reset before each prompt: it would be of the last prompt alone
                description.pop("predicted_speedup", None)
            summary["drafter"] = description
        if drafter is not None:
            write_text(self.folder / "acceptance.jsonl", acceptance_lines(self.rows, drafter.max_nodes - 1))
        self.store.finish(summary, state if self.keeps_state else {}, len(self.done))


def answer_next(sharing: Sequence[Runner]) -> None:
    """Answer the next question, the same for all these runs."""
    for runner in sharing:
        runner.forget_other_subtask()
    rows = answer(sharing[0].pending[0], [(runner.method, runner.config) for runner in sharing])
    for runner, row in zip(sharing, rows, strict=True):
        runner.keep(row)


def check_prompts(bench: Bench, loaded: LoadedModel) -> None:
    """Raise UserError if a first turn leaves no room for an answer, which would stop the run later."""
    for question in bench.questions:
        length = len(prompt_ids(loaded.template, loaded.tokenizer, [question.turns[0]], []))
        if length >= loaded.target.context:
            raise UserError(
                f"question {question.question_id}: its prompt of {length} tokens does not fit the context of "
                f"{loaded.target.context}; raise model.context or leave it out (bench.categories, bench.end)"
            )
