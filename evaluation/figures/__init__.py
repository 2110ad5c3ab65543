"""Draw figures from records only.

A figure is one function, which gets the runs of a model and bench (`FigureData`) and returns None
if these lack its data: add it to FIGURES. Its name is the file's name, its docstring the sentence
that the report page prints below it.

Others use `draw_all`, and `style` to draw by hand. This folder may import `records` and
`statistics`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

# A notebook's kernel exports a backend that this environment may lack; no figure needs one.
if "matplotlib" not in sys.modules:
    os.environ.pop("MPLBACKEND", None)
from matplotlib.figure import Figure

from ..statistics.metrics import grouped
from ..tables.experiment import Experiment
from ..tables.notes import heading
from ..tables.tables import blocks
from .comparisons import (
    acceptance_by_depth,
    mat,
    speedup_over_hf,
    speedup_over_vanilla,
)
from .curves import batch, budget, novelty, temperature, topk, tree_size
from .figure_data import FigureData
from .style import KINDS, drawable, save, styled

FIGURES: tuple[Callable[[FigureData], Figure | None], ...] = (
    speedup_over_hf,
    speedup_over_vanilla,
    mat,
    acceptance_by_depth,
    tree_size,
    topk,
    temperature,
    novelty,
    budget,
    batch,
)


def draw_all(experiment: Experiment, folder: Path) -> list[Path]:
    """Draw all figures of an experiment below `folder`; return the PNG files.

    Earlier figures are removed first, so that the folder shows only these runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        for old in folder.glob(f"*.{kind}"):
            old.unlink()

    made = list[Path]()
    datasets = split(experiment)
    with styled():
        for name, data in datasets.items():
            end = ""
            if len(datasets) > 1:
                end = "-" + re.sub(r"[^\w.]", "-", name)
            for draw in FIGURES:
                if (figure := draw(data)) is not None:
                    made.append(save(figure, folder / f"{draw.__name__}{end}"))
    return made


def split(experiment: Experiment) -> dict[str, FigureData]:
    """Group comparable configurations.

    Each group has its rows of the table, and model, device and bench in words.
    """
    rows = blocks(experiment.table)
    datasets = {}
    for name, drawn in grouped(experiment.pools, lambda pool: pool.block_name).items():
        what = heading([pool.first for pool in drawn])[0].split(";")[0]
        measured = drawable(f"{what}; {drawn[0].block['bench']}")
        datasets[name] = FigureData(drawn, rows[name], measured)
    return datasets
