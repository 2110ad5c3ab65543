"""The runs of one configuration together: its repeats, and the shards of a bench that one repeat
was split into.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..records.identity import SAMPLING_COLUMNS, SERVER, Identity
from ..records.rows import Row
from ..records.runs import INSIDE, Run, row_key
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
# settings that say how many nodes a step drafts at most
BUDGETS = (
    "nodes",
    "tree_nodes",
    "max_draft",
)


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
    """Return these values of the first, then of the other, where both have all of them; elsewhere
    NaN.

    Pairs are of the same question and, if at least two repeats are in common, of the same repeat:
    (n, R). Otherwise a
    question's value is the mean over the side's repeats: (n, 1).
    """
    at = others.questions.get_indexer(cells.questions)
    both, *repeats = np.intersect1d(cells.repeats, others.repeats, return_indices=True)
    columns = []
    for side, rows, kept in zip((cells, others), (at >= 0, at[at >= 0]), repeats, strict=True):
        for name in names:
            values = side.values[name][rows]
            columns.append(values[:, kept] if len(both) > 1 else row_means(values)[:, None])
    known = np.all(np.isfinite(columns), axis=0)
    return [np.where(known, column, np.nan) for column in columns]


def mat_counts(cells: Cells, others: Cells) -> list[Floats]:
    """Return each question's tokens and steps of the first, then of the other, as means over
    repeats: (n,) each.
    """
    return [row_means(column) for column in paired(cells, others, "tokens", "steps")]


def mat_ratio(cells: Cells, others: Cells) -> tuple[float, float, float]:
    """Return the ratio of the two MATs on the questions and repeats that both have, and its paired
    interval.
    """
    columns = mat_counts(cells, others)
    return quotient(*columns), *quotient_interval(*columns)


@dataclass(frozen=True)
class Pool:
    """The repeats and shards of one configuration, and the words that distinguish it from others of
    the same label.
    """

    runs: tuple[Run, ...]
    variant: str = ""
    among: list[Pool] = field(default_factory=list, compare=False, repr=False)  # the experiment's

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def identity(self) -> Identity:
        """The identity of its first run."""
        return self.first.identity

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
        """The maximum number of draft nodes per step, root not counted, by its settings; None if
        they set none.
        """
        method = self.first.settings["method"]
        return next((int(method[key]) for key in BUDGETS if method.get(key)), None)

    @cached_property
    def selection(self) -> frozenset[str]:
        """The questions that it is to answer, over all shards."""
        return frozenset().union(*(run.identity.selection for run in self.runs))

    @property
    def questions(self) -> int:
        """The number of questions that it is to answer."""
        unknown = self.first.settings["bench"].get("questions", len(self.first.answers))
        return len(self.selection) if self.identity.question_keys else int(unknown)

    @cached_property
    def group(self) -> dict[str, Any]:
        """Its values of the columns in GROUP."""
        settings = self.first.settings
        questions = json.dumps([settings["bench"].get("sha256"), sorted(self.selection)]).encode()
        bench = settings["bench"]["name"], self.questions, hashlib.sha256(questions).hexdigest()[:8]
        machine = settings["max_new_tokens"], self.first.metadata["device"]
        return dict(
            zip(
                GROUP, (self.first.model, settings["model"]["dtype"], *bench, *machine), strict=True
            )
        )

    @cached_property
    def repeats(self) -> dict[int, tuple[Run, ...]]:
        """The shards of each repeat, in the order of the bench."""
        shards: dict[int, tuple[Run, ...]] = {}
        for run in self.runs:
            place = run.identity.repeat
            while any(
                other.identity.selection == run.identity.selection
                for other in shards.get(place, ())
            ):
                place += 1  # the same run in two directories counts as another repeat
            shards[place] = (*shards.get(place, ()), run)
        return shards

    @cached_property
    def answers(self) -> dict[int, dict[str, Row]]:
        """The rows of each repeat, by question, in the order asked."""
        repeats = self.repeats.items()
        return {
            repeat: {row_key(row): row for run in shards for row in run.answers}
            for repeat, shards in repeats
        }

    def answers_to_compare(self, repeat: int) -> dict[str, Row]:
        """Return the rows to compare another configuration's repeat with: the same repeat's, else
        any repeat's.
        """
        every = {
            key: row for answers in reversed(self.answers.values()) for key, row in answers.items()
        }
        return every | self.answers.get(repeat, {})

    @property
    def first_answers(self) -> list[Row]:
        """The rows of the first repeat."""
        return list(next(iter(self.answers.values())).values())

    @cached_property
    def rows(self) -> list[Row]:
        """All rows of all repeats."""
        return [row for run in self.runs for row in run.answers]

    @cached_property
    def accepted(self) -> Accepted:
        """Its drafting steps by nodes forwarded and path accepted."""
        return accepted_paths(self.rows)

    @cached_property
    def baselines(self) -> dict[str, Pool | None]:
        """The pool of each baseline to compare with, by name; None if none has a question in
        common.

        It has the same model, bench file, device and COMPARED settings; only hf may have another
        execution, and for what ran inside transformers' generate a baseline may have the steps'
        own. A server's baseline is its engine without speculation, with the same model.
        """
        if self.identity.is_served:
            engine = str(self.identity.method["engine"])
            alike = (*COMPARED, "method_model")
            return dict.fromkeys(BASELINES) | {SERVER: self.closest(engine, alike)}
        found = {name: self.closest(name) for name in BASELINES}
        for steps, inside in INSIDE.items():
            if self.identity.facets.get("execution") == inside:
                found = {
                    name: pool or self.closest(name, execution=steps)
                    for name, pool in found.items()
                }
        return found | {"hf": found["hf"] or self.closest("hf", set(COMPARED) - {"execution"})}

    def closest(
        self, label: str, alike: Iterable[str] = COMPARED, **other_facets: Any
    ) -> Pool | None:
        """Return the configuration of this label, with the facets `alike` equal, that shares most
        batches.

        Ties go to most questions in common, then to fewest questions. None if none is in common.

        Args:
            other_facets: values that its facets must have instead of this pool's.
        """
        facets = self.identity.facets | other_facets
        ranked = list[tuple[int, int, int, Pool]]()
        for other in (pool for pool in self.among if pool.label == label):
            same = all(facets.get(key) == other.identity.facets.get(key) for key in alike)
            if same and other.identity.comparable == self.identity.comparable:
                pairs = ((self.speeds, other.speeds), (self.cells, other.cells))
                batches, common = (
                    int(own.questions.isin(others.questions).sum()) for own, others in pairs
                )
                ranked.append((batches, common, -len(other.cells.questions), other))
        # ties: the first
        _, common, _, best = max(ranked, key=lambda entry: entry[:3], default=(0, 0, 0, None))
        return best if common else None

    @cached_property
    def cells(self) -> Cells:
        """Its measured values, by question and repeat."""
        return self._cells("by_question")

    @cached_property
    def speeds(self) -> Cells:
        """The values that its speed is made of, by batch and repeat: speed, or new tokens and
        seconds.
        """
        return self._cells("by_batch")

    def _cells(self, frame_name: str) -> Cells:
        """Return the values of the runs' frames of that name."""
        frames = [
            pd.concat([getattr(run, frame_name) for run in shards])
            for shards in self.repeats.values()
        ]
        subtasks = pd.concat([frame.pop("subtask") for frame in frames])
        subtasks = subtasks[~subtasks.index.duplicated()]
        # (n, R, m)
        stacked = np.stack(
            [f.reindex(subtasks.index).to_numpy(dtype=np.float64) for f in frames], axis=1
        )
        values = {name: stacked[:, :, column] for column, name in enumerate(frames[0])}
        about = subtasks.index, subtasks.to_numpy(dtype=object), tuple(self.repeats)
        return Cells(*about, self.identity.facets["batch"], values)


def pools(runs: Sequence[Run]) -> list[Pool]:
    """Pool the repeats and shards of each configuration; each pool's name is unique in its block.

    Pools are in the runs' order, but among comparable pools those with most questions come first.
    """
    place = {id(run): i for i, run in enumerate(runs)}
    begins = {run.identity.comparable: place[id(run)] for run in reversed(runs)}
    configurations = grouped(runs, lambda run: run.identity.configuration).values()
    groups = [
        sorted(g, key=lambda run: place[id(run)]) for peers in configurations for g in joined(peers)
    ]
    pooled = [Pool(tuple(group)) for group in groups]
    pooled.sort(
        key=lambda pool: (begins[pool.identity.comparable], -pool.questions, place[id(pool.first)])
    )
    words: dict[int, str] = {}
    for peers in grouped(pooled, lambda pool: (*pool.group.values(), pool.label)).values():
        words |= zip(map(id, peers), distinguish([pool.first for pool in peers]), strict=True)
    named: list[Pool] = []
    named += [Pool(pool.runs, words[id(pool)], named) for pool in pooled]
    return named


def joined(runs: Sequence[Run]) -> list[list[Run]]:
    """Group the runs of one configuration: repeats of the same questions together, and shards,
    which share no question.

    Selections that overlap (a part and the whole) stay apart, and so do those whose questions are
    not known.
    """
    selections = grouped(runs, lambda run: run.identity.selection)
    groups: list[tuple[set[str], list[Run]]] = []
    for selection, same in sorted(selections.items(), key=lambda pair: -len(pair[0])):
        for keys, group in groups:
            known = same[0].identity.question_keys and group[0].identity.question_keys
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
    facets = [run.identity.facets | run.identity.loading for run in runs]
    keys = dict.fromkeys(key for settings in facets for key in settings)
    varied = [key for key in keys if len({str(settings.get(key)) for settings in facets}) > 1]
    plain = [key for key in varied if key not in ("tree_depth", "tree_breadth", "url")]
    # depth, breadth, url only where needed
    choices = [
        (plain, [plain] * len(runs)),
        (varied, [varied] * len(runs)),
    ]
    if len(plain) > MANY:
        counts = {
            key: Counter(str(settings.get(key)) for settings in facets).most_common(1)[0]
            for key in plain[1:]
        }
        usual = {key: value for key, (value, times) in counts.items() if 2 * times > len(runs)}
        unusual = [
            [key for key in plain if str(settings.get(key)) != usual.get(key)]
            for settings in facets
        ]
        choices.insert(0, (plain, unusual))
    words: list[str] = []
    for among, chosen in choices:
        named = zip(chosen, facets, strict=True)
        words = [
            ", ".join(filter(None, (_words(key, settings, among) for key in kept)))
            for kept, settings in named
        ]
        if len(set(words)) == len(runs):
            return words
    names = [run.folder.name for run in runs]
    # left to differ: files of one name with other contents
    methods = [run.settings["method"] for run in runs]
    digests = [
        m.get("start_sha256") or m.get("tree_sha256") or name
        for m, name in zip(methods, names, strict=True)
    ]
    told_apart = len(
        {(word, digest[-6:]) for word, digest in zip(words, digests, strict=True)}
    ) == len(runs)
    marks = [f"#{mark[-6:]}" for mark in (digests if told_apart else names)]
    return [", ".join(filter(None, pair)) for pair in zip(words, marks, strict=True)]


def _words(key: str, settings: dict[str, Any], varied: list[str]) -> str:
    value = settings.get(key)
    if key == "tree_nodes":
        return "" if "tree" in varied else f"{value} nodes"  # named with the tree
    forms = {"tree": f"{value} ({settings.get('tree_nodes')})", "order": f"{value or 'file'} order"}
    forms |= {"tree_depth": f"{value} deep", "tree_breadth": f"{value} wide"}
    plain = (
        f"{'' if value else 'no '}{key}"
        if isinstance(value, bool)
        else f"{key.removeprefix('method_')}={value}"
    )
    return forms.get(key, plain)
