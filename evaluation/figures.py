"""Figures, each as PNG and SVG, one style for all: colour-blind safe (Okabe-Ito), readable at column width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, on any machine

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import machine_tree
from .metrics import OVERALL, accept_lengths
from .tables import BASELINES, Run, heading

PALETTE = ("#999999", "#000000", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#D55E00", "#CC79A7")
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.hashsalt": "figures",  # the same records give the same file
}
NAMES = {"mt_bench": "MT-bench", "qa": "QA", "rag": "RAG", "math_reasoning": "math"}  # as axes print categories


def draw_all(runs: list[Run], table: pd.DataFrame, folder: Path) -> list[Path]:
    """Draw what the runs have to show below `folder`; returns the PNG files.

    Figures of an earlier, other set of runs are removed first, so that the folder shows these runs only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.png"), *folder.glob("*.svg")]:
        old.unlink()
    made: list[Path] = []
    groups = table.groupby(["model", "bench"], sort=False)
    for (model, bench), block in groups:
        own = [r for r in runs if r.settings["model"]["name"] == model and r.settings["bench"]["name"] == bench]
        suffix = "" if len(groups) == 1 else "-" + f"{model}-{bench}".replace("/", "_")
        note = heading(own)[0].split(";")[0] + f"; {bench}"
        with plt.rc_context(STYLE):
            for baseline in BASELINES:
                if block[f"speedup_{baseline}"].notna().any():
                    figure = by_category(block, f"speedup_{baseline}", f"speedup over {baseline}", note, one=True)
                    made.append(_save(figure, folder / f"speedup_over_{baseline}{suffix}"))
            made.append(
                _save(by_category(block, "mat", "MAT (tokens a step)", note, one=True), folder / f"mat{suffix}")
            )
            made.append(_save(accepted_lengths(own, note), folder / f"accepted_lengths{suffix}"))
            for i, run in enumerate(r for r in own if machine_tree.chosen(r)):
                figure = machine_tree.draw(run, own, note)
                made.append(_save(figure, folder / f"machine_tree{suffix}{f'-{i}' if i else ''}"))
            if any(r.settings["method"].get("start") for r in own):
                made.append(_save(mat_over_questions(own, note), folder / f"mat_over_questions{suffix}"))
    return made


def by_category(block: pd.DataFrame, column: str, label: str, note: str, *, one: bool) -> Figure:
    """Bars by category and method; `one` draws the line of no gain."""
    wide = block.pivot_table(index="category", columns="method", values=column, sort=False)
    figure, axes = plt.subplots(figsize=(7.0, 2.8), layout="constrained")
    width = 0.84 / len(wide.columns)
    for i, method in enumerate(wide.columns):
        at = [x + (i - (len(wide.columns) - 1) / 2) * width for x in range(len(wide))]
        axes.bar(at, wide[method], width * 0.92, label=method, color=_colour(i))
    axes.set_xticks(range(len(wide)), [NAMES.get(str(c), str(c)) for c in wide.index])
    axes.tick_params(axis="x", length=0)
    if OVERALL in wide.index:
        axes.axvline(len(wide) - 1.5, color="#bbbbbb", linewidth=0.8, linestyle=":")
    if one:
        axes.axhline(1.0, color="#444444", linewidth=0.8)
    axes.set_ylabel(label)
    _finish(figure, axes, note)
    return figure


def accepted_lengths(runs: list[Run], note: str) -> Figure:
    """How many tokens a step adds: share of steps by accepted length, one line a method."""
    figure, axes = plt.subplots(figsize=(7.0, 2.6), layout="constrained")
    drafting = [r for r in runs if r.settings["method"]["name"] not in BASELINES] or runs
    width = 0.84 / len(drafting)
    longest = 1
    for i, run in enumerate(drafting):
        lengths = pd.Series([n for row in run.answers for n in accept_lengths(row)], dtype=int)
        share = lengths.value_counts(normalize=True).sort_index() * 100
        longest = max([longest, *lengths])
        at = [x + (i - (len(drafting) - 1) / 2) * width for x in share.index]
        axes.bar(at, share.to_numpy(), width * 0.92, label=_label(run, runs), color=_colour(runs.index(run)))
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlabel("accepted length (tokens a step, the model's own included)")
    axes.set_ylabel("% of steps")
    _finish(figure, axes, note)
    return figure


def mat_over_questions(runs: list[Run], note: str) -> Figure:
    """What a carried state is worth: MAT over the questions answered so far, mean of a sliding window."""
    figure, axes = plt.subplots(figsize=(7.0, 2.6), layout="constrained")
    window = 1
    for run in (r for r in runs if r.settings["method"].get("start")):
        steps = pd.Series([len(accept_lengths(row)) for row in run.answers])
        tokens = pd.Series([sum(accept_lengths(row)) for row in run.answers])
        window = max(1, len(run.answers) // 8)
        smooth = tokens.rolling(window, min_periods=1).sum() / steps.rolling(window, min_periods=1).sum()
        axes.plot(
            range(1, len(smooth) + 1), smooth, label=_label(run, runs), color=_colour(runs.index(run)), linewidth=1.4
        )
    axes.set_xlabel(f"question, in the bench's order (each point: the last {window})")
    axes.set_ylabel("MAT (tokens a step)")
    axes.set_xlim(left=1)
    _finish(figure, axes, note)
    return figure


def _label(run: Run, runs: list[Run]) -> str:
    """The method's label; with its tree and k where the label alone is not unique."""
    if sum(r.label == run.label for r in runs) == 1:
        return run.label
    method = run.settings["method"]
    return f"{run.label}, {method.get('tree')} {method.get('tree_nodes')}, k={method.get('k')}"


def _colour(i: int) -> str:
    return PALETTE[i % len(PALETTE)]


def _finish(figure: Figure, axes: Axes, note: str) -> None:
    """Legend above the plot, and what was measured on what below it."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 5), fontsize=7.5)
    figure.supxlabel(note, fontsize=6, color="#666666", x=0.99, ha="right")


def _save(figure: Figure, path: Path) -> Path:
    for kind in ("png", "svg"):
        figure.savefig(path.with_suffix(f".{kind}"), metadata={"Date": None} if kind == "svg" else None)
    plt.close(figure)
    return path.with_suffix(".png")
