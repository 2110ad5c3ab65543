"""Runs: what their metadata says, which are the same, and how they are read from disk."""

from __future__ import annotations

import glob
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from model.errors import UserError
from model.files import local_path
from model.methods import METHODS

from . import compact
from .rows import (
    Row,
    check_record,
    check_rows,
    later_steps,
    new_tokens,
    question_key,
    question_speed,
    read_answers,
    read_object,
    subtask,
    tokens_and_steps,
    wall_time,
)

Settings = dict[str, Any]

STOCK = ("hf", "hf_lookup", "hf_assisted")  # transformers' own decoding
IN_TABLES = (*STOCK, *METHODS)
GENERATE = "transformers generate"  # the execution of hf, which does not use this engine
# executions of this engine inside transformers' generate (`Generate`), by the execution of their
# steps
INSIDE = {"eager": "custom_generate", "graph": "custom_generate, graph"}
SERVED = "served"  # the execution of a server
UNKNOWN = "not recorded"
FLOATS = {"F32", "F16", "BF16"}  # types of a GGUF file's tensors that are not quantised

# start=saved: start from the state that the hot run of the same configuration saved
SAVED = "saved"
SERVER = "server"  # in place of a drafter: a server of any engine answers
NO_SPECULATION = "none"  # reported by a server that does not speculate, or set by its user
# Sampling settings and the names of their columns, which differ as a method may have a top_k, too.
SAMPLING_COLUMNS = {
    "temperature": "temperature",
    "top_k": "sampling_top_k",
    "top_p": "sampling_top_p",
    "min_p": "sampling_min_p",
    "repetition_penalty": "repetition_penalty",
}
# method settings that the label or other facets name
_NAMED = ("name", "drafter", "start", "tree", "tree_nodes")
# settings that select questions: a selection is no shard
_SELECTION = ("split", "categories", "per_category", "spread")
# names of a table's other columns, which a method's settings must not take
_COLUMNS = {
    "dtype",
    "device",
    "model",
    "bench",
    "method",
    "variant",
    "seed",
    "execution",
    "timed",
    "phases",
    "order",
    "batch",
    *SAMPLING_COLUMNS.values(),
}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")
_THREADS = re.compile(r", \d+ threads?$")


def without_paths(settings: Settings) -> Settings:
    """Return the settings that a resumed run must share, without names of files with digests."""
    method = settings["method"]
    # tree: a fixed tree's name
    paths = [key for key in method if f"{key}_sha256" in method and key != "tree"]
    model = settings.get("model", {})
    names = ("name", "revision") if model.get("files") else ()
    return settings | {
        "method": {key: value for key, value in method.items() if key not in paths},
        "model": {key: value for key, value in model.items() if key not in names},
    }


def recorded_date(folder: Path) -> str | None:
    return read_object(folder / "metadata.json").get("date")


@dataclass(frozen=True)
class Run:
    """A run read from disk: its metadata, and its answers in the order of the bench."""

    folder: Path
    metadata: dict[str, Any]
    answers: list[Row]

    @property
    def settings(self) -> Settings:
        return dict(self.metadata["settings"])

    @property
    def config(self) -> Settings:
        return dict(self.metadata.get("config", {}))

    @property
    def repeat(self) -> int:
        return int(self.settings.get("repeat") or 0)

    @property
    def question_keys(self) -> tuple[str, ...]:
        """Keys of the questions to answer, in their order; empty if not recorded."""
        return tuple(self.metadata.get("question_hashes", ()))

    @cached_property
    def draft_tree(self) -> list[tuple[int, ...]]:
        """The fixed tree's nodes as rank paths, breadth-first, without the root; [] if none."""
        paths = re.findall(r"\d+(?:,\d+)*", self.metadata.get("draft_tree") or "")
        return [tuple(map(int, path.split(","))) for path in paths]

    @property
    def is_served(self) -> bool:
        return bool(self.settings["method"]["drafter"] == SERVER)

    @property
    def files(self) -> dict[str, str]:
        return dict(self.settings["model"].get("files", {}))

    @property
    def model(self) -> str:
        model = self.settings["model"]
        rounded = f" rounded to {model['weights']}" if model.get("weights") == "float16" else ""
        return f"{model['name']}{rounded}"

    @property
    def precision(self) -> str:
        half = "half" in str(self.metadata.get("circumstances", {}).get("linear"))
        return f"{self.settings['model']['dtype']}{' from 16-bit weights' if half else ''}"

    @property
    def label(self) -> str:
        return str(self.metadata["label"])

    @property
    def quantized(self) -> str:
        """What its weights are or were quantised to, by torchao or in a GGUF file; or empty."""
        types = self.metadata.get("converted_from", {}).get("tensor_types", {})
        return self.settings["model"].get("quantize") or ", ".join(sorted(types.keys() - FLOATS))

    @property
    def complete(self) -> bool:
        return len(self.answers) == int(self.metadata["questions"])

    @property
    def execution(self) -> str:
        """How steps ran: eager, graph, INSIDE, GENERATE or SERVED."""
        return str(self.metadata.get("execution_used", self.settings["execution"]))

    @cached_property
    def summary(self) -> dict[str, Any]:
        return self.metadata.get("summary") or read_object(self.folder / "summary.json")

    # --- which runs are the same

    @cached_property
    def comparable(self) -> tuple[str, ...]:
        """Key shared by runs that may be compared on common questions."""
        settings = without_paths(self.settings)
        compared = {
            **settings["model"],
            "bench": settings["bench"]["name"],
            "file": settings["bench"].get("sha256"),
            "limit": settings["max_new_tokens"],
            "choices": settings.get("num_choices"),
        }
        parts = (f"{key}={compared[key]}" for key in sorted(compared))
        return (*parts, self.device)

    @property
    def device(self) -> str:
        """The device, with the CPU's threads if steps were timed."""
        device = str(self.metadata["device"])
        return device if self.settings.get("timed", True) else _THREADS.sub("", device)

    @cached_property
    def selection(self) -> frozenset[str]:
        """Key shared by runs of the same questions."""
        bench = self.settings["bench"]
        unknown = f"{bench.get('questions')} questions, {bench.get('ids_sha256')}"
        return frozenset(self.question_keys or [unknown])

    @cached_property
    def configuration(self) -> str:
        """Key shared by the repeats and shards of one configuration."""
        settings = without_paths(self.settings)
        bench = dict(settings.pop("bench"))
        method = settings.pop("method")
        del settings["model"]  # is in `comparable`
        settings.pop("repeat", None)

        # where state is kept, parts of a bench are no shards of one run: each begins with a state
        # of its own
        if method.get("start", "cold") == "cold":
            left_out = ("questions", "ids_sha256")
            bench = {key: value for key, value in bench.items() if key not in left_out}
        bench |= {key: self.config.get("bench", {}).get(key) for key in _SELECTION}

        if self.config.get("start") == SAVED:  # each repeat starts from its own hot run's state
            method.pop("start_sha256", None)
            method["start"] = SAVED
        date = self.metadata.get("date")
        return json.dumps([self.comparable, bench, method, settings, date], sort_keys=True)

    @cached_property
    def facets(self) -> Settings:
        """Settings that may distinguish runs of one label."""
        settings = self.settings
        method = settings["method"]
        facets = {key: method.get(key) for key in ("start", "tree", "tree_nodes")}

        if "start_sha256" in method:  # a saved state: its file's name, or `saved`
            is_saved = self.config.get("start") == SAVED
            facets["start"] = SAVED if is_saved else Path(str(method["start"])).stem
        if tree := self.draft_tree:
            facets["tree_depth"] = max(len(path) for path in tree)
            facets["tree_breadth"] = 1 + max(path[0] for path in tree)

        for key, value in method.items():
            if key not in _NAMED and not key.endswith("sha256"):
                column = f"method_{key}" if key in _COLUMNS else key
                # a cell holds one value
                facets[column] = str(value) if isinstance(value, list | dict) else value

        order = settings["bench"].get("order", "file")
        if order != "file":
            facets["order"] = order
        facets |= {key: settings[key] for key in ("execution", "seed", "timed") if key in settings}
        facets["batch"] = settings["batch"]

        facets["temperature"] = 0.0  # greedy, which is recorded without sampling settings
        for key, value in settings.get("sampling", {}).items():
            facets[SAMPLING_COLUMNS.get(key, key)] = value

        # steps of transformers and of servers have no parts
        in_parts = method["name"] not in STOCK and not self.is_served
        facets["phases"] = bool(settings.get("phases")) and in_parts
        return facets

    @property
    def loading(self) -> Settings:
        """Settings that may distinguish runs of the same facets."""
        elsewhere = ("name", "dtype", "device", "files")
        model = self.settings["model"]
        loading = {key: model[key] for key in model if key not in elsewhere}
        loading["num_choices"] = self.settings.get("num_choices")
        loading["date"] = self.metadata.get("date")
        loading["path"] = self.config.get("model", {}).get("path")

        files = hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()[:8]
        loading["files"] = files if self.files else "unknown"
        return loading

    # --- what was measured

    @cached_property
    def by_question(self) -> pd.DataFrame:
        """A row for each question, by id and hash.

        Columns: subtask; hash of the first prompt; tokens and steps of MAT; all new tokens,
        seconds, and speed (tokens/s); seconds and number of the steps after each turn's first.
        """
        names = [
            "subtask",
            "prompt",
            "tokens",
            "steps",
            "new_tokens",
            "seconds",
            "speed",
            "later_seconds",
            "later_steps",
        ]
        values = []
        for row in self.answers:
            category = subtask(str(row.get("category", "unknown")))
            tokens, steps = tokens_and_steps(row)
            counts = (tokens, steps) if steps else (math.nan, math.nan)  # not known, so in no pair
            speed = (new_tokens(row), wall_time(row), question_speed(row))
            prompts = row["choices"][0].get("prompt_sha256") or [""]
            values.append((category, prompts[0], *counts, *speed, *later_steps([row])))
        return pd.DataFrame(values, index=[row_key(row) for row in self.answers], columns=names)

    @property
    def by_batch(self) -> pd.DataFrame:
        """What a speed is made of: new tokens and seconds of each batch; with batch 1, speed.

        A question's share of a batch's time is not its own.
        """
        frame = self.by_question
        size = self.facets["batch"]
        if size == 1:
            return frame[["subtask", "prompt", "speed"]]

        starts = [place - place % size for place in range(len(frame))]
        batches = ["\n".join(frame.index[start : start + size]) for start in starts]
        how: dict[str, Any] = {
            "subtask": lambda names: "+".join(names.unique()),
            "prompt": lambda hashes: "\n".join(hashes) if all(hashes) else "",
            "new_tokens": "sum",
            "seconds": "sum",
        }
        return frame.groupby(batches, sort=False).agg(how)


def row_key(row: Row) -> str:
    return question_key(row["question_id"], row.get("question_sha256"))


def read_runs(folder: Path) -> list[Run]:
    """Read the runs of an experiment or of compact records. Raises UserError if there are none."""
    file = folder / compact.FILE
    if file.is_file():
        runs = [
            Run(folder / "runs" / name, metadata, answers)
            for name, metadata, answers in compact.unpacked(file)
        ]
    else:
        runs = list(_read(sorted(path for path in folder.glob("runs/*") if path.is_dir())))
    runs = _of_this_schema(runs)
    if not runs:
        raise UserError(
            f"{folder}: no runs here (runs/*/metadata.json with answers.jsonl, or {compact.FILE})"
        )
    return runs


def runs_at(folders: Iterable[Path]) -> list[Run]:
    return _of_this_schema(_read(sorted(folders)))


def _read(folders: Iterable[Path]) -> Iterator[Run]:
    for folder in folders:
        metadata = read_object(folder / "metadata.json")
        answers = folder / "answers.jsonl"
        if "settings" in metadata and answers.exists():
            yield Run(folder, metadata, list(read_answers(answers)[0].values()))
        else:
            file = answers.name if "settings" in metadata else "metadata.json"
            print(f"left out: {folder}: its {file} is missing or broken", file=sys.stderr)


def _of_this_schema(runs: Iterable[Run]) -> list[Run]:
    """Return the runs of this schema, in the tables' order; the others are named and left out."""
    readable = []
    for run in runs:
        try:
            check_record(run.metadata | {"summary": run.summary}, run.folder)
            check_rows(run.answers, run.folder)
        except UserError as refused:
            print(f"left out: {refused}", file=sys.stderr)
        else:
            readable.append(run)
    return sorted(readable, key=_order)


def _order(run: Run) -> tuple[Any, ...]:
    method = run.settings["method"]
    sizes = [method.get(key) for key in ("k", "tree_nodes", "nodes", "max_draft")]
    return (
        natural("|".join(run.comparable)),
        _place(method["name"]),
        natural(run.label),
        *(size or 0 for size in sizes),
        natural(str(sorted(run.facets.items(), key=str))),
        run.repeat,
        natural("".join(run.question_keys[:1])),
    )


def _place(method: str) -> int:
    return IN_TABLES.index(method) if method in IN_TABLES else len(IN_TABLES)


def natural(text: str) -> tuple[str | float, ...]:
    """Split a text for sorting, so that 60 comes before 480. Texts and numbers alternate."""
    return tuple(float(part) if i % 2 else part for i, part in enumerate(_NUMBER.split(text)))


PLAIN_DECODING = {"vanilla", "baseline", "autoregressive"}  # words in the names of such files


def read_foreign(pattern: str, baseline: Path | None = None) -> list[Run]:
    """Read other people's answer files that match, one run each, named after the file.

    Nothing is guessed of model, device and settings. Answers are paired by id and hash of their
    questions if all have hashes, else by id.

    Args:
        baseline: the file of plain decoding, whose run is named `vanilla`; None: the file whose
            name says so, if there is only one.

    Raises UserError if no file matches, or one holds no answer.
    """
    whole = local_path(pattern)
    folder = next(filter(Path.is_dir, whole.parents), whole)  # its name may hold [
    matches = glob.glob(str(whole.relative_to(folder)), root_dir=folder, recursive=True)  # noqa: PTH207
    paths = set(filter(Path.is_file, [whole, *map(folder.joinpath, matches)]))
    if not paths:
        raise UserError(f"--answers {pattern}: no such file")
    plain = [path for path in paths if PLAIN_DECODING & set(re.split("[-_]", path.stem.lower()))]
    if baseline is None and len(plain) == 1:  # of several, none is guessed
        baseline = plain[0]
    if baseline:
        paths.add(baseline)

    stems = [path.stem for path in paths]
    runs = []
    for path in sorted(paths):
        name = path.stem if stems.count(path.stem) == 1 else str(path.with_suffix(""))
        metadata = _unrecorded("vanilla" if path == baseline else name)
        runs.append(Run(path.parent, metadata, _foreign_answers(path)))

    rows = [row for run in runs for row in run.answers]
    if not all(row.get("question_sha256") for row in rows):
        for row in rows:
            row.pop("question_sha256", None)  # some have no hash, so ids are used for all
    most = max(len(run.answers) for run in runs)
    for run in runs:
        run.metadata["questions"] = most
        run.metadata["settings"]["bench"]["questions"] = most
    return sorted(runs, key=lambda run: (run.label != "vanilla", run.label))


def _foreign_answers(path: Path) -> list[Row]:
    """Read the first choices of a file's answers, as Spec-Bench's evaluation/speed.py does."""
    rows, damage = read_answers(path)
    if not rows:
        raise UserError(f"{path}: holds no answer in Spec-Bench's format; {damage}".rstrip("; "))
    if damage:
        print(f"note: {path}: {damage}", file=sys.stderr)
    for row in rows.values():
        del row["choices"][1:]
    check_rows(rows.values(), path)
    return list(rows.values())


def _unrecorded(name: str) -> dict[str, Any]:
    settings = {
        "model": {"name": "answers", "dtype": UNKNOWN},
        "bench": {"name": "files"},
        "method": {"name": name, "drafter": None},
        "max_new_tokens": UNKNOWN,
        "batch": 1,
        "execution": UNKNOWN,
    }
    versions = {"torch": UNKNOWN, "transformers": UNKNOWN}
    return {"label": name, "device": UNKNOWN, "versions": versions, "settings": settings}
