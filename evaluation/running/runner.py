"""One run, a question at a time: what it is, where it stopped, its next answer, its summary.

So that the runs of a sweep can take turns (`together.py`), a runner does nothing by itself between two answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from model.decoding.sampling import Sampling
from model.errors import UserError

from ..configuration.fingerprint import SAVED, default_folder, execution_used, run_settings, saved_start
from ..configuration.methods import CATEGORY, COLD, HOT, Method, build_method
from ..loading import processes
from ..loading.bench import Bench, load_bench, prompt_ids, template_hash
from ..loading.devices import Holding, cores_busy
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
        config: the whole of it, `repeat` a number.
        answer_file: another place for the answers.

    Raises:
        UserError: whatever a user can mend.
    """

    def __init__(self, config: dict[str, Any], loaded: LoadedModel, answer_file: Path | None = None) -> None:
        self.config, self.loaded, self.holding = config, loaded, Holding(loaded.target)
        reads_text = Sampling(**config["sampling"]).reads_text
        self.execution = choose_execution(str(config["execution"]), loaded, config["timed"], reads_text)
        self.execution.take(loaded.target)
        self.bench = asked = load_bench(**config["bench"])
        with self.holding.counted():
            self.method = self._method()
        if self.method.start in (None, COLD):  # nothing is carried on, so the order decides nothing: one for all orders
            self.bench = load_bench(**config["bench"] | {"order": FILE_ORDER})
        check_prompts(self.bench, loaded)
        self.settings = run_settings(config, self.bench, self.method)
        given: str | None = config["run_dir"]
        self.folder = Path(given) if given else default_folder(config, self.settings, self.method)
        self.store = processes.open_store(self.folder, answer_file)
        self.done: dict[Any, Row] = {}
        # Those left, in the order that was asked for, be it that it decides nothing: so it keeps step with the others.
        self._asked = asked.questions
        self.pending: list[Question] = list(asked.questions)

    def _method(self) -> Method:
        config, loaded = self.config, self.loaded
        saved = config["start"] == SAVED
        method = build_method(loaded, config["method"], config["tree"], HOT if saved else str(config["start"]))
        if saved and method.start is not None:
            state = saved_start(config, run_settings(config, self.bench, method))
            method = build_method(loaded, config["method"], config["tree"], state)
        return method

    @contextmanager
    def begun(self) -> Iterator[Runner]:
        """Hold the run's directory, and know what is done.

        Raises:
            UserError: another process is at work there, or it holds another run.
        """
        with self.store.locked():
            self._take_turn()  # what its metadata say of the target is this run's
            self.done = self.store.begin(self._metadata(), self.config["allow_mixed"])
            self.pending = [q for q in self._asked if q.question_id not in self.done]
            yield self

    def prepare(self) -> None:
        """Be where the run stopped: warm if it is timed, and with its state."""
        self._take_turn()
        if self.config["timed"]:
            with self.holding.counted():
                warm_up(self.method)
        torch.manual_seed(self.config["seed"])
        if self.done and self._carries:
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
        """The answers so far, in their order."""
        return list(self.done.values())

    @property
    def _carries(self) -> bool:
        return self.method.drafter is not None and self.method.start not in (None, COLD)

    def _take_turn(self) -> None:
        self.execution.take(self.loaded.target)  # another runner may have set its own

    def answer(self, others: int = 0) -> None:
        """Answer the next question and keep it, with the state after it.

        Args:
            others: bytes that other runners hold on the CUDA devices.
        """
        question = self.next_question()
        with self.holding.counted():
            row = answer_question(question, self.method, self.config, others)
        self.keep(row)

    def next_question(self) -> Question:
        """What is to be answered now, with the state that it is answered from.

        With start=category the state is carried on within a subtask and forgotten where the subtask changes.
        """
        self._take_turn()
        question = self.pending[0]
        if self.method.start == CATEGORY and self.done:
            before = str(self.rows[-1]["category"])
            if subtask(question.category) != subtask(before):
                self.method.prepare()
        return question

    def keep(self, row: Row) -> None:
        """The next question is answered: this is its row."""
        self.done[row["question_id"]] = row
        state = self.method.drafter.state_dict() if self.method.drafter and self._carries else {}
        self.store.append(row, state, len(self.done))
        del self.pending[0]

    def finish(self) -> None:
        """Write the run's overall figures, and keep the last state for other runs to start from."""
        summary: dict[str, Any] = asdict(measure(self.rows))
        drafter = self.method.drafter
        state = drafter.state_dict() if drafter is not None else {}
        summary["state_bytes"] = sum(t.numel() * t.element_size() for t in state.values())
        if drafter is not None and (told := drafter.describe()):
            if self.method.start == COLD:  # forgotten before each prompt: it would be the last one's alone
                told.pop("predicted_speedup", None)
            summary["drafter"] = told
        self.store.finish(summary, state if self._carries else {}, len(self.done))

    def finish_late(self) -> None:
        """The same for a run that was killed behind its last answer; of one that is finished nothing is touched."""
        if self.store.is_finished():
            return
        if self._carries:
            self.method.drafter.load_state_dict(self.store.last_state(len(self.done)))  # type: ignore[union-attr]
        elif self.method.drafter is not None:  # what it held at the end was not kept: it is there after the same answer
            self._take_turn()
            answer_question(self._asked[-1], self.method, self.config)
        self.finish()


def check_prompts(bench: Bench, loaded: LoadedModel) -> None:
    """Refuse now what would stop the run later: a first turn that leaves no room for an answer."""
    for question in bench.questions:
        length = len(prompt_ids(loaded.template, loaded.tokenizer, [question.turns[0]], []))
        if length >= loaded.target.context:
            raise UserError(
                f"question {question.question_id}: its prompt of {length} tokens does not fit the context of "
                f"{loaded.target.context}; raise model.context or leave it out (bench.categories, bench.end)"
            )
