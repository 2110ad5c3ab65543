"""Draw figures from records only.

A figure is one function of FIGURES. It gets the runs of a model and bench (`FigureData`), and
returns None if these lack its data. Its docstring is the caption on the page.
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
    """Draw all figures below `folder` in place of earlier ones; return the PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        for old in folder.glob(f"*.{kind}"):
            old.unlink()

    paths = list[Path]()
    datasets = split(experiment)
    with styled():
        for name, data in datasets.items():
            end = ""
            if len(datasets) > 1:
                end = "-" + re.sub(r"[^\w.]", "-", name)
            for draw in FIGURES:
                if (figure := draw(data)) is not None:
                    paths.append(save(figure, folder / f"{draw.__name__}{end}"))
    return paths


def split(experiment: Experiment) -> dict[str, FigureData]:
    """Return comparable configurations, by the names of their blocks."""
    rows = blocks(experiment.table)
    datasets = {}
    for name, drawn in grouped(experiment.pools, lambda pool: pool.block_name).items():
        what = heading([pool.first for pool in drawn])[0].split(";")[0]
        measured = drawable(f"{what}; {drawn[0].block['bench']}")
        datasets[name] = FigureData(drawn, rows[name], measured)
    return datasets
