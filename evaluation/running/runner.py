"""One run, a question at a time: its settings, its resumed state, its next answer, its summary.

A runner does nothing between two answers, so that the runs of a sweep can be interleaved (`scheduling.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from model.engine.sampling import Sampling
from model.errors import UserError

from ..configuration.fingerprint import SAVED, default_folder, execution_used, run_settings, saved_start
from ..configuration.methods import CATEGORY, COLD, HOT, Method, build_method
from ..loading import processes
from ..loading.bench import Bench, load_bench, prompt_ids, template_hash
from ..loading.devices import MemoryUse, cores_busy
from ..loading.execution import choose_execution
from ..loading.models import LoadedModel, devices_in_words
from ..records.provenance import circumstances, collect
from ..records.questions import FILE_ORDER, Question, subtask
from ..records.rows import Row
from ..statistics.metrics import measure
from .answering import answer_question, warm_up


class Runner:
    """A run of one repeat of one configuration on a loaded model.

    Args:
        config: the whole configuration, with `repeat` a number.
        answer_file: another file for the answers.

    Raises:
        UserError: a mistake of the user.
    """

    def __init__(self, config: dict[str, Any], loaded: LoadedModel, answer_file: Path | None = None) -> None:
        self.config, self.loaded, self.memory = config, loaded, MemoryUse(loaded.target)
        reads_text = Sampling(**config["sampling"]).reads_text
        self.execution = choose_execution(str(config["execution"]), loaded, config["timed"], reads_text)
        self.bench = ordered = load_bench(**config["bench"])
        with self.memory.counted():
            self.method = self._method()
        if self.method.start in (None, COLD):  # no state is kept: one record for all orders
            self.bench = load_bench(**config["bench"] | {"order": FILE_ORDER})
        check_prompts(self.bench, loaded)
        self.settings = run_settings(config, self.bench, self.method)
        given: str | None = config["run_dir"]
        self.folder = Path(given) if given else default_folder(config, self.settings, self.method)
        self.store = processes.open_store(self.folder, answer_file)
        self.done: dict[Any, Row] = {}
        # In the order asked for, even if it changes no answer: interleaved runs stay at the same question.
        self._questions = ordered.questions
        self.pending: list[Question] = list(ordered.questions)

    def _method(self) -> Method:
        config, loaded = self.config, self.loaded
        saved = config["start"] == SAVED
        start, execution = HOT if saved else str(config["start"]), self.execution.name
        method = build_method(loaded, config["method"], config["tree"], start, execution)
        if saved and method.start is not None:
            state = saved_start(config, run_settings(config, self.bench, method))
            method = build_method(loaded, config["method"], config["tree"], state, execution)
        return method

    @contextmanager
    def opened(self) -> Iterator[Runner]:
        """Lock the run's directory and read its finished answers.

        Raises:
            UserError: another process uses the directory, or it holds another run.
        """
        with self.store.locked():
            self.done = self.store.begin(self._metadata(), self.config["allow_mixed"])
            self.pending = [q for q in self._questions if q.question_id not in self.done]
            yield self

    def prepare(self) -> None:
        """Warm up if the run is timed, and restore the state at which it stopped."""
        if self.config["timed"]:
            with self.memory.counted():
                warm_up(self.method)
        torch.manual_seed(self.config["seed"])
        if self.done and self._keeps_state:
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
            "cores_busy_elsewhere": cores_busy() if timed and loaded.target.device.type == "cpu" else None,
            "draft_tree": " ".join(",".join(map(str, p)) for p in method.tree.rank_paths[1:]) if method.tree else None,
            "config": self.config,
        }
        packages = ("torchao",) if loaded.settings.quantize else ()
        now = circumstances(devices_in_words(loaded), loaded.target.linear, *packages)
        return collect(self.settings, now, more)

    @property
    def rows(self) -> list[Row]:
        """The answers so far, in the order given."""
        return list(self.done.values())

    @property
    def _keeps_state(self) -> bool:
        return self.method.drafter is not None and self.method.start not in (None, COLD)

    def answer(self, other_bytes: int = 0) -> None:
        """Answer the next question and save the answer and the state after it.

        Args:
            other_bytes: memory of the other runners' methods on the CUDA devices.
        """
        question = self.next_question()
        with self.memory.counted():
            row = answer_question(question, self.method, self.config, other_bytes)
        self.keep(row)

    def next_question(self) -> Question:
        """Return the next question. With start=category, reset the state if it is the first of a subtask."""
        question = self.pending[0]
        if self.method.start == CATEGORY and self.done:
            before = str(self.rows[-1]["category"])
            if subtask(question.category) != subtask(before):
                self.method.prepare()
        return question

    def keep(self, row: Row) -> None:
        """Save the answer of the next question."""
        self.done[row["question_id"]] = row
        state = self.method.drafter.state_dict() if self.method.drafter and self._keeps_state else {}
        self.store.append(row, state, len(self.done))
        del self.pending[0]

    def finish(self) -> None:
        """Write the summary, and save the last state for runs with start=saved."""
        summary = measure(self.rows)
        drafter = self.method.drafter
        state = drafter.state_dict() if drafter is not None else {}
        summary["state_bytes"] = sum(t.numel() * t.element_size() for t in state.values())
        if drafter is not None and (description := drafter.describe()):
            if self.method.start == COLD:  # reset before each prompt: it would be of the last prompt alone
                description.pop("predicted_speedup", None)
            summary["drafter"] = description
        self.store.finish(summary, state if self._keeps_state else {}, len(self.done))

    def finish_if_interrupted(self) -> None:
        """Write the summary of a run that was killed after its last answer; leave a finished run untouched."""
        if self.store.is_finished():
            return
        if self._keeps_state:
            self.method.drafter.load_state_dict(self.store.last_state(len(self.done)))  # type: ignore[union-attr]
        elif self.method.drafter is not None:  # the final state was not saved: answer again
            answer_question(self._questions[-1], self.method, self.config)
        self.finish()


def check_prompts(bench: Bench, loaded: LoadedModel) -> None:
    """Raise UserError if a first turn leaves no room for an answer, which would stop the run later."""
    for question in bench.questions:
        length = len(prompt_ids(loaded.template, loaded.tokenizer, [question.turns[0]], []))
        if length >= loaded.target.context:
            raise UserError(
                f"question {question.question_id}: its prompt of {length} tokens does not fit the context of "
                f"{loaded.target.context}; raise model.context or leave it out (bench.categories, bench.end)"
            )
