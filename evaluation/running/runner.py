"""One run, a question or a batch of them at a time."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model.engine import GREEDY, Sampling
from model.engine.loop.batch import check_batch
from model.errors import UserError
from model.files import ROOT, local_path, write_text
from model.tuning import busy_cores, threads_why

from ..configuration.config import IDLE_IF_GREEDY, changed_sampling
from ..loading.answerers import CATEGORY, COLD, HOT, Answerer, Served, build_answerer
from ..loading.bench import Bench, chat_of, load_bench, ordered, prompt_ids
from ..loading.models import (
    LoadedModel,
    ModelSettings,
    choose_execution,
    devices_in_words,
    load_model,
    load_without_weights,
)
from ..records.provenance import circumstances, collect, without_passwords
from ..records.rows import (
    FILE_ORDER,
    SCHEMA,
    Question,
    Row,
    new_tokens,
    read_questions,
    subtask,
    tokens_and_steps,
    wall_time,
)
from ..records.runs import GENERATE, SAVED, recorded_date, without_paths
from ..records.store import AnswerStore, experiment_folder
from ..statistics.metrics import measure
from .answering import acceptance_lines, answer

WARM_UP = ROOT / "data/sample/warmup.jsonl"  # held out from every bench


class Runner:
    """A run of one repeat of one configuration; raises UserError for a mistake of the user.

    Args:
        config: the whole configuration, with `repeat` a number.
        model: its model's settings, with the device chosen.

    Attributes:
        execution: how steps run, and why they run so.
        recorded: the settings that decide answers and measurements.
        bench: the questions in the order that is recorded.
        key: equal for two runs that would write the same files.
        done: the stored answers by question id.
        pending: the questions without an answer, in the order asked.
    """

    def __init__(
        self,
        config: dict[str, Any],
        model: ModelSettings,
        answer_file: Path | None = None,
    ) -> None:
        self.config = config
        self.size = config["batch"]  # questions answered at a time
        order = config["bench"]["order"]
        # before the model: a wrong bench or order raises before weights are read
        bench = load_bench(**config["bench"] | {"order": FILE_ORDER})
        self._questions = ordered(bench.questions, order)

        load = load_model if config["method"].get("audit", True) else load_without_weights
        self.loaded = load(model)
        check_prompts(bench, self.loaded)

        self.execution = choose_execution(
            str(config["execution"]),
            self.loaded,
            config["timed"],
            reads_text=Sampling(**config["sampling"]).reads_text,
        )

        self.saved = config["start"] == SAVED
        start = HOT if self.saved else str(config["start"])
        self.answerer = build_answerer(
            self.loaded, config["method"], config["tree"], start, self.execution.name
        )
        self._check_batch()

        # Else all orders have the same record. Questions are asked in this order in any case, so
        # that interleaved runs stay at the same one.
        if self.answerer.keeps_state or self.size > 1:
            bench = replace(bench, questions=self._questions, order=order)
        recorded = recorded_settings(config, bench, self.answerer)
        if self.saved and self.answerer.keeps_state:
            # the state's file is found by the settings of the hot run
            self.answerer.start_from(saved_state(config, recorded, self.answerer))
            recorded = recorded_settings(config, bench, self.answerer)
        self.bench = bench
        self.recorded = recorded

        run_dir = config["run_dir"]
        default = default_folder(config, recorded, self.answerer)
        self.folder = local_path(run_dir) if run_dir else default
        if self.loaded.reads_date:
            self.answerer.date = prompt_date(self.folder)
        self.key = json.dumps([str(self.folder), without_paths(recorded)], sort_keys=True)
        self.store = AnswerStore(self.folder, answer_file)

        self.done: dict[Any, Row] = {}
        self._totals = np.zeros(3)  # new tokens, steps and seconds
        self.pending: list[Question] = list(self._questions)

    def _check_batch(self) -> None:
        questions = len(self._questions)
        if self.size > questions:
            raise UserError(
                f"batch={self.size}: there are {questions} questions; use at most so many"
            )
        if self.size > 1 and self.answerer.start in (COLD, CATEGORY):
            raise UserError(
                f"start={self.answerer.start}: forgets between prompts what those of a batch share;"
                " use start=hot, or batch=1"
            )
        if self.size > 1 and self.answerer.on_engine:
            check_batch(self.loaded.target)

    def ignored(self, given: Container[str]) -> list[str]:
        """Return the given settings that change nothing of this run, some with the reason."""
        greedy = not self.config["sampling"].get("temperature")
        method = self.answerer.settings
        nodes = self.config["tree"]["nodes"] or 0

        # by setting, and perhaps the reason, whether it is ignored
        ignored = {
            "start": self.answerer.start is None,
            "repeats at timed=false": not self.config["timed"],
            "tree.nodes (fewer fit)": nodes > method.get("tree_nodes", nodes),
            **dict.fromkeys(("execution", "phases", "model.linear"), not self.answerer.on_engine),
            **{f"sampling.{key} at temperature 0": greedy for key in IDLE_IF_GREEDY},
        }
        return [key for key in ignored if ignored[key] and key.split()[0] in given]

    @property
    def shares_forwards(self) -> bool:
        return self.answerer.on_engine and not self.config["timed"] and self.size == 1

    def resume(self) -> None:
        """Read the answers of the locked directory. Raises UserError if it holds another run."""
        self._add(self.store.begin(self._metadata()))
        self.pending = [q for q in self._questions if q.question_id not in self.done]
        self._resumed_at = len(self.done)

    def prepare(self) -> None:
        """Warm up if the run is timed, and restore the state at which it stopped.

        Warming up on a held-out question keeps allocation and first-call costs out of the timings.
        """
        if self.config["timed"]:
            turns = read_questions(WARM_UP)[0].turns
            loaded = self.loaded

            # half of a short context is left to the answer
            chat = chat_of(turns[:1], [])
            prompt = prompt_ids(loaded.template, loaded.tokenizer, chat, self.answerer.date)
            prompt = prompt[: max(loaded.target.context // 2, 1)]

            if self.size > 1:
                self.answerer.answer_batch([prompt] * self.size, 48, [GREEDY] * self.size)
            else:
                self.answerer.answer(prompt, 48)

            self.answerer.prepare()

        torch.manual_seed(self.config["seed"])
        if self.done and self.answerer.keeps_state:
            self.answerer.drafter.load_state_dict(self.store.state_at(len(self.done)))

    def _metadata(self) -> dict[str, Any]:
        loaded = self.loaded
        answerer = self.answerer
        device = loaded.target.device.type
        timed_on_cpu = self.config["timed"] and device == "cpu"

        # a saved state has the name of its file; the tables call it by its kind
        label = answerer.label.replace("state)", f"{SAVED})") if self.saved else answerer.label
        in_steps = answerer.on_engine or isinstance(answerer, Served)

        # rank paths of the tree's nodes, the root left out: "0 1 0,0"
        tree = answerer.drafter.draft_tree
        nodes = None
        if tree is not None:
            nodes = " ".join(",".join(map(str, path)) for path in tree.rank_paths[1:])

        more = {
            "label": label,
            "date": answerer.date,
            "execution_used": answerer.execution if in_steps else GENERATE,
            "execution_why": self.execution.why if answerer.on_engine else "",
            **({"cudnn_attention": False} if device == "cuda" else {}),
            "questions": len(self.bench.questions),
            "question_hashes": [question.key for question in self.bench.questions],
            "generation_config_left_out": loaded.left_out,
            "converted_from": loaded.converted_from,
            "cores_busy_elsewhere": busy_cores() if timed_on_cpu else None,
            "threads_why": threads_why() if device == "cpu" else "",
            "draft_tree": nodes,
            "config": without_passwords(self.config),
        }
        packages = ("torchao",) if loaded.settings.quantize else ()
        now = circumstances(devices_in_words(loaded), str(loaded.target.linear), *packages)
        return collect(self.recorded, now, more)

    def forget_other_subtask(self) -> None:
        """With start=category, reset the state if the next question is the first of a subtask."""
        if self.answerer.start == CATEGORY and self.done:
            last = subtask(str(next(reversed(self.done.values()))["category"]))
            following = subtask(self.pending[0].category)
            if following != last:
                self.answerer.prepare()

    def keep(self, rows: Sequence[Row]) -> None:
        self._add({row["question_id"]: row for row in rows})

        state = self.answerer.drafter.state_dict() if self.answerer.keeps_state else {}
        self.store.append(rows, state, len(self.done))
        del self.pending[: len(rows)]

    @property
    def figures(self) -> str:
        tokens, steps, seconds = self._totals
        mat = f"MAT {tokens / steps:.2f}" if steps else ""
        speed = f"{tokens / seconds:.0f} tokens/s" if seconds else ""
        return ", ".join(filter(None, (mat, speed)))

    def _add(self, rows: dict[Any, Row]) -> None:
        self.done |= rows
        for row in rows.values():
            self._totals += (new_tokens(row), tokens_and_steps(row)[1], wall_time(row))

    def finish(self) -> None:
        """Write the summary, if it is not there, and keep the last state for start=saved."""
        if self.store.is_finished():
            return

        answerer = self.answerer
        rows = list(self.done.values())

        # killed after its last answer: with the state after that
        if self._resumed_at == len(rows) and answerer.keeps_state:
            answerer.drafter.load_state_dict(self.store.state_at(len(rows)))

        state = answerer.drafter.state_dict()
        summary = measure(rows)
        summary["state_bytes"] = sum(t.numel() * t.element_size() for t in state.values())

        described = answerer.drafter.describe()
        # would be of the last prompt only, or of the last batch's width
        if answerer.start == COLD or self.size > 1:
            described.pop("predicted_speedup", None)

        if described:
            summary["drafter"] = described

        if answerer.on_engine:
            most = answerer.drafter.max_nodes - 1
            lines = ["".join(acceptance_lines(row, most)) for row in rows]
            write_text(self.folder / "acceptance.jsonl", "".join(lines))

        self.store.finish(summary, state if answerer.keeps_state else {}, len(rows))


def answer_next(sharing: Sequence[Runner]) -> int:
    """Answer the next question of runs that share it, or a run's next batch."""
    for runner in sharing:
        runner.forget_other_subtask()

    questions = sharing[0].pending[: sharing[0].size]
    rows = answer(questions, [(runner.answerer, runner.config) for runner in sharing])

    # a run of several that share has one row; a run alone has the rows of its batch
    for i, runner in enumerate(sharing):
        runner.keep(rows[i * len(questions) : (i + 1) * len(questions)])

    return len(rows)


def check_prompts(bench: Bench, loaded: LoadedModel) -> None:
    """Raise UserError if a first turn leaves no room for an answer."""
    for question in bench.questions:
        chat = chat_of(question.turns[:1], [])
        length = len(prompt_ids(loaded.template, loaded.tokenizer, chat))
        if length >= loaded.target.context:
            raise UserError(
                f"question {question.question_id}: its prompt of {length} tokens does not fit the"
                f" context of {loaded.target.context}; raise model.context or leave it out"
                " (bench.categories, bench.end)"
            )


def recorded_settings(config: dict[str, Any], bench: Bench, answerer: Answerer) -> dict[str, Any]:
    loaded = answerer.loaded
    target = loaded.target
    attention = target.model.config.get_text_config()._attn_implementation

    model = asdict(loaded.settings) | {
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "template": loaded.template,
        "attention": "eager" if attention == "eager" else "sdpa",  # of draft nodes
        "context": target.context,
        "files": loaded.files,
    }
    del model["path"]  # the files' digests identify the model, wherever it is stored

    method = answerer.settings
    if "share_noise" in method and not config["sampling"].get("temperature"):
        method = method | {"share_noise": False}  # greedy answers have no noise

    ids = [question.question_id for question in bench.questions]
    recorded = {
        "model": model,
        "bench": {
            "name": bench.name,
            "sha256": bench.sha256,
            "ids_sha256": _sha256(ids),
            "questions": len(ids),
            "order": bench.order,
        },
        "method": method,
        "execution": answerer.execution,
        "schema": SCHEMA,
        "sampling": changed_sampling(config),
    }

    # as asked
    for key in ("max_new_tokens", "num_choices", "seed", "phases", "repeat", "timed", "batch"):
        recorded[key] = config[key]

    return recorded


def runs_folder(config: dict[str, Any]) -> Path:
    return experiment_folder(config) / "runs"


def default_folder(config: dict[str, Any], recorded: dict[str, Any], answerer: Answerer) -> Path:
    """Return the folder of a configuration: readable words and a hash of its settings."""
    words = [
        recorded["model"]["name"],
        recorded["bench"]["name"],
        answerer.label,
        answerer.settings.get("tree", ""),
    ]
    name = "-".join(re.sub(r"[^\w.]+", "_", str(word)).strip("_") for word in words if word)
    end = f"-{_sha256(without_paths(recorded))[:8]}"
    runs = runs_folder(config)
    return next(runs.glob(f"*{end}"), runs / f"{name}{end}")


def prompt_date(folder: Path) -> str:
    """Return the date of a run's prompts: its own, else that of the runs next to it, else today."""
    others = filter(None, map(recorded_date, folder.parent.glob("*")))
    return recorded_date(folder) or min(others, default=date.today().isoformat())


def saved_state(config: dict[str, Any], hot: dict[str, Any], answerer: Answerer) -> Path:
    """Return the state that the same configuration's hot run saved, of this repeat or the first.

    Other update rules use the run of update=all. Raises UserError if there is no such run yet.
    """
    method = dict(hot["method"])
    if "update" in method:
        method["update"] = "all"

    for repeat in (hot["repeat"], 0):
        of_repeat = hot | {"method": method, "repeat": repeat}
        state = default_folder(config, of_repeat, answerer) / "state.safetensors"
        if state.exists():
            return state

    raise UserError(
        f"start=saved: there is no finished run of {hot['method']['name']} with start=hot,"
        f" these settings and these files in {runs_folder(config)}; run it first (in a sweep:"
        " start=hot,saved), or name a file"
    )


def _sha256(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
