"""What a figure is drawn from: the pooled runs of one model and bench, and their rows of the main table."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from ..statistics.metrics import OVERALL
from ..statistics.pools import BASELINES, Pool
from .style import ORDER

MOST = 8  # names that a figure can distinguish
TREE = ("tree", "tree_nodes", "tree_depth", "tree_breadth")


@dataclass(frozen=True)
class FigureData:
    """Runs that may be compared, repeats pooled.

    Attributes:
        pools: one a configuration, in the tables' order.
        table: their rows of the main table, all categories.
        measured: what ran on what.
    """

    pools: list[Pool]
    table: pd.DataFrame
    measured: str

    @cached_property
    def overall(self) -> list[dict[str, Any]]:
        """Return the row of all categories together, one a pool, with `pool`, `name`, `budget`, `state_mib`."""
        rows: list[dict[str, Any]] = self.table[self.table["category"] == OVERALL].to_dict("records")  # type: ignore[assignment]
        pairs = zip(rows, self.pools, strict=True)
        return [
            r | {"pool": p, "name": p.name, "budget": p.budget, "state_mib": r["state_bytes"] / 2**20} for r, p in pairs
        ]

    @property
    def drafting(self) -> list[dict[str, Any]]:
        return [row for row in self.overall if row["method"] not in BASELINES]

    def shown(self, most: int | None = None) -> list[dict[str, Any]]:
        """Return all rows, or if there are too many to distinguish, of each label the one with the largest MAT.

        These are of the lowest temperature alone: texts of two temperatures are not to be compared. With `most` only
        so many drafting ones of the largest MAT. `look` is what a row's line looks like, the same in all figures.
        """
        rows = self.overall
        if len(rows) > MOST:
            lowest = min(row["temperature"] for row in rows)
            rows = [row for row in rows if row["temperature"] == lowest]
            best = {row["method"]: row for row in sorted(rows, key=lambda row: float(row["mat"]))}
            rows = [row for row in rows if best[row["method"]] is row]
        looks = self.looks({row["name"]: [row] for row in rows})
        rows = [row | {"look": looks[row["name"]]} for row in rows]
        if most is None:
            return rows
        drafting = {row["name"]: [row] for row in rows if row["method"] not in BASELINES}
        return [row for (row,) in largest(drafting, most).values()]

    def looks(self, lines: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, tuple[int, int]]:
        """Return of each line the numbers of its method and of its variant among them; starts of one share both."""
        numbers = list(dict.fromkeys([*ORDER, *(pool.method for pool in self.pools)]))
        methods = {name: rows[0]["pool"].method for name, rows in lines.items()}
        variants = {of: list(dict.fromkeys(without_start(n) for n in lines if methods[n] == of)) for of in numbers}
        return {n: (numbers.index(of), variants[of].index(without_start(n))) for n, of in methods.items()}

    def note(self, drawn: Collection[Any]) -> str:
        """Say what ran on what, and how many configurations are left out where only these are drawn."""
        return self.measured + counted(len(drawn), len(self.overall))

    def lines(self, setting: str, follow: Sequence[str] = ()) -> dict[str, list[dict[str, Any]]]:
        """Group drafting runs that differ in one setting only, by their other settings; at least three points per line.

        Runs that share a value of the setting give no line, as trees of one size and several depths.

        Args:
            setting: a column with numbers.
            follow: settings that change with it.
        """
        moving = {setting, *follow}
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in self.drafting:
            if row.get(setting) is not None and row[setting] == row[setting]:
                groups.setdefault(f"{row['method']}|{_fixed(row, moving)}", []).append(row)
        chosen = [sorted(rows, key=lambda row: float(row[setting])) for rows in groups.values()]
        chosen = [rows for rows in chosen if len({row[setting] for row in rows}) == len(rows) > 2]
        return name_lines(chosen, moving)


def _fixed(row: dict[str, Any], moving: Collection[str]) -> str:
    """Return the settings of a row's runs but for the moving ones, as a key."""
    return str(sorted((key, str(value)) for key, value in row["pool"].identity.facets.items() if key not in moving))


def speed_of(rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the column of their speed, and its label: over vanilla, else over hf, else in tokens a second."""
    for name in reversed(BASELINES):
        if any(row[f"speedup_{name}"] == row[f"speedup_{name}"] for row in rows):
            return f"speedup_{name}", f"speedup over {name}"
    return "tokens_per_second", "tokens/s"


def without_start(name: str) -> str:
    return re.sub(r" \((cold|hot|category|saved)\)", "", name, count=1)


def counted(drawn: int, of: int) -> str:
    """Say how many configurations a figure draws, if not all."""
    return f"; {drawn} of {of} configurations are drawn" if drawn < of else ""


def largest(lines: Mapping[str, Any], most: int = MOST) -> dict[str, Any]:
    """Return so many of these lines, those of the largest MAT, in their order."""
    mats = {name: max(float(np.nan_to_num(row["mat"])) for row in rows) for name, rows in lines.items()}
    best = sorted(mats, key=lambda name: -mats[name])[:most]
    return {name: rows for name, rows in lines.items() if name in best}


def name_lines(groups: Sequence[list[dict[str, Any]]], moving: set[str]) -> dict[str, list[dict[str, Any]]]:
    """Name each line by its method, and by the settings that tell it from other lines of that method."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for rows in groups:
        label = rows[0]["method"]
        twins = [other for other in groups if other[0]["method"] == label]
        facets = [other[0]["pool"].identity.facets for other in twins]
        settings = rows[0]["pool"].identity.facets
        varied = [k for k in settings if k not in moving and len({str(f.get(k)) for f in facets}) > 1]
        words = [f"{k.removeprefix('method_')}={settings[k]}" for k in varied]
        lines[", ".join([label, *words])] = rows
    return lines
