"""Assembles `report.html`: one file that needs no network, and no script but its own."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..tables import Run
from . import audit, captions, circumstances, published, reader, table, tree_svg
from .acceptance import has_tree
from .tokens import Decoder

HERE = Path(__file__).parent
MOST_TREES = 8
MOST_FIGURE_BYTES = 1_800_000  # of all SVGs together, as embedded


def write_page(runs: list[Run], measured: pd.DataFrame, folder: Path) -> Path:
    """Write `report.html` below an experiment's folder, from its runs, its main table and its `figures/*.svg`."""
    path = folder / "report.html"
    partial = path.with_name(path.name + ".part")
    partial.write_text(render(runs, measured, folder), encoding="utf-8", errors="replace")  # lone surrogates as "?"
    partial.replace(path)
    return path


def render(runs: list[Run], measured: pd.DataFrame, folder: Path) -> str:
    """The page as HTML. Everything that a model or a user wrote goes through autoescaping or `script_json`."""
    names, decoder = circumstances.run_names(runs), Decoder()
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    figures, figures_left_out = _figures(runs, names, measured, folder / "figures")
    drafting = [(run, name) for run, name in zip(runs, names, strict=True) if has_tree(run)]
    answers = reader.collect(runs, names, decoder)
    trees = [drawing for run, name in drafting[:MOST_TREES] if (drawing := tree_svg.draw(run, name, decoder))]
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(
        "page.html"
    ).render(
        title=folder.resolve().name,
        policy=_policy(style, script),
        style=Markup(style),  # our own files: nothing to escape
        script=Markup(script),
        short=captions.short(measured),
        incomplete=[
            (name, len(run.answers), int(run.metadata["questions"]))
            for run, name in zip(runs, names, strict=True)
            if not run.complete
        ],
        facts=circumstances.facts(runs, names),
        table=table.view(published.beside(measured)),
        figures=figures,
        figures_left_out=figures_left_out,
        trees=trees,
        trees_left_out=[name for _, name in drafting[MOST_TREES:]],
        legend=tree_svg.legend(),
        audits=audit.audit(runs, names),
        notes=answers.pop("notes"),
        data=script_json(answers),
        commands=circumstances.commands(runs, names),
        again=f"python -m evaluation.report {folder}",
    )


def script_json(data: Any) -> Markup:
    """JSON that may stand inside <script>: no <, > or &, so that no text in it can end the element or open a comment.

    U+2028 and U+2029, which end a line in older JavaScript, are escaped, too.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _policy(style: str, script: str) -> str:
    """A content security policy: this style and this script by their hashes, images inside the page, nothing else."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _figures(
    runs: list[Run], names: list[str], measured: pd.DataFrame, folder: Path
) -> tuple[list[dict[str, str]], list[str]]:
    """The figures as images inside the page, with their sentences, and the names of those that do not fit."""
    figures, left_out, size = [], [], 0
    for path in sorted(folder.glob("*.svg"), key=lambda p: captions.place(p.stem)):
        source = "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()
        if size + len(source) > MOST_FIGURE_BYTES:
            left_out.append(path.name)
            continue
        size += len(source)
        own, block, own_names = _of_figure(path.stem, runs, names, measured)
        said = captions.caption(path.stem, block, own, own_names)
        figures.append({"name": path.stem, "source": source, "caption": said})
    return figures, left_out


def _of_figure(
    stem: str, runs: list[Run], names: list[str], measured: pd.DataFrame
) -> tuple[list[Run], pd.DataFrame, list[str]]:
    """The runs and rows that a figure draws: of the model and bench that its name ends in, where there are several."""
    for (model, bench), block in measured.groupby(["model", "bench"], sort=False):
        if stem.endswith("-" + f"{model}-{bench}".replace("/", "_")):
            own = [
                (run, name)
                for run, name in zip(runs, names, strict=True)
                if (run.settings["model"]["name"], run.settings["bench"]["name"]) == (model, bench)
            ]
            return [run for run, _ in own], block, [name for _, name in own]
    return runs, measured, names
