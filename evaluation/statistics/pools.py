"""The runs of one configuration together.

They are its repeats, and the shards of a bench that one repeat was split into.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..records.rows import FILE_ORDER, Row
from ..records.runs import INSIDE, SAMPLING_COLUMNS, SERVER, Run, row_key
from .acceptance import Accepted, accepted_paths
from .intervals import Floats, quotient, quotient_interval, row_means
from .metrics import OVERALL, grouped

# Columns that all rows of a table's block share, as do configurations in one figure.
GROUP = (
    "model",
    "dtype",
    "bench",
    "bench_questions",
    "questions_sha256",
    "max_new_tokens",
    "device",
)
BASELINES = ("hf", "vanilla")
SAMPLED = tuple(SAMPLING_COLUMNS.values())  # how a run's tokens were chosen
# Facets that a baseline must share: also how steps were executed, and whether they were timed.
COMPARED = ("execution", "phases", "timed", "batch", *SAMPLED)
MANY = 3  # if runs of a label differ in more settings than this, only unusual values are named
IF_NEEDED = ("tree_depth", "tree_breadth", "url")  # named only if the other settings are the same
# how a setting is named, if not as NAME=VALUE
WORDS = {
    "tree_nodes": "{} nodes",
    "tree_depth": "{} deep",
    "tree_breadth": "{} wide",
    "order": "{} order",
}
# settings that say how many nodes a step drafts at most
BUDGETS = ("nodes", "tree_nodes", "max_draft")


@dataclass(frozen=True)
class Cells:
    """Measured values by question and repeat."""

    questions: pd.Index[str]  # keys of the questions, or of batches
    subtasks: NDArray[np.object_]  # the questions' subtasks: (n,)
    repeats: tuple[int, ...]  # numbers of the repeats
    size: int  # of a batch

    # by a column of the runs' frames: (n, R), NaN where the repeat has no answer
    values: dict[str, Floats]

    def take(self, rows: NDArray[Any]) -> Cells:
        """Return the cells of some questions, given by a mask (n,) or positions (m,)."""
        values = {name: value[rows] for name, value in self.values.items()}
        return Cells(self.questions[rows], self.subtasks[rows], self.repeats, self.size, values)

    def of(self, category: str) -> Cells:
        """Return the cells of a subtask's questions, or of all."""
        return self if category == OVERALL else self.take(self.subtasks == category)


def paired(cells: Cells, others: Cells, *names: str) -> list[Floats]:
    """Return these values of the first, then of the other, where both have all; elsewhere NaN.

    Pairs are of the same question and, if at least two repeats are in common, of the same repeat:
    (n, R). Otherwise a question's value is the mean over the side's repeats: (n, 1).
    """
    at = others.questions.get_indexer(cells.questions)
    both, own, theirs = np.intersect1d(cells.repeats, others.repeats, return_indices=True)
    sides = [(cells, at >= 0, own), (others, at[at >= 0], theirs)]

    columns = []
    for side, questions, repeats in sides:
        for name in names:
            values = side.values[name][questions]
            columns.append(values[:, repeats] if len(both) > 1 else row_means(values)[:, None])

    known = np.all(np.isfinite(columns), axis=0)
    return [np.where(known, column, np.nan) for column in columns]


def mat_counts(cells: Cells, others: Cells) -> list[Floats]:
    """Return each question's tokens and steps of the first, then of the other: (n,) each.

    They are means over repeats.
    """
    return [row_means(column) for column in paired(cells, others, "tokens", "steps")]


def mat_ratio(cells: Cells, others: Cells) -> tuple[float, float, float]:
    """Return the ratio of the two MATs and its paired interval.

    It is on the questions and repeats that both have.
    """
    columns = mat_counts(cells, others)
    return quotient(*columns), *quotient_interval(*columns)


@dataclass(eq=False)
class Pool:
    """The repeats and shards of one configuration."""

    runs: tuple[Run, ...]
    variant: str = ""  # the words that distinguish it from others of the same label
    among: list[Pool] = field(default_factory=list, repr=False)  # the experiment's

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
        """The name in figures, unique within its block."""
        return f"{self.label}, {self.variant}" if self.variant else self.label

    @property
    def budget(self) -> int | None:
        """The maximum number of draft nodes per step, root not counted.

        None if its settings set none.
        """
        method = self.first.settings["method"]
        return next((int(method[key]) for key in BUDGETS if method.get(key)), None)

    @cached_property
    def selection(self) -> frozenset[str]:
        """The questions that it is to answer, over all shards."""
        return frozenset().union(*(run.selection for run in self.runs))

    @property
    def questions(self) -> int:
        """The number of questions that it is to answer."""
        if self.first.question_keys:
            return len(self.selection)
        return int(self.first.settings["bench"].get("questions", len(self.first.answers)))

    @cached_property
    def group(self) -> dict[str, Any]:
        """Its values of the columns in GROUP."""
        settings = self.first.settings
        bench = settings["bench"]
        questions = json.dumps([bench.get("sha256"), sorted(self.selection)]).encode()
        values = (
            self.first.model,
            settings["model"]["dtype"],
            bench["name"],
            self.questions,
            hashlib.sha256(questions).hexdigest()[:8],
            settings["max_new_tokens"],
            self.first.metadata["device"],
        )
        return dict(zip(GROUP, values, strict=True))

    @property
    def columns(self) -> dict[str, Any]:
        """The columns that name it in the tables other than the main one."""
        group = {key: self.group[key] for key in ("model", "dtype", "bench", "bench_questions")}
        return group | {"method": self.label, "variant": self.variant}

    @cached_property
    def repeats(self) -> dict[int, tuple[Run, ...]]:
        """The shards of each repeat, in the order of the bench."""
        shards: dict[int, tuple[Run, ...]] = {}
        for run in self.runs:
            repeat = run.repeat
            selection = run.selection
            # The same run in two directories counts as another repeat.
            while selection in (other.selection for other in shards.get(repeat, ())):
                repeat += 1
            shards[repeat] = (*shards.get(repeat, ()), run)

        return shards

    @cached_property
    def answers(self) -> dict[int, dict[str, Row]]:
        """The rows of each repeat, by question, in the order asked."""
        answers: dict[int, dict[str, Row]] = {}
        for repeat, shards in self.repeats.items():
            answers[repeat] = {}
            for run in shards:
                answers[repeat] |= {row_key(row): row for row in run.answers}

        return answers

    def answers_to_compare(self, repeat: int) -> dict[str, Row]:
        """Return the rows to compare another configuration's repeat with.

        They are the same repeat's, else any repeat's.
        """
        rows: dict[str, Row] = {}
        for answers in reversed(self.answers.values()):
            rows |= answers
        return rows | self.answers.get(repeat, {})

    @property
    def first_answers(self) -> list[Row]:
        """The rows of the first repeat."""
        return list(next(iter(self.answers.values())).values())

    @cached_property
    def rows(self) -> list[Row]:
        """All rows of all repeats."""
        return list(itertools.chain.from_iterable(run.answers for run in self.runs))

    @cached_property
    def accepted(self) -> Accepted:
        """Its drafting steps by nodes forwarded and path accepted."""
        return accepted_paths(self.rows)

    @cached_property
    def baselines(self) -> dict[str, Pool | None]:
        """The pool of each baseline, by name; None if none has a question in common.

        It has the same model, bench file, device and COMPARED settings; only hf may have another
        execution, and for what ran inside transformers' generate a baseline may have the steps'
        own. A server's baseline is its engine without speculation, with the same model.
        """
        if self.first.is_served:
            engine = str(self.first.settings["method"]["engine"])
            alike = (*COMPARED, "method_model")
            return dict.fromkeys(BASELINES) | {SERVER: self.closest(engine, alike)}

        execution = str(self.first.facets.get("execution"))
        of_steps = {inside: steps for steps, inside in INSIDE.items()}.get(execution, execution)
        found = {}
        for name in BASELINES:
            found[name] = self.closest(name) or self.closest(name, execution=of_steps)

        found["hf"] = found["hf"] or self.closest("hf", set(COMPARED) - {"execution"})
        return found

    def closest(
        self, label: str, alike: Iterable[str] = COMPARED, **other_facets: Any
    ) -> Pool | None:
        """Return the configuration of this label that shares most batches.

        Its facets `alike` are equal to this one's. Ties go to most questions in common, then to
        fewest questions, then to the first. None if no question is in common.

        Args:
            other_facets: values that its facets must have instead of this pool's.
        """
        facets = self.first.facets | other_facets
        wanted = (label, self.first.comparable, [facets.get(key) for key in alike])

        ranks: dict[Pool, tuple[int, ...]] = {}
        for other in self.among:
            settings = [other.first.facets.get(key) for key in alike]
            if (other.label, other.first.comparable, settings) != wanted:
                continue
            batches = self.speeds.questions.isin(other.speeds.questions).sum()
            questions = self.cells.questions.isin(other.cells.questions).sum()
            if questions:
                ranks[other] = (batches, questions, -len(other.cells.questions))

        return max(ranks, key=lambda other: ranks[other], default=None)

    @cached_property
    def cells(self) -> Cells:
        """Its measured values, by question and repeat."""
        return self._cells("by_question")

    @cached_property
    def speeds(self) -> Cells:
        """The values that its speed is made of, by batch and repeat.

        They are speed, or new tokens and seconds.
        """
        return self._cells("by_batch")

    def _cells(self, frame_name: str) -> Cells:
        """Return the values of the runs' frames of that name."""
        frames = []
        for shards in self.repeats.values():
            frames.append(pd.concat([getattr(run, frame_name) for run in shards]))

        subtasks = pd.concat([frame.pop("subtask") for frame in frames])
        subtasks = subtasks[~subtasks.index.duplicated()]
        arrays = [frame.reindex(subtasks.index).to_numpy(dtype=np.float64) for frame in frames]
        stacked = np.stack(arrays, axis=1)  # (n, R, m)

        return Cells(
            questions=subtasks.index,
            subtasks=subtasks.to_numpy(dtype=object),
            repeats=tuple(self.repeats),
            size=self.first.facets["batch"],
            values={name: stacked[:, :, column] for column, name in enumerate(frames[0])},
        )


def pools(runs: Sequence[Run]) -> list[Pool]:
    """Pool the repeats and shards of each configuration; each pool's name is unique in its block.

    Pools are in the runs' order, but among comparable pools those with most questions come first.
    """
    place = {id(run): i for i, run in enumerate(runs)}
    benches = list(dict.fromkeys(run.comparable for run in runs))

    pooled: list[Pool] = []
    for peers in grouped(runs, lambda run: run.configuration).values():
        for group in joined(peers):
            group.sort(key=lambda run: place[id(run)])
            pooled.append(Pool(tuple(group), among=pooled))

    def order(pool: Pool) -> tuple[int, int, int]:
        bench = benches.index(pool.first.comparable)
        return bench, -pool.questions, place[id(pool.first)]

    pooled.sort(key=order)
    for alike in grouped(pooled, lambda pool: (*pool.group.values(), pool.label)).values():
        variants = distinguish([pool.first for pool in alike])
        for pool, variant in zip(alike, variants, strict=True):
            pool.variant = variant

    return pooled


def joined(runs: Sequence[Run]) -> list[list[Run]]:
    """Group the runs of one configuration: repeats of the same questions together, and shards.

    Shards share no question. Selections that overlap (a part and the whole) stay apart, and so do
    those whose questions are not known.
    """
    selections = grouped(runs, lambda run: run.selection)
    groups: list[tuple[set[str], list[Run]]] = []

    for selection, same in sorted(selections.items(), key=lambda pair: -len(pair[0])):
        for keys, group in groups:
            known = same[0].question_keys and group[0].question_keys
            if known and keys.isdisjoint(selection):
                keys.update(selection)
                group.extend(same)
                break
        else:
            groups.append((set(selection), same))

    return [group for _, group in groups]


def distinguish(runs: Sequence[Run]) -> list[str]:
    """Name the settings in which runs of one label differ; empty for a single run.

    If they differ in more than MANY settings, values that more than half of the runs share are left
    out, except those of the first setting.
    """
    facets = [run.facets | run.loading for run in runs]
    keys = dict.fromkeys(itertools.chain.from_iterable(facets))
    varied = [key for key in keys if len({str(settings.get(key)) for settings in facets}) > 1]
    plain = [key for key in varied if key not in IF_NEEDED]

    usual = {}

    for key in plain[1:] if len(plain) > MANY else []:
        values = Counter(str(settings.get(key)) for settings in facets)
        value, times = values.most_common(1)[0]
        if 2 * times > len(facets):
            usual[key] = value

    variants: list[str] = []
    for named, left_out in ((plain, usual), (plain, {}), (varied, {})):
        variants = [_variant(settings, named, left_out) for settings in facets]
        if len(set(variants)) == len(runs):
            return variants

    return [f"{words}, #{n}".removeprefix(", ") for n, words in enumerate(variants, start=1)]


def _variant(settings: dict[str, Any], keys: Sequence[str], left_out: dict[str, str]) -> str:
    """Return the words for these settings, except those that have the values left out."""
    words = []
    for key in keys:
        value = settings.get(key)
        if str(value) == left_out.get(key):
            continue
        if key == "tree":
            words.append(f"{value} ({settings.get('tree_nodes')})")
        elif key in WORDS:
            if key != "tree_nodes" or "tree" not in keys:  # else named with the tree
                words.append(WORDS[key].format(FILE_ORDER if value is None else value))
        elif isinstance(value, bool):
            words.append(key if value else f"no {key}")
        else:
            words.append(f"{key.removeprefix('method_')}={value}")

    return ", ".join(words)
