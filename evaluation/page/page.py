"""Assemble `report.html`: one file that needs no network, and no script but its own."""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from model.files import write_text

from .. import figures as drawn
from ..statistics.audits import audits
from ..statistics.experiment import Experiment
from ..statistics.notes import doubts, execution_words, headlines, incomplete, mixed, not_compared
from ..statistics.rendering import page_view
from . import facts, reader, tree_svg
from .tokens import Decoder

HERE = Path(__file__).parent
COLUMN_WIDTH = 320  # points; figures up to this width stand two in a row


def write_page(experiment: Experiment, folder: Path) -> Path:
    """Write `report.html` below an experiment's folder, with its `figures/*.svg`."""
    path = folder / "report.html"
    write_text(path, render(experiment, folder))
    return path


def render(experiment: Experiment, folder: Path) -> str:
    """Render the page as HTML. Everything that a model or a user wrote goes through autoescaping or `script_json`."""
    ran, pooled, decoder = experiment.named, experiment.pools, Decoder()
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    names = {id(pool): name for name, pool in ran.items()}
    answers = reader.collect(ran, decoder)
    trees = [drawing for name, pool in ran.items() if (drawing := tree_svg.draw(name, pool))]
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(
        title=folder.resolve().name,
        policy=_policy(style, script),
        style=Markup(style),  # our own files: nothing to escape
        script=Markup(script),
        short=headlines(experiment.table),
        incomplete=incomplete(experiment.runs),
        mixed=mixed(experiment.runs),
        doubts=doubts(pooled),
        facts=facts.facts(ran),
        table=page_view(experiment.whole_table),
        executed=execution_words(experiment.table) + not_compared(pooled),
        figures=_figures(folder / "figures"),
        trees=trees,
        legend=tree_svg.legend(),
        audits=[(names[id(a.pool)], names[id(a.base)], a) for a in audits(pooled, ("vanilla", "hf"))],
        notes=answers.pop("notes"),
        data=script_json(answers),
        commands=facts.commands(ran),
        audit_command=shlex.join(["python", "-m", "evaluation.audit", str(folder)]),
        again=shlex.join(["python", "-m", "evaluation.report", str(folder)]),
    )


def script_json(data: Any) -> Markup:
    """Write JSON that may stand inside <script>: without <, > or & no text can end the element or open a comment.

    U+2028 and U+2029, which end a line in older JavaScript, are escaped, too.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _policy(style: str, script: str) -> str:
    """Write a content security policy: this style and script by their hashes, images inside the page, nothing else."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _figures(folder: Path) -> list[dict[str, Any]]:
    """Return the figures as images inside the page, their docstrings as captions."""
    captions = {
        draw.__name__: " ".join((inspect.getdoc(draw) or "").split()) for draw in (*drawn.FIGURES, *drawn.ACROSS)
    }
    places = {name: i for i, name in enumerate(captions)}
    figures = []
    for path in sorted(folder.glob("*.svg"), key=lambda path: (places.get(path.stem.split("-")[0], 99), path.stem)):
        svg = path.read_bytes()
        source = "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
        width = re.search(rb'<svg[^>]* width="([\d.]+)pt"', svg)
        wide = width is None or float(width[1]) > COLUMN_WIDTH
        caption = captions.get(path.stem.split("-")[0], "")
        figures.append({"name": path.stem, "source": source, "caption": caption, "wide": wide})
    return figures
