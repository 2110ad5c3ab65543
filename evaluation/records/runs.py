"""Read runs from disk, and other people's answer files in Spec-Bench's format."""

from __future__ import annotations

import glob
import itertools
import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from model.errors import UserError, one_line
from model.methods import table_place

from . import compact
from .identity import SERVER, Identity
from .questions import question_key, subtask
from .rows import (
    Row,
    Schema,
    check_rows,
    check_schema,
    later_steps,
    misfit,
    new_tokens,
    question_speed,
    read_answers,
    read_object,
    tokens_and_steps,
    wall_time,
)

GENERATE = "transformers generate"  # the execution of hf, which does not use this engine
# executions of this engine inside transformers' generate (`Generate`), by the execution of their
# steps
INSIDE = {"eager": "custom_generate", "graph": "custom_generate, graph"}
SERVED = "served"  # the execution of a server
UNKNOWN = "not recorded"
FLOATS = {"F32", "F16", "BF16"}  # types of a GGUF file's tensors that are not quantised
# Types of the metadata that tables and pages read; a dot leads into a group. _NAMES must be
# present.
_NAMES = (
    "label",
    "device",
    "settings.model.name",
    "settings.model.dtype",
    "settings.bench.name",
    "settings.method.name",
    "versions.torch",
    "versions.transformers",
)
_TEXTS = ("execution_used", "execution_why", "threads_why", "platform", "draft_tree")
_GROUPS = (
    "settings.sampling",
    "config",
    "config.bench",
    "config.model",
    "git",
    "summary",
    "settings.model.files",
    "generation_config_left_out",
    "converted_from",
    "circumstances",
)
_COUNTS = (
    "settings.repeat",
    "settings.max_new_tokens",
    "settings.method.nodes",
    "settings.method.tree_nodes",
    "settings.method.max_draft",
)
_METADATA: Schema = {
    **dict.fromkeys(_NAMES, (0, (str, int, float))),
    "questions": (0, (int,)),
    **dict.fromkeys(_TEXTS, (0, (str,))),
    **dict.fromkeys(_GROUPS, (0, (dict,))),
    **dict.fromkeys(_COUNTS, (0, (int,))),
    "question_hashes": (1, (str,)),
    "command": (1, (str,)),
    "cores_busy_elsewhere": (0, (int, float)),
}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Run:
    """A run read from disk: its metadata, and its answers in the order of the bench."""

    folder: Path
    metadata: dict[str, Any]
    answers: list[Row]

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.metadata["settings"])

    @property
    def model(self) -> str:
        """The model's name, and what its weights were rounded to."""
        model = self.settings["model"]
        rounded = f" rounded to {model['weights']}" if model.get("weights") == "float16" else ""
        return f"{model['name']}{rounded}"

    @property
    def precision(self) -> str:
        """The type that it computes in, and whether its linear layers read 16-bit weights."""
        held = "half" in str((self.metadata.get("circumstances") or {}).get("linear"))
        return f"{self.settings['model']['dtype']}{' from 16-bit weights' if held else ''}"

    @property
    def label(self) -> str:
        return str(self.metadata["label"])

    @property
    def has_texts(self) -> bool:
        """Whether its answers hold their text next to the token ids; compact records do not."""
        return bool(self.metadata.get("texts", True))

    @property
    def quantized(self) -> str:
        """What its weights are or were quantised to.

        That is by torchao or in a GGUF file; empty if nothing.
        """
        types = (self.metadata.get("converted_from") or {}).get("tensor_types", {})
        return self.settings["model"].get("quantize") or ", ".join(sorted(types.keys() - FLOATS))

    @property
    def complete(self) -> bool:
        return len(self.answers) == int(self.metadata["questions"])

    @cached_property
    def identity(self) -> Identity:
        return Identity.of(self.metadata)

    @property
    def execution(self) -> str:
        """How steps ran: eager, graph or INSIDE.

        It is GENERATE for transformers' own decoding, SERVED for a server.
        """
        is_hf = self.settings["method"]["name"] == "hf"
        requested = GENERATE if is_hf else self.settings.get("execution")
        return str(self.metadata.get("execution_used", requested))

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The summary that the run wrote at its end; empty before."""
        return self.metadata.get("summary") or read_object(self.folder / "summary.json")

    @cached_property
    def by_question(self) -> pd.DataFrame:
        """A row for each question, by id and hash.

        Columns: subtask; tokens and steps of MAT; all new tokens, seconds, and speed (tokens/s);
        seconds and number of the steps after each turn's first.
        """
        names = [
            "subtask",
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
            speed = new_tokens(row), wall_time(row), question_speed(row)
            category = subtask(str(row.get("category", "unknown")))
            tokens, steps = tokens_and_steps(row)
            counts = (tokens, steps) if steps else (math.nan, math.nan)  # not known, so in no pair
            values.append((category, *counts, *speed, *later_steps([row])))

        return pd.DataFrame(values, index=[row_key(row) for row in self.answers], columns=names)

    @property
    def by_batch(self) -> pd.DataFrame:
        """What a speed is made of: a row for each batch, by its questions' keys.

        A row has subtasks, new tokens and seconds.

        With batch 1 a row for each question: subtask and speed. A question's share of a batch's
        time is not its own.
        """
        frame = self.by_question
        size = self.identity.facets["batch"]
        if size == 1:
            return frame[["subtask", "speed"]]

        starts = [place - place % size for place in range(len(frame))]
        batches = ["\n".join(frame.index[start : start + size]) for start in starts]
        how: dict[str, Any] = {
            "subtask": lambda names: "+".join(names.unique()),
            "new_tokens": "sum",
            "seconds": "sum",
        }
        return frame.groupby(batches, sort=False).agg(how)


def row_key(row: Row) -> str:
    """Return the key that an answer is paired by: its question's id and hash."""
    return question_key(row["question_id"], row.get("question_sha256"))


def read_runs(folder: Path) -> list[Run]:
    """Read all runs of an experiment's folder, or of its compact records.

    Methods are in the tables' order.

    Raises:
        UserError: there are none.
    """
    file = folder / compact.FILE
    if file.is_file():
        records: Iterable[Any] = (
            (folder / "runs" / name, *record) for name, *record in compact.unpacked(file)
        )
    else:
        records = _read(sorted(path for path in folder.glob("runs/*") if path.is_dir()))

    runs = _of_this_schema(records)
    if not runs:
        raise UserError(
            f"{folder}: no runs here (runs/*/metadata.json with answers.jsonl, or {compact.FILE})"
        )

    return runs


def runs_at(folders: Iterable[Path]) -> list[Run]:
    """Read the runs in these folders that have answers, methods in the tables' order."""
    return _of_this_schema(_read(sorted(folders)))


def is_served(folder: Path) -> bool:
    """Return whether a run is a server's; reads no answer."""
    return bool(_inside(read_object(folder / "metadata.json"), "settings.method.drafter") == SERVER)


def _read(folders: Iterable[Path]) -> Iterator[tuple[Path, dict[str, Any], list[Row]]]:
    for folder in folders:
        metadata = read_object(folder / "metadata.json")
        answers = folder / "answers.jsonl"
        if "settings" in metadata and answers.exists():
            yield folder, metadata, list(read_answers(answers)[0].values())
        else:
            file = answers.name if "settings" in metadata else "metadata.json"
            print(f"left out: {folder}: its {file} is missing or broken", file=sys.stderr)


def _of_this_schema(records: Iterable[tuple[Path, dict[str, Any], list[Row]]]) -> list[Run]:
    """Return the runs of this schema, in the tables' order; the others are named and left out."""
    runs = []
    for folder, metadata, rows in records:
        try:
            check_schema(metadata["settings"], folder)
            check_rows(rows, folder)
            values = {key: _inside(metadata, key) for key in _METADATA}
            if why := misfit(values, _METADATA, (*_NAMES, "questions")):
                raise TypeError(why)
            _order(Run(folder, metadata, rows))  # raises if the rest is broken
        except UserError as refused:
            print(f"left out: {refused}", file=sys.stderr)
            continue
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            print(
                f"left out: {folder}: its metadata.json is broken ({one_line(error)})",
                file=sys.stderr,
            )
            continue

        runs.append(Run(folder, metadata, rows))

    return sorted(runs, key=_order)


def _inside(values: Any, key: str) -> Any:
    """Return the value of a dotted key.

    None if it is missing, Ellipsis if a group on the way is no dictionary.
    """
    for part in key.split("."):
        if isinstance(values, dict):
            values = values.get(part)
        elif values is not None:
            return ...

    return values


def _order(run: Run) -> tuple[Any, ...]:
    """Return a run's sort key.

    Comparable runs come together, then follow method as in tables, settings, repeat and shard.
    """
    method = run.settings["method"]
    sizes = [method.get(key) for key in ("k", "tree_nodes", "nodes", "max_draft")]
    numbers = [size if isinstance(size, int | float) else 0 for size in sizes]
    identity = run.identity
    facets = natural(str(sorted(identity.facets.items(), key=str)))
    bench = natural("|".join(identity.comparable))
    first = natural("".join(identity.question_keys[:1]))
    return (
        bench,
        table_place(method["name"]),
        natural(run.label),
        *numbers,
        facets,
        identity.repeat,
        first,
    )


def natural(text: str) -> tuple[str | float, ...]:
    """Split a text for sorting, so that 60 comes before 480. Texts and numbers alternate."""
    return tuple(float(part) if i % 2 else part for i, part in enumerate(_NUMBER.split(text)))


PLAIN_DECODING = {"vanilla", "baseline", "autoregressive"}  # words in the names of such files


def read_foreign(pattern: str, baseline: Path | None = None) -> list[Run]:
    """Read the files that match, one run each, named after the file.

    The run of plain decoding is named `vanilla`.

    The answers' model, device and settings are not known and not guessed. Answers are paired by id
    and hash of their questions if all have hashes, else by the questions' ids.

    Args:
        baseline: the file of plain decoding; None: the file whose name says so, if there is only
            one.

    Raises:
        UserError: no file matches, or one holds no answer.
    """
    names = {name for name in glob.glob(pattern, recursive=True) if Path(name).is_file()}  # noqa: PTH207
    if not names:
        raise UserError(f"--answers {pattern}: no such file")
    paths = sorted(map(Path, names | ({str(baseline)} if baseline else set())))
    plain = [path for path in paths if PLAIN_DECODING & set(re.split(r"[-_]", path.stem.lower()))]
    if baseline or len(plain) > 1:  # of several, none is guessed
        plain = [path for path in paths if path == baseline]
    stems = [path.stem for path in paths]
    runs = []
    for path in paths:
        rows, damage = read_answers(path)
        if damage:
            print(f"note: {path}: {damage}", file=sys.stderr)
        if not rows:
            raise UserError(f"{path}: holds no answer in Spec-Bench's format")
        for row in rows.values():
            del row["choices"][1:]  # Spec-Bench's evaluation/speed.py reads the first
        check_rows(rows.values(), path)
        name = path.stem if stems.count(path.stem) == 1 else str(path.with_suffix(""))
        runs.append(
            Run(path.parent, _unrecorded("vanilla" if path in plain else name), list(rows.values()))
        )

    answers = list(itertools.chain(*(run.answers for run in runs)))
    if not all(row.get("question_sha256") for row in answers):
        for row in answers:
            row.pop("question_sha256", None)  # some have no hash, so ids are used for all
    most = max(len(run.answers) for run in runs)
    for run in runs:
        run.metadata["questions"] = run.metadata["settings"]["bench"]["questions"] = most
    return sorted(runs, key=lambda run: (run.label != "vanilla", run.label))


def _unrecorded(name: str) -> dict[str, Any]:
    """Return the metadata of answers of which only a name is known."""
    settings = {
        "model": {"name": "answers", "dtype": UNKNOWN},
        "bench": {"name": "files"},
        "method": {"name": name},
        "max_new_tokens": UNKNOWN,
        "execution": UNKNOWN,
    }
    versions = {"torch": UNKNOWN, "transformers": UNKNOWN}
    return {"label": name, "device": UNKNOWN, "versions": versions, "settings": settings}
