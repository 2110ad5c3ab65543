"""The runs of one configuration together: its repeats, and the shards of a bench."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..records.rows import FILE_ORDER, Row
from ..records.runs import INSIDE, SAMPLING_COLUMNS, SERVER, Run, row_key
from .acceptance import Accepted, accepted_paths
from .intervals import Floats, quotient, quotient_interval, row_means
from .metrics import OVERALL, counts_between, grouped, novelty

BASELINES = ("hf", "vanilla")
SAMPLED = tuple(SAMPLING_COLUMNS.values())  # how a run's tokens were chosen
# Facets that a baseline must share: also how steps were executed, and whether they were timed.
COMPARED = ("execution", "phases", "timed", "batch", *SAMPLED)
MANY = 3  # if runs of a label differ in more settings than this, only unusual values are named
IF_NEEDED = (
    "tree_depth",
    "tree_breadth",
    "url",
    "path",
    "files",
)  # named only if the other settings are the same
# how a setting is named, if not as NAME=VALUE
WORDS = {
    "tree_nodes": "{} nodes",
    "tree_depth": "{} deep",
    "tree_breadth": "{} wide",
    "order": "{} order",
}
# how a block's name shows what distinguishes it; other values are shown as they are
BLOCK_WORDS = {
    "bench_questions": "{} questions",
    "questions_sha256": "questions #{}",
    "max_new_tokens": "max_new_tokens {}",
}
REFERENCE = "recycling"  # the method whose MAT the others are divided by
# settings that say how many nodes a step drafts at most
BUDGETS = ("nodes", "tree_nodes", "max_draft")


@dataclass(frozen=True)
class Cells:
    prompts: pd.Series[str]  # hash of each question's first prompt, empty if not recorded: (n,)
    subtasks: NDArray[np.object_]  # the questions' subtasks: (n,)
    repeats: tuple[int, ...]  # numbers of the repeats
    size: int  # of a batch

    # by a column of the runs' frames: (n, R), NaN where the repeat has no answer
    values: dict[str, Floats]

    def of(self, category: str) -> Cells:
        if category == OVERALL:
            return self
        rows = self.subtasks == category
        values = {name: value[rows] for name, value in self.values.items()}
        return replace(
            self, prompts=self.prompts[rows], subtasks=self.subtasks[rows], values=values
        )

    @property
    def questions(self) -> pd.Index[str]:
        """The keys of the questions, or of batches."""
        return self.prompts.index

    def other_prompts(self, others: Cells) -> pd.Series[bool]:
        """True where a question is known to have another first prompt in `others`: (n,)."""
        there = others.prompts.reindex(self.questions, fill_value="")
        return (self.prompts != there) & (self.prompts != "") & (there != "")

    def matched(self, others: Cells) -> NDArray[np.intp]:
        """Return each question's index in `others`; -1 if it, or its prompt, is not there: (n,)."""
        at = others.questions.get_indexer(self.questions)
        return np.where(self.other_prompts(others), -1, at)


def paired(cells: Cells, others: Cells, *names: str) -> list[Floats]:
    """Return these values of the first, then of the other, where both have all; elsewhere NaN.

    Pairs are of the same question, asked in the same first prompt (later ones hold the sides' own
    answers), and of the same repeat: (n, R). With fewer than two common repeats, they are means
    over each side's: (n, 1).
    """
    at = cells.matched(others)
    both, here, there = np.intersect1d(cells.repeats, others.repeats, return_indices=True)
    sides = [
        (cells, at >= 0, here),
        (others, at[at >= 0], there),
    ]

    columns = []
    for side, questions, repeats in sides:
        for name in names:
            values = side.values[name][questions]
            if len(both) > 1:
                columns.append(values[:, repeats])
            else:
                columns.append(row_means(values)[:, None])

    known = np.all(np.isfinite(columns), axis=0)
    return [np.where(known, column, np.nan) for column in columns]


def mat_counts(cells: Cells, others: Cells) -> list[Floats]:
    """Return each question's mean tokens and steps of the first, then of the other: (n,) each."""
    return [row_means(column) for column in paired(cells, others, "tokens", "steps")]


def mat_ratio(cells: Cells, others: Cells) -> tuple[float, float, float]:
    """Return the ratio of the two MATs and its paired interval."""
    columns = mat_counts(cells, others)
    return quotient(*columns), *quotient_interval(*columns)


@dataclass(eq=False)
class Pool:
    runs: list[Run]
    variant: str = ""  # the words that distinguish it from others of the same label
    block_name: str = ""  # its block of the tables
    title: str = ""  # its name, unique in the experiment
    among: list[Pool] = field(default_factory=list, repr=False)  # all of the experiment

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def label(self) -> str:
        return self.first.label

    @property
    def method(self) -> str:
        return str(self.first.settings["method"]["name"])

    @property
    def name(self) -> str:
        """The name in figures, unique within its block."""
        return f"{self.label}, {self.variant}".removesuffix(", ")

    @property
    def budget(self) -> int | None:
        method = self.first.settings["method"]
        for key in BUDGETS:
            if method.get(key):
                return int(method[key])
        return None

    @cached_property
    def selection(self) -> frozenset[str]:
        return frozenset().union(*(run.selection for run in self.runs))

    @property
    def questions(self) -> int:
        """The number of questions that it is to answer."""
        if self.first.question_keys:
            return len(self.selection)
        return int(self.first.settings["bench"].get("questions", len(self.first.answers)))

    @cached_property
    def block(self) -> dict[str, Any]:
        """The columns that all rows of a block of the tables share."""
        settings = self.first.settings
        bench = settings["bench"]
        questions = json.dumps([bench.get("sha256"), sorted(self.selection)]).encode()
        return {
            "model": self.first.model,
            "dtype": settings["model"]["dtype"],
            "bench": bench["name"],
            "bench_questions": self.questions,
            "questions_sha256": hashlib.sha256(questions).hexdigest()[:8],
            "max_new_tokens": settings["max_new_tokens"],
            "device": self.first.device,
        }

    @property
    def columns(self) -> dict[str, Any]:
        """The columns that name it in the tables other than the main one."""
        return {
            "model": self.block["model"],
            "dtype": self.block["dtype"],
            "bench": self.block["bench"],
            "bench_questions": self.questions,
            "method": self.label,
            "variant": self.variant,
        }

    @cached_property
    def repeats(self) -> dict[int, list[Run]]:
        """The shards of each repeat, in the order of the bench."""
        shards: dict[int, list[Run]] = {}
        for run in self.runs:
            repeat = run.repeat
            # The same run in two directories counts as another repeat.
            while any(run.selection == other.selection for other in shards.get(repeat, ())):
                repeat += 1
            shards.setdefault(repeat, []).append(run)

        return shards

    @cached_property
    def answers(self) -> dict[int, dict[str, Row]]:
        """The rows of each repeat, by question, in the order asked."""
        return {
            repeat: {row_key(row): row for run in shards for row in run.answers}
            for repeat, shards in self.repeats.items()
        }

    def answers_to_compare(self, repeat: int) -> dict[str, Row]:
        """Return the rows of the same repeat, else of any."""
        rows: dict[str, Row] = {}
        for answers in reversed(self.answers.values()):
            rows |= answers
        return rows | self.answers.get(repeat, {})

    @property
    def first_answers(self) -> dict[str, Row]:
        return next(iter(self.answers.values()))

    def of_part(self, **part: Any) -> dict[str, Any]:
        """Return MAT with its interval, and the tokens, of a part as for `counts_between`."""
        counts = [counts_between(row, **part) for row in self.first_answers.values()]
        tokens, steps = np.array(counts, dtype=np.float64).T  # (questions,) each
        low, high = quotient_interval(tokens[steps > 0], steps[steps > 0])
        mat = quotient(tokens, steps)
        return {"mat": mat, "mat_low": low, "mat_high": high, "new_tokens": int(tokens.sum())}

    @property
    def novelty(self) -> list[float]:
        choices = [choice for row in self.first_answers.values() for choice in row["choices"]]
        return [share for choice in choices for share in novelty(choice)]

    @cached_property
    def rows(self) -> list[Row]:
        return [row for run in self.runs for row in run.answers]

    @cached_property
    def accepted(self) -> Accepted:
        return accepted_paths(self.rows)

    @cached_property
    def baselines(self) -> dict[str, Pool | None]:
        """The pool of each baseline, by name; None if none has a question in common.

        It has the same COMPARED settings; only hf may have another execution, and what ran inside
        transformers' generate takes a baseline of its steps' execution. A server's is its engine
        without speculation.
        """
        if self.first.is_served:
            engine = str(self.first.settings["method"]["engine"])
            alike = (*COMPARED, "method_model")
            return dict.fromkeys(BASELINES) | {SERVER: self.closest(engine, alike)}

        of_steps = {inside: steps for steps, inside in INSIDE.items()}
        execution = self.first.facets.get("execution")
        execution = of_steps.get(str(execution), execution)
        by_name = {}
        for name in BASELINES:
            by_name[name] = self.closest(name) or self.closest(name, execution=execution)

        if by_name["hf"] is None:
            any_execution = set(COMPARED) - {"execution"}
            by_name["hf"] = self.closest("hf", any_execution)
        return by_name

    def closest(
        self, label: str, alike: Iterable[str] = COMPARED, **other_facets: Any
    ) -> Pool | None:
        """Return the configuration of this label that shares most batches; None if it shares none.

        Ties go to most questions in common, then to fewest questions. Other prompts of a question
        do not count, but where all are others. `other_facets` replace those of this pool.
        """
        facets = self.first.facets | other_facets
        identity = (label, self.first.comparable, [facets.get(key) for key in alike])

        ranks: dict[Pool, tuple[int, ...]] = {}
        for other in self.among:
            settings = [other.first.facets.get(key) for key in alike]
            if (other.label, other.first.comparable, settings) != identity:
                continue

            batches = (self.speeds.matched(other.speeds) >= 0).sum()
            questions = (self.cells.matched(other.cells) >= 0).sum()
            if self.cells.questions.isin(other.cells.questions).any():
                fewest = -len(other.cells.questions)
                ranks[other] = (batches, questions, fewest)

        return max(ranks, key=lambda other: ranks[other], default=None)

    @cached_property
    def cells(self) -> Cells:
        return self._cells("by_question")

    @cached_property
    def speeds(self) -> Cells:
        """The speed, or new tokens and seconds, by batch and repeat."""
        return self._cells("by_batch")

    def _cells(self, frame_name: str) -> Cells:
        frames = []
        for shards in self.repeats.values():
            frames.append(pd.concat([getattr(run, frame_name) for run in shards]))

        questions = pd.concat(frames)[["subtask", "prompt"]]
        questions = questions[~questions.index.duplicated()]
        frames = [frame.drop(columns=list(questions)).reindex(questions.index) for frame in frames]
        arrays = [frame.to_numpy(dtype=np.float64) for frame in frames]
        stacked = np.stack(arrays, axis=1)  # (n, R, m)

        return Cells(
            prompts=questions["prompt"],
            subtasks=questions["subtask"].to_numpy(dtype=object),
            repeats=tuple(self.repeats),
            size=self.first.facets["batch"],
            values={name: stacked[:, :, column] for column, name in enumerate(frames[0])},
        )


def pools(runs: Sequence[Run]) -> list[Pool]:
    """Pool the repeats and shards of each configuration, and name the pools."""
    place = {id(run): i for i, run in enumerate(runs)}
    benches = list(dict.fromkeys(run.comparable for run in runs))

    pooled: list[Pool] = []
    for same in grouped(runs, lambda run: run.configuration).values():
        pooled += [Pool(together) for together in joined(same)]

    def order(pool: Pool) -> tuple[int, int, int]:
        bench = benches.index(pool.first.comparable)
        return bench, -pool.questions, place[id(pool.first)]

    pooled.sort(key=order)
    for pool in pooled:
        pool.among = pooled
    _name(pooled)
    return pooled


def joined(runs: list[Run]) -> list[list[Run]]:
    """Group the runs of one configuration: repeats of the same questions together, and shards.

    Shards share no question. Selections that overlap, or that are not known, stay apart.
    """
    selections = grouped(runs, lambda run: run.selection)
    groups: list[list[Run]] = []
    for selection, same in sorted(selections.items(), key=lambda pair: -len(pair[0])):
        for group in groups:
            covered = frozenset().union(*(run.selection for run in group))
            known = same[0].question_keys and group[0].question_keys
            if known and covered.isdisjoint(selection):
                group += same
                break
        else:
            groups.append([*same])

    return groups


def _name(pooled: Sequence[Pool]) -> None:
    benches = grouped(pooled, lambda pool: (pool.block["model"], pool.block["bench"]))
    for (model, bench), same in benches.items():
        described = pd.DataFrame([pool.block for pool in same])
        varied = [name for name in map(str, described) if described[name].nunique() > 1]
        selections = described.groupby("bench_questions")["questions_sha256"].nunique()
        if selections.max() == 1:  # the number of questions says which they are
            varied = [name for name in varied if name != "questions_sha256"]

        for pool in same:
            words = [model, bench]
            for name in varied:
                words.append(BLOCK_WORDS.get(name, "{}").format(pool.block[name]))
            pool.block_name = ", ".join(words)

    for alike in grouped(pooled, lambda pool: (pool.block_name, pool.label)).values():
        variants = distinguish([pool.first for pool in alike])
        for pool, variant in zip(alike, variants, strict=True):
            pool.variant = variant

    counts = Counter(pool.name for pool in pooled)
    for pool in pooled:
        pool.title = pool.name
        if counts[pool.name] > 1:
            pool.title += f", {pool.block_name}"


def distinguish(runs: Sequence[Run]) -> list[str]:
    """Name the settings in which runs of one label differ; empty for a single run.

    If they differ in more than MANY, values that more than half of the runs share are left out,
    except those of the first setting.
    """
    settings = [run.facets | run.loading for run in runs]
    texts = [{key: str(value) for key, value in one.items()} for one in settings]
    values = pd.DataFrame(texts).fillna("None")
    varied = [str(key) for key in values if values[key].nunique() > 1]
    plain = [key for key in varied if key not in IF_NEEDED]

    usual: dict[str, str] = {}
    for key in plain[1:] if len(plain) > MANY else ():
        value = values[key].mode()[0]
        if (values[key] == value).mean() > 0.5:
            usual[key] = value

    variants: list[str] = []
    for keys, left_out in ((plain, usual), (plain, {}), (varied, {})):
        variants = [_variant(one, keys, left_out) for one in settings]
        if len(set(variants)) == len(runs):
            return variants
    return [f"{words}, #{number}".removeprefix(", ") for number, words in enumerate(variants, 1)]


def _variant(settings: dict[str, Any], keys: Sequence[str], left_out: dict[str, str]) -> str:
    words = []
    for key in keys:
        value = settings.get(key)
        if str(value) == left_out.get(key):
            continue
        if key == "tree":
            words.append(f"{value} ({settings.get('tree_nodes')})")
        elif key in WORDS:
            if key != "tree_nodes" or "tree" not in keys:  # else named with the tree
                shown = FILE_ORDER if value is None else value
                words.append(WORDS[key].format(shown))
        elif isinstance(value, bool):
            words.append(key if value else f"no {key}")
        else:
            words.append(f"{key.removeprefix('method_')}={value}")

    return ", ".join(words)
