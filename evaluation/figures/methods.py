"""Methods next to one another: by subtask, by accepted length, by depth of the tree, over the questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..records.rows import accept_lengths
from ..statistics.acceptance import by_depth
from ..statistics.metrics import OVERALL
from .figure_data import MOST, FigureData
from .style import INTERVAL, finish, grid, mark, panels, printed, sideways

FAR = 16  # accepted lengths from here on share the last point of a line
DEEPEST = 12  # depths beyond this are left out


def mat(data: FigureData) -> Figure | None:
    """Tokens per step (MAT) by subtask and method."""
    return _by_category(data, "mat", "MAT (tokens per step)")


def speedup_over_hf(data: FigureData) -> Figure | None:
    """Speedup over transformers' own generate, by subtask and method."""
    return _by_category(data, "speedup_hf", "speedup over hf")


def speedup_over_vanilla(data: FigureData) -> Figure | None:
    """Speedup over this engine without drafts, by subtask and method."""
    return _by_category(data, "speedup_vanilla", "speedup over vanilla")


def _by_category(data: FigureData, column: str, label: str) -> Figure | None:
    """Draw one line a subtask, one mark a method, so that many methods fit a column; bars are 95 % intervals."""
    rows = [row for row in data.shown() if row[column] == row[column]]
    if not rows:
        return None
    categories = list(dict.fromkeys(data.table["category"]))
    if len(rows) > MOST:
        cells = [_by_its_category(data, row, categories)[column].tolist() for row in rows]
        middle = 1.0 if column.startswith("speedup") else None
        names, columns = [row["name"] for row in rows], list(map(printed, categories))
        return grid(names, columns, cells, label, data.note(rows), middle=middle)
    figure, (axes,) = panels(height=0.8 + 0.27 * len(categories))
    drawn = False  # an interval that has a width
    for i, row in enumerate(rows):
        at = [len(categories) - 1 - y + 0.5 * ((len(rows) - 1) / 2 - i) / len(rows) for y in range(len(categories))]
        values, look = _by_its_category(data, row, categories), mark(row["look"], row["start"])
        ends = values[f"{column}_low"], values[f"{column}_high"]
        axes.hlines(at, *ends, color=look["color"], linewidth=0.8, alpha=0.8)
        drawn |= bool((ends[0] < ends[1]).any())
        axes.plot(values[column], at, **look | {"linestyle": "none", "label": row["name"]})
    axes.axvline(1.0, color="#444444", linewidth=0.7)
    axes.set_yticks(range(len(categories)), [printed(c) for c in reversed(categories)])
    sideways(axes)
    if OVERALL in categories:
        axes.axhline(0.5, color="#bbbbbb", linewidth=0.7, linestyle=":")
    return finish(figure, axes, f"lines: {INTERVAL}; " * drawn + data.note(rows), x=label)


def _by_its_category(data: FigureData, row: dict[str, Any], categories: Sequence[str]) -> pd.DataFrame:
    """Return a configuration's rows of the table, one a category."""
    rows = data.table[(data.table["method"] == row["method"]) & (data.table["variant"] == row["variant"])]
    by_category: pd.DataFrame = rows.set_index("category").reindex(categories)
    return by_category


def accepted_lengths(data: FigureData) -> Figure | None:
    """Share of steps by the number of tokens that they added."""
    rows = data.shown(MOST)
    if not rows:
        return None
    figure, (axes,) = panels(height=1.9)
    longest = 1
    for row in rows:
        lengths = pd.Series([n for answer in row["pool"].rows for n in accept_lengths(answer)], dtype=int)
        longest = max(longest, lengths.max() if len(lengths) else 1)
        share = lengths.clip(upper=FAR).value_counts(normalize=True).sort_index() * 100
        full = share.reindex(range(1, int(share.index.max()) + 1) if len(share) else [], fill_value=0.0)
        axes.plot(full.index, full.to_numpy(), label=row["name"], **mark(row["look"], row["start"]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if longest > FAR:
        axes.set_xticks([1, 4, 8, 12, FAR], ["1", "4", "8", "12", f"{FAR}+"])
    axes.set_xlim(0.5, min(longest, FAR) + 0.5)
    axes.set_ylim(bottom=0)
    return finish(figure, axes, data.note(rows), x="accepted length (tokens per step)", y="% of steps")


def acceptance_by_depth(data: FigureData) -> Figure | None:
    """Acceptance by depth in the draft: the share of drafting steps whose accepted path reaches a depth (joint) and,
    where drawn, of those that reached the depth above it (conditional)."""
    rows = [(row, by_depth(row["pool"].accepted)) for row in data.shown(MOST)]
    rows = [(row, depths) for row, depths in rows if depths]
    if not rows:
        return None
    figure, (joint, conditional) = panels(2, height=3.1, sharex=True)
    for row, depths in rows:
        options = mark(row["look"], row["start"]) | {"label": row["name"]}
        near = depths[:DEEPEST]
        joint.plot([d.depth for d in near], [100 * d.joint for d in near], **options)
        conditional.plot([d.depth for d in near], [100 * d.conditional for d in near], **options)
    joint.set_ylabel("joint (% of\ndrafting steps)")
    conditional.set_ylabel("conditional (% of\nthe depth above)")
    deepest = max(len(depths) for _, depths in rows)
    conditional.set_xlabel("depth in the draft tree" + (f" (deepest: {deepest})" if deepest > DEEPEST else ""))
    conditional.set_xticks(range(1, min(deepest, DEEPEST) + 1))
    for axes in (joint, conditional):
        axes.set_ylim(bottom=0)
    return finish(figure, joint, data.note([row for row, _ in rows]))


def mat_over_questions(data: FigureData) -> Figure | None:
    """MAT over the questions in the order asked, as a moving mean."""
    rows = [row for row in data.shown(MOST) if row.get("start") is not None and row["start"] == row["start"]]
    if not rows:
        return None
    figure, (axes,) = panels(height=1.9)
    window = 1
    for row in rows:
        answers = row["pool"].first_answers
        window = max(1, len(answers) // 8)
        lengths = [accept_lengths(answer) for answer in answers]
        tokens, steps = (pd.Series(list(map(of, lengths))).rolling(window, min_periods=1).sum() for of in (sum, len))
        smooth = tokens / steps
        options = mark(row["look"], row["start"]) | {"label": row["name"], "markevery": max(1, len(answers) // 8)}
        axes.plot(range(1, len(smooth) + 1), smooth, **options)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(left=1)
    label = "question, in the order asked" + (f" (mean of the last {window})" if window > 1 else "")
    return finish(figure, axes, data.note(rows), x=label, y="MAT (tokens per step)")
