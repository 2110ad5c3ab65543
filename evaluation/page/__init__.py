"""Write an experiment's page: one file that needs no network and no script but its own."""

from __future__ import annotations

import base64
import hashlib
import inspect
import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from model.files import write_text

from .. import figures as drawn
from ..tables import notes
from ..tables.experiment import Experiment
from ..tables.rendering import page_view
from . import facts, tree_svg

HERE = Path(__file__).parent


def write_page(experiment: Experiment, folder: Path) -> Path:
    """Write `report.html` below an experiment's folder, with its `figures/*.svg`."""
    path = folder / "report.html"
    write_text(path, render(experiment, folder))
    return path


def render(experiment: Experiment, folder: Path) -> str:
    """Render the page as HTML. What a model or a user wrote goes through autoescaping."""
    pools = experiment.pools
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=folder.resolve().name,
            style=Markup((HERE / "page.css").read_text(encoding="utf-8")),  # our own
            script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
            experiment=experiment,
            notes=notes,
            facts=facts.facts(pools),
            table=page_view(experiment),
            figures=_figures(folder / "figures"),
            trees=list(filter(None, map(tree_svg.draw, pools))),
            bounds=tree_svg.BOUNDS,
            commands=facts.commands(pools),
            audit_command=shlex.join(["python", "-m", "evaluation.audit", str(folder)]),
            again=shlex.join(["python", "-m", "evaluation.report", str(folder)]),
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sha256"] = _sha256
    return environment


def _sha256(text: str) -> str:
    """Return a script's or style's hash as the page's security policy names it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _figures(folder: Path) -> list[dict[str, Any]]:
    figures = []
    for draw in drawn.FIGURES:
        caption = " ".join((inspect.getdoc(draw) or "").split())
        for path in sorted(folder.glob("*.svg")):
            if path.stem.split("-")[0] == draw.__name__:
                svg = base64.b64encode(path.read_bytes()).decode()
                source = f"data:image/svg+xml;base64,{svg}"
                figures.append({"name": path.stem, "source": source, "caption": caption})
    return figures
