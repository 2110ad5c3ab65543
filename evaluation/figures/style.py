"""One look for all figures, as PDF, SVG and PNG."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from model.errors import one_line
from model.files import replaced

PAPER = Path(__file__).with_name("paper.mplstyle")
WIDTH = 3.03  # in, 219 pt: a column of a two-column paper
KINDS = ("png", "svg", "pdf")
# A method's colour in all figures; its line style and marker follow from its position here. First
# grey and black for the baselines, then Okabe and Ito's colours, then darker and lighter ones with
# the largest least distance in CIELAB, also as colour-blind eyes see them.
COLORS = {
    "hf": "#777777",
    "vanilla": "#000000",
    "recycling": "#E69F00",
    "dynamic": "#56B4E9",
    "pld": "#0072B2",
    "suffix_recycling": "#009E73",
    "eagle2": "#D55E00",
    "medusa": "#CC79A7",
    "logitspec": "#602A00",
    "suffix_decoding": "#1E3F52",
    "goose": "#E49659",
    "sps": "#004F3A",
    "suffix": "#954200",
    "racer": "#99C7E0",
    "eagle": "#00507D",
    "lookahead": "#7FCEB9",
    "ngram_cache": "#346C8C",
    "rest": "#EAAE7F",
    "eagle3": "#338EC1",
    "hydra": "#006F50",
    "samd": "#9C942B",
    "server": "#40B696",
    "hf_lookup": "#B0B0B0",
    "hf_assisted": "#7A3E78",
}
MARKERS = "osD^vPX*<>"
# of the first eight methods, then of seven each, then of all others
STROKES = ("-", "--", ":", "-.")
# of markers, by start; hot ones are full
FILLS = {"cold": "none", "category": "left", "saved": "bottom"}
GLYPHS = get_font(findfont("DejaVu Sans")).get_charmap()  # of matplotlib's own font
INTERVAL = "95 % interval"


def styled() -> AbstractContextManager[None]:
    return rc_context(fname=PAPER)


def drawable(name: str) -> str:
    """Return a name on one line, characters without a glyph as \\u65e5."""
    line = one_line(name)
    if line.startswith("_"):
        line = f" {line}"  # a legend leaves out labels that begin with an underscore
    drawn = ""
    for character in line:
        has_glyph = ord(character) in GLYPHS
        drawn += character if has_glyph else json.dumps(character)[1:-1]
    return drawn


def panels(x: str, *y: str, height: float) -> tuple[Figure, list[Axes]]:
    """Make a figure of a column's width, with a panel for each y label, one below the other.

    Without a label, the y axis has names and grid lines belong to x.
    """
    # not pyplot's, which keeps figures and windows open
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    table = figure.subplots(len(y), 1, squeeze=False, sharex=True)
    drawn: list[Axes] = list(table[:, 0])
    for axes, label in zip(drawn, y, strict=True):
        axes.set_ylabel(label)
        axes.xaxis.grid(not label)
        axes.yaxis.grid(bool(label))
    drawn[-1].set_xlabel(x)
    return figure, drawn


def look(method: int, variant: int, start: object) -> dict[str, Any]:
    """Return a line's options: colour and stroke by method, marker by variant, fill by start."""
    colors = [*COLORS.values()]
    shared = 2 + (method - 2) % (len(colors) - 2)  # no other method has a baseline's
    return {
        "color": colors[method if method < len(colors) else shared],
        "linestyle": STROKES[min(max(method - 1, 0) // 7, 3)],
        "marker": MARKERS[(method + variant) % len(MARKERS)],
        "fillstyle": FILLS.get(str(start), "full"),
        "markerfacecoloralt": "white",
    }


def finish(figure: Figure, note: str) -> Figure:
    """Put a legend above the panels, which keep their height, and the note below them."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if unique:
        longest = max(map(len, unique))
        columns = max(1, min(len(unique), 57 // (longest + 7)))
        lines = -(-len(unique) // columns)
        figure.legend(
            unique.values(),
            unique.keys(),
            loc="outside upper center",
            ncols=columns,
        )
        figure.set_figheight(figure.get_figheight() + 0.135 * lines)

    # matplotlib wraps by reading $ as mathematics in any case, but \$ as $
    escaped = note.replace("$", r"\$")
    figure.supxlabel(
        escaped,
        parse_math=True,
        fontsize=6.5,
        color="#777777",
        x=0.99,
        ha="right",
        wrap=True,
    )
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write the figure in every file format; return the PNG's path."""
    for kind in KINDS:
        # no date in the file: the same records give the same bytes
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        with replaced(Path(f"{path}.{kind}")) as partial:
            figure.savefig(partial, format=kind, metadata=metadata)
        figure.set_layout_engine("none")
    return Path(f"{path}.png")
