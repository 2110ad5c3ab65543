"""What a figure is drawn from: the pooled runs of one model and bench, and their rows of the main table."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from ..statistics.metrics import OVERALL
from ..statistics.pools import Pool
from ..statistics.tables import BASELINES

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

    def shown(self) -> list[dict[str, Any]]:
        """Return all rows, or if there are too many to distinguish, of each label the one with the largest MAT.

        These are of the lowest temperature alone: texts of two temperatures are not to be compared.

        `style` numbers the row's colour and marker, the same in all figures: baselines first, then drafting methods.
        """
        rows, whole = self.overall, len(self.overall) <= MOST
        if not whole:
            lowest = min(row["temperature"] for row in rows)
            rows = [row for row in rows if row["temperature"] == lowest]
            best = {row["method"]: row for row in sorted(rows, key=lambda row: float(row["mat"]))}
            rows = [row for row in rows if best[row["method"]] is row]
        # starts of one method share a number; of all rows, variants have numbers of their own
        keys = [without_start(row["name"] if whole else row["method"]) for row in rows]
        first = {row["method"]: key for row, key in reversed(list(zip(rows, keys, strict=True)))}
        styles = {first[label]: i for i, label in enumerate(BASELINES) if label in first}  # its later runs are others
        others = [key for key in dict.fromkeys(keys) if key not in styles]
        styles |= {key: len(BASELINES) + i for i, key in enumerate(others)}
        return [row | {"style": styles[key]} for row, key in zip(rows, keys, strict=True)]

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
    return str(sorted((key, str(value)) for key, value in row["pool"].first.facets.items() if key not in moving))


def speed_of(rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the column of their speed, and its label: over vanilla, else over hf, else in tokens a second."""
    for name in reversed(BASELINES):
        if any(row[f"speedup_{name}"] == row[f"speedup_{name}"] for row in rows):
            return f"speedup_{name}", f"speedup over {name}"
    return "tokens_per_second", "tokens/s"


def without_start(name: str) -> str:
    return re.sub(r" \((cold|hot|category|saved)\)", "", name, count=1)


def numbered(lines: Iterable[str]) -> list[int]:
    """Return the number of each line's colour and marker, by names of `lines`: starts of one method share one."""
    methods = list(map(without_start, lines))
    return [len(BASELINES) + list(dict.fromkeys(methods)).index(method) for method in methods]


def name_lines(groups: Sequence[list[dict[str, Any]]], moving: set[str]) -> dict[str, list[dict[str, Any]]]:
    """Name each line by its method, and by the settings that tell it from other lines of that method."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for rows in groups:
        label = rows[0]["method"]
        twins = [other for other in groups if other[0]["method"] == label]
        facets = [other[0]["pool"].first.facets for other in twins]
        settings = rows[0]["pool"].first.facets
        varied = [k for k in settings if k not in moving and len({str(f.get(k)) for f in facets}) > 1]
        words = [f"{k.removeprefix('method_')}={settings[k]}" for k in varied]
        lines[", ".join([label, *words])] = rows
    return lines
