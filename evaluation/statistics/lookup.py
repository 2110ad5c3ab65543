"""A figure of an experiment, asked for in words: `recycling start=hot nodes=24 category=qa`.

Words, in any order:
    recycling: the method.
    nodes=24: a setting of the configuration, as a table's columns name it; `nodes` is the most that a step drafts.
    mat: a column of the main table; MAT where none is named. Or a setting, to print it.
    category=qa: of this subtask. repeated=10-30: of answers of which 10 to 30 % of the 3-grams occurred earlier.
    interval=no: without the interval.
    over recycling: MAT over another configuration's, paired; settings that are not named again are the same there.

Of several configurations that match, the one whose other settings are the method's defaults is meant.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from model.errors import UserError

from ..records.rows import accept_lengths
from ..records.runs import Run, read_runs, row_key
from .intervals import ratio_interval
from .metrics import OVERALL, repetition
from .notes import heading
from .pools import Pool, mat_ratio, pools
from .published import default_settings
from .rendering import Cell, interval_text, paper_cell, shown
from .tables import GROUP, main_table

OVER = "over"
FORMS = dict.fromkeys(("tokens_per_second", "tokens_per_second_total", "tokens_per_second_decode"), ".0f")


class NotMeasured(UserError):
    """No configuration of the experiment is the one that was asked for."""


@dataclass(frozen=True)
class Query:
    """What some words ask for; `over` is what MAT is divided by."""

    method: str = ""
    column: str = "mat"
    settings: dict[str, str] = field(default_factory=dict)
    category: str = OVERALL
    repeated: str = ""
    interval: bool = True
    over: Query | None = None


class Experiment:
    """The runs of an experiment's folder, and their table."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def runs(self) -> list[Run]:
        """All runs. Raises UserError if there is none."""
        return read_runs(self.folder)

    @cached_property
    def table(self) -> pd.DataFrame:
        return main_table(self.runs)

    @cached_property
    def pools(self) -> list[Pool]:
        return pools(self.runs)

    @cached_property
    def rows(self) -> dict[tuple[Any, ...], dict[Any, Any]]:
        """The rows of the table, by what names a configuration, and category."""
        keys = ["method", "variant", "category", *GROUP]
        return {tuple(row[key] for key in keys): row for row in self.table.to_dict("records")}

    @cached_property
    def settings(self) -> dict[int, dict[str, str]]:
        """What words may name of each configuration, as text."""
        return {id(pool): {key: _text(value) for key, value in _settings(pool).items()} for pool in self.pools}

    @cached_property
    def digest(self) -> str:
        """Of every answer's steps and time: figures that are rounded do not show one step more."""
        own = hashlib.sha256()
        for pool in self.pools:
            for row in pool.rows:
                times = [choice.get("wall_time") for choice in row["choices"]]
                own.update(json.dumps([pool.name, row_key(row), accept_lengths(row), times]).encode())
        return own.hexdigest()[:8]

    @property
    def conditions(self) -> str:
        """What was measured on what: a sentence a bench, then one a device and setting."""
        benches: dict[str, str] = {}
        for pool in self.pools:
            answers = pool.first_answers
            turns = sum(len(choice["turns"]) for row in answers for choice in row["choices"])
            tokens = sum(sum(accept_lengths(row)) for row in answers)
            count = f"{len(answers)} questions of {pool.group['bench']} ({turns:,} turns, {tokens:,} tokens)"
            benches.setdefault(f"{pool.group['model']} {pool.group['bench']}", count)
        repeats = max(len(pool.repeats) for pool in self.pools)
        circumstances = dict.fromkeys(part for line in heading(self.runs) for part in line.split("; "))  # each once
        return f"{'; '.join(benches.values())}; {repeats} repeat{'s' * (repeats > 1)}; {'; '.join(circumstances)}."

    def cell(self, *parts: str) -> Cell:
        """Return the figure that these words ask for, those of a row and of a column say.

        Raises:
            UserError: a word is unknown, or the words fit several configurations.
            NotMeasured: they fit none.
        """
        left, right = zip(*(part.partition(OVER)[::2] for part in map(_spaced, parts)), strict=True)
        query, words = self._query(" ".join(left)), " ".join(parts)
        if any(OVER in part.split() for part in parts):
            over = self._query(" ".join(right))
            self._check_over(query, over, words)
            query = replace(query, over=over, interval=query.interval and over.interval)
        chosen = self._chosen(query, words)
        cells = {self._cell(pool, query) for pool in chosen}
        if len(cells) > 1:
            names = "; ".join(pool.name for pool in chosen)
            raise UserError(f"{self.folder}: '{words}' fits several, name more of: {names}")
        return cells.pop()

    def _query(self, words: str) -> Query:
        query = Query()
        methods = {pool.method for pool in self.pools}
        known = {key for settings in self.settings.values() for key in settings}
        said: dict[str, str] = {}
        for word in words.split():
            key, equals, value = word.partition("=")
            if key in ("category", "repeated") and equals:
                query = replace(query, **{key: value})  # type: ignore[arg-type]
            elif key == "interval" and value in ("yes", "no"):
                query = replace(query, interval=value != "no")
            elif equals and key in known:
                query = replace(query, settings=query.settings | {key: value})
            elif not equals and word in methods:
                key, query = "the method", replace(query, method=word)
            elif not equals and (word in known or word in self.table.columns):
                key, query = "the column", replace(query, column=word)
            else:
                raise UserError(
                    f"{self.folder}: '{word}' is no method ({', '.join(sorted(methods))}), no setting "
                    f"({', '.join(sorted(known))}) and no column of tables/main.csv"
                )
            if said.setdefault(key, word) != word:
                raise UserError(f"{self.folder}: '{word}' in '{words.strip()}': {key} is '{said[key]}' already")
        return query

    def _check_over(self, query: Query, over: Query, words: str) -> None:
        """Raise UserError for words that a quotient of MATs leaves no meaning."""
        wrong = [asked.column for asked in (query, over) if asked.column != "mat"]
        wrong += [f"repeated={asked.repeated}" for asked in (query, over) if asked.repeated]
        wrong += [f"category={over.category}"] if over.category != OVERALL else []
        if wrong:
            raise UserError(
                f"{self.folder}: '{wrong[0]}' has no place in '{words}': '{OVER}' divides MATs, those of a category if "
                "it is named before"
            )
        if not over.method and not over.settings:
            raise UserError(f"{self.folder}: '{words}': name behind '{OVER}' what MAT is divided by")

    def _chosen(self, query: Query, words: str) -> list[Pool]:
        """Return the configurations that match: one, or those that only have the same defaults."""
        wanted = query.settings.items()
        matching = [pool for pool in self.pools if query.method in ("", pool.method)]
        found = [pool for pool in matching if all(self.settings[id(pool)].get(key, "") == v for key, v in wanted)]
        if not found:
            there = {key: sorted({self.settings[id(pool)].get(key, "none") for pool in matching}) for key, _ in wanted}
            has = "; ".join(f"{key}={','.join(values)}" for key, values in there.items())
            raise NotMeasured(f"{self.folder}: no configuration is '{words}'; {query.method} has {has}")
        defaults = {key: _text(value) for key, value in default_settings(query.method).items()}
        usual = {key: value for key, value in defaults.items() if key not in query.settings}
        plain = [p for p in found if all(self.settings[id(p)].get(key, value) == value for key, value in usual.items())]
        return plain or found

    def _cell(self, pool: Pool, query: Query) -> Cell:
        if query.over is not None:
            return self._ratio(pool, query, query.over)
        if query.column in self.settings[id(pool)]:
            return Cell(self.settings[id(pool)][query.column])
        if query.repeated:
            return self._repeated(pool, query)
        key = (pool.label, pool.variant, query.category, *(pool.group[column] for column in GROUP))
        if key not in self.rows:
            raise NotMeasured(f"{self.folder}: {pool.name} has no answer in category {query.category}")
        cell = paper_cell(self.rows[key], query.column, with_interval=query.interval)
        value = self.rows[key][query.column]
        if query.column in FORMS:
            return cell._replace(text=shown(value, FORMS[query.column]), interval="")
        return cell._replace(text=f"{value:,}") if isinstance(value, int) else cell

    def _repeated(self, pool: Pool, query: Query) -> Cell:
        """Return MAT, or the number of questions or tokens, of the answers that repeat as much as is asked for."""
        if not (ends := re.fullmatch(r"(\d+)-(\d+)", query.repeated)):
            raise UserError(f"{self.folder}: repeated={query.repeated}: must be two whole percentages, as 10-30")
        low, high = (int(end) / 100 for end in ends.groups())
        shares = {key: repetition(answer) for key, answer in pool.answers_to_compare(0).items()}
        cells = pool.cells.of(query.category)
        cells = cells.take(np.array([low <= shares[key] < high for key in cells.questions], dtype=bool))
        tokens, steps = cells.mean_counts()
        counts = {"questions": len(tokens), "new_tokens": int(tokens.sum())}
        if query.column in counts:
            return Cell(f"{counts[query.column]:,}")
        if query.column != "mat" or not len(tokens):
            raise NotMeasured(f"{self.folder}: {pool.name} has no {query.column} for repeated={query.repeated}")
        interval = ratio_interval(tokens, steps)
        return Cell(f"{tokens.sum() / steps.sum():.2f}", _interval(*interval) if query.interval else "")

    def _ratio(self, pool: Pool, query: Query, over: Query) -> Cell:
        """Return MAT over another configuration's: one that shares the settings that its method knows at all."""
        method = over.method or query.method
        theirs = [self.settings[id(other)] for other in self.pools if other.method == method]
        has = {key for known in theirs for key, value in known.items() if value != "null"}
        inherited = {key: value for key, value in query.settings.items() if key in has}
        base = self._chosen(replace(over, method=method, settings=inherited | over.settings), f"{OVER} {method}")
        if len(base) > 1:
            names = "; ".join(other.name for other in base)
            raise UserError(f"{self.folder}: '{OVER} {method}' fits several, name more of: {names}")
        value, low, high = mat_ratio(pool.cells.of(query.category), base[0].cells.of(query.category))
        if math.isnan(value):
            raise NotMeasured(f"{self.folder}: {pool.name} and {base[0].name} share no answer in {query.category}")
        return Cell(f"{value:.2f}", _interval(low, high) if query.interval else "")


def _interval(low: float, high: float) -> str:
    return interval_text(low, high) if low < high else ""


def joined(name: str) -> str:
    """Return a configuration's name as one word."""
    return name.replace(" ", "_")


def _spaced(words: str) -> str:
    return f" {' '.join(words.split())} "


def _settings(pool: Pool) -> dict[str, Any]:
    versions = {name: pool.first.metadata["versions"].get(name) for name in ("torch", "transformers")}
    named = {"method": pool.method, "name": joined(pool.name), "nodes": pool.budget}
    usual = {"order": "file"}  # which facets leave out
    return usual | versions | pool.group | pool.first.facets | named


def _text(value: Any) -> str:
    """Return a setting as words name it: true, null, 0.7."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
