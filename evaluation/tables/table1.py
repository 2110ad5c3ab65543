"""The paper's Table 1: published rows and measured ones, as CSV, Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from model.errors import one_line
from model.files import write_text

from ..records.runs import GENERATE
from ..statistics.metrics import OVERALL
from ..statistics.published import CONDITIONS, PLACES, WHOLE, departures, read_published
from .latex import latex_table
from .rendering import markdown, shown, write_csv
from .tables import TABLE1

# the paper's names; what it calls AR is transformers' own generate
PAPER_METHODS = {
    "hf": "AR",
    "ar": "AR",
    "lookahead": "Lookahead",
    "pld": "PLD",
    "rest": "REST",
    "medusa": "Medusa",
    "recycling": "Token Recycling",
}
PAPER_DEVICE = "A100-80GB"
PAPER_TREE = 80  # nodes
PUBLISHED = "published"
COLUMNS = ["bench", "model", "method", "name", "source", "questions"]
COLUMNS += [column.name for column in TABLE1]
# they identify a measured row
ALIKE = ["bench", "model", "dtype", "device", "max_new_tokens", "execution", "method", "variant"]
HEAD = (
    "Subtasks are speedups over AR, transformers' own generate; MAT, tokens/s and speed are of the"
    f" whole bench. Published: {PAPER_DEVICE}, float16, 1,024 new tokens, eager steps, Token"
    f" Recycling with a tree of {PAPER_TREE} nodes."
)
COMPARABLE = (
    "MAT must agree on any machine (Vicuna-7B: 2.67 to 2.83); speedups only between eager steps"
    " on such a GPU."
)


def table1(table: pd.DataFrame) -> pd.DataFrame:
    """Build the paper's Table 1 from the main table: measured rows, then published ones.

    Speedups are over `hf` (the paper's AR), and empty without such a run. A row is of one bench and
    of batch 1; each figure is from the configuration with most questions. `source` is the
    conditions of a measured row.
    """
    single = table[table["batch"] == 1].reset_index(drop=True)
    by_size = single.sort_values("bench_questions", kind="stable")
    cells = by_size.drop_duplicates([*ALIKE, "category"], keep="last").sort_index()
    published = pd.DataFrame(read_published("paper_table1"))
    parts = [published[:0]]
    for bench in WHOLE:
        of_bench = cells[cells["bench"] == bench].set_index(ALIKE)
        figures = {}
        for name, (category, measure) in _places(bench).items():
            figures[name] = of_bench.loc[of_bench["category"] == category, measure]
        rows = of_bench[of_bench["category"] == OVERALL].assign(**figures).reset_index()
        if rows.empty:
            continue
        records = rows.to_dict("records")
        rows["name"] = list(map(_name, records))
        rows["source"] = list(map(_conditions, records))
        of_paper = published[["model", "method", *figures]].dropna(subset=[*figures], how="all")
        about: dict[str, Any] = {"bench": bench, "source": PUBLISHED, "questions": WHOLE[bench]}
        parts += [rows, of_paper.assign(name=published["method"].map(PAPER_METHODS), **about)]
    return pd.concat(parts).reindex(columns=COLUMNS)


def _places(bench: str) -> dict[str, tuple[str, str]]:
    return {name: place[1:] for name, place in PLACES.items() if place[0] == bench}


def _name(row: dict[Any, Any]) -> str:
    """Name a row by its method, a start that is not hot, and settings that are not published."""
    method, _, start = row["method"].removesuffix(" (hot)").partition(" (")
    words = [PAPER_METHODS.get(method, method) + f" ({start}" * bool(start)]
    words += row["variant"].split(", ")
    for key, value in departures(row).items():
        if key not in CONDITIONS and value is not None:
            words.append(f"{key}={shown(value, 'g')}")
    nodes = row.get("tree_nodes")
    if pd.notna(nodes) and nodes != PAPER_TREE:
        words.append(f"{nodes:g} nodes")
    if row["execution"] != GENERATE:
        words.append(f"execution={row['execution']}")

    tree = f"{row.get('tree')} ({shown(nodes, 'g')})"  # as a variant names it
    left_out = ("", tree, "batch=1", "execution=eager")
    return ", ".join(word for word in dict.fromkeys(words) if word not in left_out)


def _conditions(row: dict[Any, Any]) -> str:
    bench = row["bench"]
    words = [
        f"{row['questions']} of {WHOLE[bench]} questions",
        f"{row['max_new_tokens']:,} new tokens",
        row["dtype"],
    ]
    for name, value in departures(row).items():
        if name in CONDITIONS and name != "max_new_tokens":
            words.append(f"{name} {shown(value, 'g')}".replace("quantize", "weights"))
    return ", ".join([*words, row["device"]])


def write_table1(table: pd.DataFrame, folder: Path, footnotes: Sequence[str] = ()) -> None:
    """Write table1.csv, table1.md and table1.tex, a table for each bench."""
    rows = table1(table)
    write_csv(folder / "table1.csv", rows)

    texts = ["# Table 1", HEAD, COMPARABLE]
    latex = "".join(f"% {one_line(line)}\n" for line in footnotes)
    for bench, part in rows.groupby("bench", sort=False):
        columns = [column for column in TABLE1 if column.name in _places(str(bench))]
        names = ["model", "name", "source", *(column.name for column in columns)]
        headings = ["model", "method", "figures", *(column.title for column in columns)]
        cells = [map(shown, row) for row in part[names].itertuples(index=False)]
        texts += [f"## {bench}", markdown(headings, cells)]

        blocks = {}
        for (model, source), block in part.groupby(["model", "source"], sort=False):
            blocks[f"{model}: {source}"] = block
        measured = "; ".join(words for words in part["source"].unique() if words != PUBLISHED)
        caption = f"{bench}. {HEAD} Measured: {measured}."
        latex += latex_table(blocks, columns, caption=caption, label=f"tab:{bench}")

    write_text(folder / "table1.md", "\n\n".join([*texts, *footnotes]) + "\n")
    write_text(folder / "table1.tex", latex)
