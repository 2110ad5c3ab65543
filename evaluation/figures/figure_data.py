"""Data of a figure: the pooled runs of one model and bench."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from ..statistics.metrics import OVERALL, grouped
from ..statistics.pools import BASELINES, Pool
from .style import COLORS, drawable, look

MOST = 8  # names that a figure can distinguish
SIZES = ("tree_nodes", "budget")  # settings that runs of tree=shape change together with the shape
Row = dict[str, Any]
Line = list[Row]


@dataclass(frozen=True)
class FigureData:
    """Comparable runs, repeats pooled.

    Rows that are drawn hold their line's plot options as `look`.

    Attributes:
        table: their rows of the main table, all categories.
        measured: model, device and bench in words.
    """

    pools: list[Pool]
    table: pd.DataFrame
    measured: str

    @cached_property
    def overall(self) -> list[Row]:
        """A row for each pool, with `pool`, `name`, `budget` and `state_mib`."""
        overall = self.table[self.table["category"] == OVERALL]
        rows: list[Row] = overall.to_dict("records")  # type: ignore[assignment]
        for row, pool in zip(rows, self.pools, strict=True):
            row["pool"] = pool
            row["name"] = drawable(pool.name)
            row["budget"] = pool.budget
            row["state_mib"] = row["state_bytes"] / 2**20
        return rows

    @property
    def drafting(self) -> list[Row]:
        return [row for row in self.overall if row["method"] not in BASELINES]

    def shown(self, most: int | None = None) -> list[Row]:
        """Return all rows or, if they are more than MOST, each label's with the largest MAT.

        These are of the lowest temperature and smallest batch, as others have their own baselines.
        With `most`, only the `most` drafting rows with the largest MAT are returned.
        """
        rows = self.overall
        if len(rows) > MOST:
            groups = grouped(rows, lambda row: (row["temperature"], row["batch"]))
            alike = groups[min(groups)]
            best = {}
            for row in sorted(alike, key=lambda row: float(row["mat"])):
                best[row["method"]] = row
            rows = [row for row in alike if best[row["method"]] is row]

        rows = self._one_by_one(rows)
        if most is None:
            return rows
        drafting = [[row] for row in rows if row["method"] not in BASELINES]
        return [row for (row,) in largest(drafting, most)]

    def at_equal_nodes(self) -> list[Row]:
        """Return each drafting method's row with the largest known MAT at the most frequent number
        of nodes, or with any number if it has none of these.
        """
        known = [row for row in self.drafting if pd.notna(row["mat"])]
        sizes = Counter(row["pool"].budget for row in known if row["pool"].budget)
        ((usual, _),) = sizes.most_common(1) or [(None, 0)]
        best = []
        for rows in grouped(known, lambda row: row["pool"].method).values():
            fitting = [row for row in rows if row["pool"].budget == usual] or rows
            best.append(max(fitting, key=lambda row: float(row["mat"])))
        return self._one_by_one(best)

    def _one_by_one(self, rows: Sequence[Row]) -> list[Row]:
        lines = self._with_looks({row["pool"].name: [row] for row in rows})
        return [row for (row,) in lines]

    def lines(self, setting: str, *follow: str, baselines: bool = False) -> list[Line]:
        """Group drafting runs that differ in one setting only into lines of at least three points.

        Two runs of one value, such as trees of one size and several depths, make no line. A line is
        named by its label and by the settings that distinguish it from others.

        Args:
            follow: settings that change with `setting`.
            baselines: draw lines of the baselines, too.
        """
        changing = (setting, *follow)
        # by label and the settings that do not change
        groups: dict[tuple[str, tuple[str, ...]], Line] = {}
        for row in self.overall if baselines else self.drafting:
            changes_shape = setting in SIZES and row["tree"] == "shape"
            if changes_shape or pd.isna(row.get(setting)):
                continue
            words = []
            for key, value in row["pool"].first.facets.items():
                if key not in changing:
                    words.append(f"{key.removeprefix('method_')}={value}")
            line = groups.setdefault((row["method"], tuple(words)), [])
            line.append(row)

        drawn = {}
        for group, rows in groups.items():
            values = {row[setting] for row in rows}
            if 3 <= len(values) == len(rows):
                drawn[group] = sorted(rows, key=lambda row: float(row[setting]))

        lines = {}
        for (label, fixed), rows in drawn.items():
            others = [set(other) for name, other in drawn if name == label]
            common = set.intersection(*others)
            words = [label, *(word for word in fixed if word not in common)]
            lines[", ".join(words)] = rows
        return self._with_looks(lines)

    def _with_looks(self, lines: dict[str, Line]) -> list[Line]:
        """Give each method a look, which its starts share but for the fill."""
        others = [pool.method for pool in self.pools]
        methods = list(dict.fromkeys([*COLORS, *others]))
        variants: dict[str, dict[str, int]] = {}
        drawn = []
        for name, rows in lines.items():
            method = rows[0]["pool"].method
            start = rows[0]["start"]
            variant = name.replace(f" ({start})", "", 1)
            places = variants.setdefault(method, {})
            place = places.setdefault(variant, len(places))

            options = look(methods.index(method), place, start)
            options["label"] = drawable(name)
            drawn.append([row | {"look": options} for row in rows])
        return drawn

    def note(self, drawn: Collection[dict[Any, Any]]) -> str:
        """Say what was measured, how much of it is drawn, and which methods are not."""
        words = [self.measured]
        if len(drawn) < len(self.pools):
            words.append(f"{len(drawn)} of {len(self.pools)} configurations are drawn")
        methods = {*BASELINES, *(row["pool"].method for row in drawn)}
        names = dict.fromkeys(pool.method for pool in self.pools)
        if left_out := [drawable(name) for name in names if name not in methods]:
            words.append(f"left out: {', '.join(left_out)}")
        return "; ".join(words)


def largest(lines: Sequence[Line], most: int = MOST) -> list[Line]:
    """Return the `most` lines with the largest MAT, in their original order."""
    mats = []
    for line in lines:
        of_line = [row["mat"] for row in line]
        mats.append(float(np.nan_to_num(of_line).max()))

    best = sorted(range(len(lines)), key=lambda i: -mats[i])[:most]
    return [lines[i] for i in sorted(best)]
