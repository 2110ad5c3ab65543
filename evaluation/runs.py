"""The runs of an experiment as they lie on disk, and the repeats of one configuration pooled."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from model.errors import UserError

from .answers import SharedNumbers, difference, read_answers
from .metrics import Row, accept_lengths, question_speed
from .questions import subtask

# In the order tables and figures show them; a method that is not here stands between the others and recycling.
METHODS = (
    *("hf", "vanilla", "lookahead", "pld", "ngram_cache", "rest", "suffix", "sps"),
    *("medusa", "eagle", "eagle2"),
)
_TAKEN = ("dtype", "device", "model", "bench", "method", "variant", "seed")  # names of other columns of a table
_HIDDEN = ("name", "drafter", "start", "tree", "tree_nodes")  # told by the label or by words of their own


@dataclass(frozen=True)
class Run:
    """A run as it lies on disk: its metadata and its answers in the order of the bench."""

    folder: Path
    metadata: dict[str, Any]
    answers: list[Row]

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.metadata["settings"])

    @property
    def label(self) -> str:
        return str(self.metadata["label"])

    @property
    def complete(self) -> bool:
        return len(self.answers) == int(self.metadata["questions"])

    @property
    def repeat(self) -> int:
        return int(self.settings.get("repeat") or 0)

    @property
    def bench_key(self) -> tuple[str, ...]:
        """Runs with the same key may be compared: same model, bench, device, type and limit."""
        settings = self.settings
        parts = settings["model"] | {"bench": settings["bench"]["name"], "limit": settings["max_new_tokens"]}
        parts |= {"questions": settings["bench"].get("questions"), "choices": settings.get("num_choices")}
        return tuple(f"{key}={parts[key]}" for key in sorted(parts)) + (self.metadata["device"],)

    @property
    def configuration(self) -> str:
        """The same for the repeats of one configuration."""
        settings = {key: value for key, value in self.settings.items() if key != "repeat"}
        if self.metadata.get("config", {}).get("start") == "saved":  # each repeat starts from what its own hot run left
            left_out = ("start", "start_sha256")
            settings["method"] = {k: v for k, v in settings["method"].items() if k not in left_out}
            settings["start"] = "saved"
        return json.dumps([self.bench_key, settings], sort_keys=True)

    @property
    def draft_tree(self) -> list[list[int]] | None:
        """The template's nodes as rank paths, the root left out; None for methods without a template."""
        text: str | None = self.metadata.get("draft_tree")
        return None if text is None else [[int(rank) for rank in node.split(",")] for node in text.split()]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What the run wrote at its end; empty if it is not there yet."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found

    @property
    def facets(self) -> dict[str, Any]:
        """What may tell this run from others of the same label: its method's settings, its tree's shape, its order."""
        settings = self.settings
        method: dict[str, Any] = settings["method"]
        found = {key: method.get(key) for key in ("start", "tree", "tree_nodes")}
        if "start_sha256" in method:  # a file: by its name, or how it was asked for
            asked = self.metadata.get("config", {}).get("start")
            found["start"] = asked if asked == "saved" else Path(str(method["start"])).stem
        if tree := self.draft_tree:
            found["tree_depth"] = max(len(path) for path in tree)
            found["tree_breadth"] = 1 + max(path[0] for path in tree)
        own = {k: v for k, v in method.items() if k not in _HIDDEN and not k.endswith("sha256")}
        own = {k: str(v) if isinstance(v, list | dict) else v for k, v in own.items()}  # a cell holds one value
        found |= {f"method_{k}" if k in _TAKEN else k: v for k, v in own.items()}
        if settings["bench"].get("order", "file") != "file":
            found["order"] = settings["bench"]["order"]
        found |= {key: settings[key] for key in ("execution", "seed") if key in settings}
        return found | {"phases": bool(settings.get("phases"))}

    @cached_property
    def by_question(self) -> pd.DataFrame:
        """By question id, as text: subtask, tokens, steps, speed (tokens/s)."""
        lengths = [accept_lengths(row) for row in self.answers]
        data = {
            "subtask": [subtask(str(row.get("category", "unknown"))) for row in self.answers],
            "tokens": [float(sum(steps)) for steps in lengths],
            "steps": [float(len(steps)) for steps in lengths],
            "speed": [question_speed(row) for row in self.answers],
        }
        return pd.DataFrame(data, index=[str(row["question_id"]) for row in self.answers])


@dataclass(frozen=True)
class Pool:
    """The repeats of one configuration, and the words that tell it from others of the same label."""

    runs: tuple[Run, ...]
    variant: str = ""

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def label(self) -> str:
        return self.first.label

    @property
    def method(self) -> str:
        """The method's own name, without its start."""
        return str(self.first.settings["method"]["name"])

    @property
    def name(self) -> str:
        """As figures name it: unique within its model and bench."""
        return f"{self.label}, {self.variant}" if self.variant else self.label

    @property
    def complete(self) -> bool:
        return all(run.complete for run in self.runs)

    @cached_property
    def by_question(self) -> pd.DataFrame:
        """By question id: subtask, tokens and steps (sums over repeats), speed (tokens/s, mean over repeats)."""
        if len(self.runs) == 1:
            return self.first.by_question
        together = pd.concat([run.by_question for run in self.runs]).groupby(level=0, sort=False)
        return together.agg({"subtask": "first", "tokens": "sum", "steps": "sum", "speed": "mean"})

    @cached_property
    def rows(self) -> list[Row]:
        """All rows of all repeats."""
        return [row for run in self.runs for row in run.answers]


def read_runs(folder: Path) -> list[Run]:
    """All runs below an experiment's folder, methods in the tables' order. Raises UserError if there is none."""
    runs = []
    shared = SharedNumbers()
    for path in sorted(folder.glob("runs/*/metadata.json")):
        answers = path.parent / "answers.jsonl"
        if answers.exists():
            metadata = json.loads(path.read_text(encoding="utf-8"))
            runs.append(Run(path.parent, metadata, list(read_answers(answers, shared)[0].values())))
    if not runs:
        raise UserError(f"{folder}: no runs here (runs/*/metadata.json with answers.jsonl)")
    return sorted(runs, key=_order)


def _order(run: Run) -> tuple[Any, ...]:
    method = run.settings["method"]
    place = len(METHODS) + 1 if method["name"] == "recycling" else len(METHODS)
    place = METHODS.index(method["name"]) if method["name"] in METHODS else place
    numbers = [
        method.get(key) if isinstance(method.get(key), int | float) else 0
        for key in ("k", "tree_nodes", "nodes", "max_draft")
    ]
    return run.bench_key, place, run.label, *numbers, str(sorted(run.facets.items(), key=str)), run.repeat


def mixed(runs: Sequence[Run]) -> list[str]:
    """The runs whose parts were answered under different circumstances, one line each."""
    lines = []
    for run in runs:
        parts = run.metadata.get("parts", [])
        changes = [
            f"from question {part['first_question']} on under other circumstances "
            f"({difference(before['circumstances'], part['circumstances']).replace(' there and ', ' before, ')})"
            for before, part in itertools.pairwise(parts)
        ]
        if changes:
            lines.append(f"mixed: {run.label}, repeat {run.repeat}: {'; '.join(changes)}")
    return lines


def pools(runs: Sequence[Run]) -> list[Pool]:
    """The runs with the repeats of a configuration together, in their order; each with a name of its own."""
    repeats: dict[str, list[Run]] = {}
    for run in runs:
        repeats.setdefault(run.configuration, []).append(run)
    alike: dict[tuple[Any, ...], list[list[Run]]] = {}
    for group in repeats.values():
        alike.setdefault((group[0].bench_key, group[0].label), []).append(group)
    return [
        Pool(tuple(group), words)
        for groups in alike.values()
        for group, words in zip(groups, distinguish([group[0] for group in groups]), strict=True)
    ]


def distinguish(runs: Sequence[Run]) -> list[str]:
    """For runs of one label: the settings in which they differ, in words; empty where there is one run only."""
    facets = [run.facets for run in runs]
    keys = list(dict.fromkeys(key for found in facets for key in found))
    varied = [key for key in keys if len({str(found.get(key)) for found in facets}) > 1]
    plain = [key for key in varied if key not in ("tree_depth", "tree_breadth")]
    for chosen in (plain, varied):  # a tree's depth and breadth are told where its name and size do not suffice
        words = [", ".join(w for w in (_words(key, found, chosen) for key in chosen) if w) for found in facets]
        if len(set(words)) == len(runs):
            return words
    marks = [_hash_of(run) for run in runs]  # told apart by nothing else: files of the same name, other contents
    if len(set(zip(words, marks, strict=True))) < len(runs):
        marks = ["#" + run.folder.name[-6:] for run in runs]
    return [f"{word}, {mark}" if word else mark for word, mark in zip(words, marks, strict=True)]


def _words(key: str, found: dict[str, Any], varied: list[str]) -> str:
    value = found.get(key)
    if key == "tree_nodes" and "tree" in varied:
        return ""  # told with the tree
    if key == "tree":
        return f"{value} ({found.get('tree_nodes')})"
    if key == "tree_nodes":
        return f"{value} nodes"
    if key in ("tree_depth", "tree_breadth"):
        return f"{value} {'deep' if key == 'tree_depth' else 'wide'}"
    if key == "order":
        return f"{value or 'file'} order"
    if isinstance(value, bool):
        return key if value else f"no {key}"
    return f"{key.removeprefix('method_')}={value}"


def _hash_of(run: Run) -> str:
    method = run.settings["method"]
    return "#" + str(method.get("start_sha256") or method.get("tree_sha256") or run.folder.name)[-6:]
