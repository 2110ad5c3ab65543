"""What a run is: the parts of its recorded settings, and each sense in which two runs are the same, written once."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

Settings = dict[str, Any]

NAMED = ("name", "drafter", "start", "tree", "tree_nodes")  # of a method: said by the label or by words of their own
SAVED = "saved"  # start=saved: start from the state that the hot run of the same configuration saved
SERVER = "server"  # in place of a drafter: a server of any engine answers
NO_SPECULATION = "none"  # what a server says that does not speculate, or what its user says
PART = ("split", "categories", "per_category", "spread")  # how questions were chosen: such parts are no shards of a run
# The settings of sampling, by the names of their columns: a method may have a top_k of its own.
SAMPLING_COLUMNS = {
    "temperature": "temperature",
    **{key: f"sampling_{key}" for key in ("top_k", "top_p", "min_p")},
    "repetition_penalty": "repetition_penalty",
}
# Names of other columns of a table, next to what is measured.
_TAKEN = {"dtype", "device", "model", "bench", "method", "variant", "seed", "execution", "timed", "phases", "order"}
_TAKEN |= {"batch", *SAMPLING_COLUMNS.values()}


def fingerprint(settings: Settings) -> Settings:
    """Return the settings that a resumed run must have: all but the paths of files whose digests are among them."""
    method = settings.get("method", {})
    paths = [key for key in method if f"{key}_sha256" in method and key != "tree"]  # tree: a fixed tree's name
    return settings | {"method": {key: value for key, value in method.items() if key not in paths}}


@dataclass(frozen=True)
class Identity:
    """A run's parts, as recorded."""

    model: Settings  # its files' digests among them
    bench: Settings  # its file, order and selection
    method: Settings
    decoding: Settings  # sampling, limit, execution, seed, whether it is timed, and so on
    repeat: int
    machine: str  # the device in words
    question_keys: tuple[str, ...]  # of the questions it is to answer, in their order; empty where not recorded
    asked: Settings  # the configuration it was started with, as far as it is kept
    draft_tree: list[list[int]] | None  # the fixed tree's nodes as rank paths, the root left out; None without one

    @classmethod
    def of(cls, metadata: dict[str, Any]) -> Identity:
        """Read it from a run's metadata."""
        settings, tree = metadata["settings"], metadata.get("draft_tree")
        parts = {key: settings[key] for key in ("model", "bench", "method")}
        return cls(
            **parts,
            decoding={key: value for key, value in settings.items() if key not in (*parts, "repeat")},
            repeat=int(settings.get("repeat") or 0),
            machine=metadata["device"],
            question_keys=tuple(metadata.get("question_hashes", ())),
            asked=dict(metadata.get("config", {})),
            draft_tree=None if tree is None else [[int(rank) for rank in node.split(",")] for node in tree.split()],
        )

    @cached_property
    def comparable(self) -> tuple[str, ...]:
        """The same for runs that may be compared on the questions both have: model, bench file, limit, machine."""
        compared = self.model | {"bench": self.bench["name"], "file": self.bench.get("sha256")}
        compared |= {"limit": self.decoding["max_new_tokens"], "choices": self.decoding.get("num_choices")}
        return (*(f"{key}={compared[key]}" for key in sorted(compared)), self.machine)

    @cached_property
    def selection(self) -> frozenset[str]:
        """The same for runs that are to answer the same questions: their keys, or what else was recorded of them."""
        unknown = f"{self.bench.get('questions')} questions, {self.bench.get('ids_sha256')}"
        return frozenset(self.question_keys or [unknown])

    @cached_property
    def configuration(self) -> str:
        """The same for the repeats of one configuration and for its shards, whatever questions they answer."""
        method = fingerprint({"method": self.method})["method"]
        # where state is kept, parts of a bench are no shards of one run: each begins with a state of its own
        left_out = ("questions", "ids_sha256") if method.get("start", "cold") == "cold" else ()
        bench = {key: value for key, value in self.bench.items() if key not in left_out}
        bench |= {key: self.asked.get("bench", {}).get(key) for key in PART}
        if self.asked.get("start") == SAVED:  # each repeat starts from what its own hot run left
            method = {key: value for key, value in method.items() if key != "start_sha256"} | {"start": SAVED}
        return json.dumps([self.comparable, bench, method, self.decoding], sort_keys=True)

    @cached_property
    def facets(self) -> Settings:
        """What may tell it from others of the same label: its method's settings, its tree's shape, its decoding."""
        method, decoding = self.method, self.decoding
        facets = {key: method.get(key) for key in ("start", "tree", "tree_nodes")}
        if "start_sha256" in method:  # a file: by its name, or how it was asked for
            facets["start"] = SAVED if self.asked.get("start") == SAVED else Path(str(method["start"])).stem
        if tree := self.draft_tree:
            facets["tree_depth"] = max(len(path) for path in tree)
            facets["tree_breadth"] = 1 + max(path[0] for path in tree)
        others = {k: v for k, v in method.items() if k not in NAMED and not k.endswith("sha256")}
        others = {k: str(v) if isinstance(v, list | dict) else v for k, v in others.items()}  # a cell holds one value
        facets |= {f"method_{k}" if k in _TAKEN else k: v for k, v in others.items()}
        if self.bench.get("order", "file") != "file":
            facets["order"] = self.bench["order"]
        facets |= {key: decoding[key] for key in ("execution", "seed", "timed") if key in decoding}
        facets["batch"] = decoding.get("batch", 1)
        # what is not greedy decoding's, and the temperature: 0 in runs from before sampling existed
        facets |= {"temperature": 0.0} | {SAMPLING_COLUMNS[k]: v for k, v in decoding.get("sampling", {}).items()}
        in_parts = method["name"] != "hf" and not self.is_served  # theirs have no parts
        return facets | {"phases": bool(decoding.get("phases")) and in_parts}

    @property
    def is_served(self) -> bool:
        """True if a server gave the answers."""
        return bool(self.method.get("drafter") == SERVER)

    @property
    def files(self) -> dict[str, str]:
        """Digests of the model's files, or its commit on the hub; empty where it was not recorded."""
        return dict(self.model.get("files") or {})

    @property
    def loading(self) -> Settings:
        """What may tell it from runs of the same method and facets: how the model was loaded, how many answers."""
        model = {k: v for k, v in self.model.items() if k not in ("name", "dtype", "device", "files")}
        files = hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()[:8]
        choices = self.decoding.get("num_choices")
        return model | {"num_choices": choices, "files": files if self.files else "unknown"}
