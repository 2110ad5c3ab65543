"""One style for all figures: a column's width (3.3 in), colour-blind safe, as PDF, SVG and PNG; a grid of numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from model.files import replaced

WIDTH = 3.3  # in, a column of a two-column paper
KINDS = ("png", "svg", "pdf")
# A method has one colour, line style and marker in all figures, by its place here; others follow.
ORDER = (
    *("hf", "vanilla", "recycling", "dynamic", "spine", "pld", "suffix_recycling", "eagle2", "medusa", "logitspec"),
    *("suffix_decoding", "goose", "sps", "suffix", "racer", "eagle", "lookahead", "ngram_cache", "rest"),
)
# Okabe and Ito's colours, grey and black for the baselines first; each with a marker, so that colour is never alone.
PALETTE = ("#777777", "#000000", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#D55E00", "#CC79A7")
MARKERS = "osD^vPX*<>"
STROKES = ("-", "--", ":")  # one for each time that the colours are used
FILLS = {"cold": "none", "category": "left", "saved": "bottom"}  # of markers, by start; hot ones are full
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 7.5),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 7),
    "legend.fontsize": 6.5,
    "text.parse_math": False,  # names may hold a $
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.axisbelow", "axes.grid"), True),
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.0,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # text stays text
    "svg.hashsalt": "figures",  # the same records give the same file
}
DARK: dict[Any, Any] = {  # of a page whose scheme is dark, above STYLE
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#d0d7de"),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "#15181c"),
    "grid.color": "#353b42",
}
NAMES = {"mt_bench": "MT-bench", "qa": "QA", "rag": "RAG", "math_reasoning": "math"}  # as axes print categories
INTERVAL = "95 % interval"


@contextmanager
def styled(*, dark: bool = False) -> Iterator[None]:
    """Draw in this style, whatever the caller's is."""
    with rc_context(STYLE | (DARK if dark else {})):
        yield


def panels(rows: int = 1, height: float = 2.3, **options: Any) -> tuple[Figure, list[Axes]]:
    """Make a figure of a column's width with panels below one another; height in inches, of all."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")  # not pyplot's: no window, and none is kept
    return figure, list(figure.subplots(rows, 1, squeeze=False, **options)[:, 0])


def printed(category: object) -> str:
    """Return a category as axes print it."""
    return NAMES.get(str(category), str(category).replace("_", " "))


def colour(i: int) -> str:
    return PALETTE[i % len(PALETTE)]


def mark(look: tuple[int, int], start: object = None) -> dict[str, Any]:
    """Return a line's options: colour and stroke of the method, marker of its variant, filled by its start."""
    method, variant = look
    cycle, hue = divmod(method - 2, len(PALETTE) - 2)  # the baselines' two are theirs alone
    ink = {"color": PALETTE[method if cycle < 0 else 2 + hue], "linestyle": STROKES[cycle % len(STROKES)]}
    marker = MARKERS[(method + variant) % len(MARKERS)]
    return ink | {"marker": marker, "fillstyle": FILLS.get(str(start), "full"), "markerfacecoloralt": "white"}


def band(axes: Axes, at: Sequence[float], ends: Iterable[tuple[float, float]], ink: str) -> None:
    """Shade intervals, if there is one that has a width."""
    low, high = np.array([*ends], dtype=float).T
    if (high > low).any():
        axes.fill_between(at, low, high, color=ink, alpha=0.15, linewidth=0, label=f"_{INTERVAL}")


def finish(figure: Figure, axes: Axes, note: str, *, x: str = "", y: str = "") -> Figure:
    """Label the axes, put their names above the panels and below them what was measured; returns the figure.

    The figure grows by the lines of the legend, so that the panels keep theirs.
    """
    axes.set(**{key: label for key, label in (("xlabel", x), ("ylabel", y)) if label})
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if unique:
        fit = max(1, min(len(unique), 62 // (max(map(len, unique)) + 7)))
        figure.legend(unique.values(), unique.keys(), loc="outside upper center", ncols=fit)
        figure.set_figheight(figure.get_figheight() + 0.135 * -(-len(unique) // fit))
    if any(c.get_label() == f"_{INTERVAL}" for panel in figure.axes for c in panel.collections):
        note = f"shaded: {INTERVAL}; {note}"
    figure.supxlabel(note, fontsize=6, color="#777777", x=0.99, ha="right", wrap=True)
    return figure


def sideways(axes: Axes) -> None:
    """Draw the grid for values that run along x."""
    axes.grid(axis="x")
    axes.grid(axis="y", visible=False)


def save(figure: Figure, path: Path) -> Path:
    """Write the figure in every kind; returns the PNG."""
    for kind in KINDS:
        # no date in the file: the same records give the same bytes
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        with replaced(Path(f"{path}.{kind}")) as partial:
            figure.savefig(partial, format=kind, metadata=metadata)
    return Path(f"{path}.png")


def save_png(figure: Figure, path: Path, **metadata: str) -> None:
    """Write the figure as PNG alone, with these words in its metadata, and without a version of the software."""
    with styled(), replaced(path) as partial:
        figure.savefig(partial, format="png", metadata={"Software": None, **metadata})


def contents(figure: Figure) -> str:
    """Return a digest of what a figure shows: data, names, labels and how lines look, whatever the fonts."""
    shown: list[object] = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        shown += [axes.get_xlabel(), axes.get_ylabel(), axes.get_title(), [text.get_text() for text in axes.texts]]
        shown += [(line.get_label(), line.get_xydata()) for line in axes.lines]
        shown += [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines]
        shown += [patch.get_path().transformed(patch.get_patch_transform()).vertices for patch in axes.patches]
        shown += [path.vertices for shape in axes.collections for path in shape.get_paths()]
        shown += [np.ma.filled(np.ma.asarray(image.get_array()), np.nan) for image in axes.images]
        named = [axis for axis in (axes.xaxis, axes.yaxis) if isinstance(axis.get_major_locator(), FixedLocator)]
        shown += [[label.get_text() for label in axis.get_ticklabels()] for axis in named]
    rounded = json.dumps(shown, default=lambda array: [f"{value:.5g}" for value in np.ravel(array).tolist()])
    return hashlib.sha256(rounded.encode()).hexdigest()


def grid(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    label: str,
    note: str,
    *,
    middle: float | None = None,
    words: Mapping[tuple[int, int], str] | None = None,
    **axis_labels: str,
) -> Figure:
    """Draw the number of each row and column on its colour; NaN stays empty.

    Marks for many methods would cover one another; numbers on colours stay readable.

    Args:
        middle: where the colours turn (no gain), darker purple above it and darker orange below; None: the lowest is
            the palest.
        words: below the number of a cell, by row and column.
    """
    cells, words = np.array(values, dtype=float), words or {}  # (rows, columns)
    figure, (axes,) = panels(height=0.75 + (0.3 if words else 0.155) * len(rows))
    figure.set_figwidth(WIDTH + 0.06 * max(0, *(len(name) - 16 for name in rows)))  # the cells keep theirs
    finite = cells[np.isfinite(cells)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if middle is None:
        norm = Normalize(low, max(high, low + 1e-9))
        shade = np.ma.filled(norm(cells), 0.0)
    else:
        norm = TwoSlopeNorm(middle, min(low, middle - 0.1), max(high, middle + 0.1))
        shade = np.abs(np.ma.filled(norm(cells), 0.5) - 0.5) * 2
    image = axes.imshow(cells, cmap="Blues" if middle is None else "PuOr", norm=norm, aspect="auto")
    ticks = None if middle is None else [norm.vmin, middle, norm.vmax]  # by itself the lower slope has none
    figure.colorbar(image, fraction=0.04, pad=0.02, ticks=ticks, format="%.2g").ax.tick_params(labelsize=5, length=2)
    for at, value in np.ndenumerate(cells):
        if np.isfinite(value):
            ink = "w" if shade[at] > 0.62 else "k"
            text = "\n".join(filter(None, (f"{value:.2f}", words.get(at))))
            axes.text(at[1], at[0], text, ha="center", va="center", fontsize=5, color=ink)
    slanted: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(columns)), columns, fontsize=6, **(slanted if max(map(len, columns)) > 3 else {}))
    axes.set_yticks(range(len(rows)), rows, fontsize=6)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(label, fontsize=7)
    return finish(figure, axes, note, **axis_labels)
