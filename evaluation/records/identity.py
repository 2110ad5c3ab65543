"""A run's identity: the parts of its recorded settings, and its keys.

By a key, two runs count as the same.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

Settings = dict[str, Any]

# method settings that the label or other words name
NAMED = ("name", "drafter", "start", "tree", "tree_nodes")
# start=saved: start from the state that the hot run of the same configuration saved
SAVED = "saved"
SERVER = "server"  # in place of a drafter: a server of any engine answers
NO_SPECULATION = "none"  # reported by a server that does not speculate, or set by its user
# settings that select questions: a selection is no shard
PART = ("split", "categories", "per_category", "spread")
# Sampling settings and the names of their columns, which differ as a method may have a top_k, too.
SAMPLING_COLUMNS = {
    "temperature": "temperature",
    "top_k": "sampling_top_k",
    "top_p": "sampling_top_p",
    "min_p": "sampling_min_p",
    "repetition_penalty": "repetition_penalty",
}
# Names of a table's other columns, which a method's settings must not take.
_TAKEN = {
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


def fingerprint(settings: Settings) -> Settings:
    """Return the settings that a resumed run must share.

    They are all except paths of files whose digests are recorded.
    """
    method = settings.get("method", {})
    # tree: a fixed tree's name
    paths = [key for key in method if f"{key}_sha256" in method and key != "tree"]
    return settings | {"method": {key: value for key, value in method.items() if key not in paths}}


@dataclass(frozen=True)
class Identity:
    """A run's parts, as recorded."""

    model: Settings  # includes the files' digests
    bench: Settings  # its file, order and selection
    method: Settings
    decoding: Settings  # sampling, limit, execution, seed, whether it is timed, and so on
    repeat: int
    machine: str  # the device in words
    # of the questions to answer, in their order; empty if not recorded
    question_keys: tuple[str, ...]
    asked: Settings  # the configuration it was started with, as far as it is kept
    # the fixed tree's nodes as rank paths, the root left out; None without one
    draft_tree: list[list[int]] | None

    @classmethod
    def of(cls, metadata: dict[str, Any]) -> Identity:
        """Read the identity from a run's metadata."""
        settings = metadata["settings"]
        tree = metadata.get("draft_tree")
        nodes = [list(map(int, node.split(","))) for node in (tree or "").split()]
        parts = {key: settings[key] for key in ("model", "bench", "method")}
        return cls(
            **parts,
            decoding={key: settings[key] for key in settings if key not in (*parts, "repeat")},
            repeat=int(settings.get("repeat") or 0),
            machine=metadata["device"],
            question_keys=tuple(metadata.get("question_hashes", ())),
            asked=dict(metadata.get("config", {})),
            draft_tree=None if tree is None else nodes,
        )

    @cached_property
    def comparable(self) -> tuple[str, ...]:
        """Key shared by runs that may be compared on common questions.

        It holds model, bench file, limit and machine.
        """
        compared = {
            **self.model,
            "bench": self.bench["name"],
            "file": self.bench.get("sha256"),
            "limit": self.decoding["max_new_tokens"],
            "choices": self.decoding.get("num_choices"),
        }
        return (*(f"{key}={compared[key]}" for key in sorted(compared)), self.machine)

    @cached_property
    def selection(self) -> frozenset[str]:
        """Key shared by runs of the same questions.

        It holds the questions' keys, else their recorded number and digest.
        """
        unknown = f"{self.bench.get('questions')} questions, {self.bench.get('ids_sha256')}"
        return frozenset(self.question_keys or [unknown])

    @cached_property
    def configuration(self) -> str:
        """Key shared by the repeats and shards of one configuration.

        It is the same whichever questions they answer.
        """
        method = fingerprint({"method": self.method})["method"]
        # where state is kept, parts of a bench are no shards of one run: each begins with a state
        # of its own
        left_out = ("questions", "ids_sha256") if method.get("start", "cold") == "cold" else ()
        bench = {key: value for key, value in self.bench.items() if key not in left_out}
        bench |= {key: self.asked.get("bench", {}).get(key) for key in PART}

        if self.asked.get("start") == SAVED:  # each repeat starts from its own hot run's state
            method = {key: value for key, value in method.items() if key != "start_sha256"} | {
                "start": SAVED
            }

        return json.dumps([self.comparable, bench, method, self.decoding], sort_keys=True)

    @cached_property
    def facets(self) -> Settings:
        """Settings that may distinguish runs of one label.

        They are the method's, the tree's shape, and those of decoding.
        """
        method = self.method
        decoding = self.decoding
        facets = {key: method.get(key) for key in ("start", "tree", "tree_nodes")}

        if "start_sha256" in method:  # a saved state: its file's name, or `saved`
            is_saved = self.asked.get("start") == SAVED
            facets["start"] = SAVED if is_saved else Path(str(method["start"])).stem
        if tree := self.draft_tree:
            facets["tree_depth"] = max(len(path) for path in tree)
            facets["tree_breadth"] = 1 + max(path[0] for path in tree)

        for key, value in method.items():
            if key not in NAMED and not key.endswith("sha256"):
                column = f"method_{key}" if key in _TAKEN else key
                # a cell holds one value
                facets[column] = str(value) if isinstance(value, list | dict) else value

        if self.bench.get("order", "file") != "file":
            facets["order"] = self.bench["order"]
        facets |= {key: decoding[key] for key in ("execution", "seed", "timed") if key in decoding}
        facets["batch"] = decoding.get("batch", 1)

        # sampling settings other than greedy decoding's, and the temperature: 0 in runs from before
        # sampling existed
        facets["temperature"] = 0.0
        for key, value in decoding.get("sampling", {}).items():
            facets[SAMPLING_COLUMNS[key]] = value

        in_parts = method["name"] != "hf" and not self.is_served  # their steps have no parts
        facets["phases"] = bool(decoding.get("phases")) and in_parts
        return facets

    @property
    def is_served(self) -> bool:
        """True if a server gave the answers."""
        return bool(self.method.get("drafter") == SERVER)

    @property
    def files(self) -> dict[str, str]:
        """Digests of the model's files, or its commit on the hub.

        Empty where it was not recorded.
        """
        return dict(self.model.get("files") or {})

    @property
    def loading(self) -> Settings:
        """Settings that may distinguish runs of the same facets.

        They are how the model was loaded, and the answers per question.
        """
        elsewhere = ("name", "dtype", "device", "files")
        model = {key: self.model[key] for key in self.model if key not in elsewhere}
        files = hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()[:8]
        choices = self.decoding.get("num_choices")
        return model | {"num_choices": choices, "files": files if self.files else "unknown"}
