"""The paper's Table 1: published rows and measured ones, as CSV, Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from model.files import write_text

from ..statistics.metrics import OVERALL
from ..statistics.published import PARTS, PLACES, WHOLE, departures, read_published
from .latex import latex_table
from .rendering import markdown, shown, write_csv
from .tables import TABLE1

# The paper's rows, in its order and by its names; what it calls AR is transformers' own generate.
PAPER_METHODS = {
    "ar": "AR",
    "lookahead": "Lookahead",
    "pld": "PLD",
    "rest": "REST",
    "medusa": "Medusa",
    "recycling": "Token Recycling",
}
PUBLISHED = "published"
COLUMNS = ["model", "method", "name", "source", *(column.name for column in TABLE1)]
# they identify a measured row
ALIKE = ["model", "dtype", "device", "max_new_tokens", "execution", "method", "variant"]
HEAD = (
    "Columns 3 to 8 are speedups by subtask; then Spec-Bench as a whole, then MBPP (the code"
    " subtask). Speedups are over AR: transformers' own generate. Published: A100-80GB, float16,"
    " 1,024 new tokens, eager steps. MAT must agree on any machine (Vicuna-7B: 2.67 to 2.83);"
    " speedups only between eager steps on such a GPU."
)


def table1(table: pd.DataFrame) -> pd.DataFrame:
    """Build the paper's Table 1: published rows and those of the main table, in the paper's order.

    Speedups are over `hf` (the paper's AR), and empty without such a run. The source of a measured
    row names its benches and questions, and settings that differ from the paper's.
    """
    rows = _measured(table)
    rows += [row | {"source": PUBLISHED} for row in read_published("paper_table1")]
    for row in rows:
        method = "ar" if row["method"] == "hf" else row["method"]
        row["method"] = method
        row["name"] = PAPER_METHODS.get(method, method) + row.get("name", "")

    models = [row["model"] for row in rows]  # measured ones first
    methods = {method: place for place, method in enumerate(PAPER_METHODS)}

    def place(row: dict[str, Any]) -> tuple[int, int, bool]:
        in_paper = methods.get(row["method"], len(methods))
        is_measured = row["source"] != PUBLISHED
        return models.index(row["model"]), in_paper, is_measured

    rows.sort(key=place)
    return pd.DataFrame(rows, columns=COLUMNS)


def _measured(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Build a row for each combination of ALIKE, of batch 1.

    Each figure is from the configuration with most questions. `name` is appended to the method's
    name: a start other than the paper's, and the variant.
    """
    rows: list[dict[str, Any]] = []
    table = table[table["bench"].isin(PARTS)]
    table = table[table["batch"] == 1]
    for key, alike in table.groupby(ALIKE, sort=False):
        model, _, device, _, execution, label, variant = map(str, key)
        by_size = alike.sort_values("bench_questions", kind="stable").to_dict("records")
        cells = {(row["bench"], row["category"]): row for row in by_size}
        figures = {}
        for name, (bench, category, measure) in PLACES.items():
            cell = cells.get((bench, category), {})
            figures[name] = cell.get(measure)

        method, _, start = label.partition(" (")
        more = f" ({start}" if start not in ("", "hot)") else ""
        more += f", {variant}" if variant else ""
        more = more.replace("execution=eager", "eager steps as published")

        source = ["measured"]
        for bench in PARTS:
            if (bench, OVERALL) in cells:
                source.append(_conditions(cells[bench, OVERALL]))
        source += [execution, device]
        rows.append(
            {
                "model": model,
                "method": method,
                "name": more,
                "source": "; ".join(source),
                **figures,
            }
        )

    return rows


def _conditions(row: dict[Any, Any]) -> str:
    """Say what a row of the main table measured.

    This is the bench, how many of its questions, the type, and other settings than the paper's.
    """
    bench = row["bench"]
    words = [bench, f"{row['questions']} of {WHOLE[bench]} questions", row["dtype"]]
    for name, value in departures(row).items():
        if value is not None:
            words.append(f"{name} {value}".removesuffix(".0"))

    return ", ".join(words)


def write_table1(table: pd.DataFrame, folder: Path, footnotes: Sequence[str] = ()) -> None:
    """Write table1.csv (every digit), table1.md and table1.tex, in the paper's layout."""
    rows = table1(table)
    write_csv(folder / "table1.csv", rows)

    texts = []
    for row in rows.drop(columns="method").itertuples(index=False):
        texts.append(map(shown, row))
    headings = ["model", "method", "figures", *(column.title for column in TABLE1)]
    parts = ["# Table 1", HEAD, markdown(headings, texts), *footnotes]
    write_text(folder / "table1.md", "\n\n".join(parts) + "\n")

    of_paper = rows["source"] == PUBLISHED
    rows.loc[of_paper, "name"] += " (published)"
    models = {str(model): part for model, part in rows.groupby("model", sort=False)}
    latex = latex_table(models, TABLE1, caption=HEAD, label="tab:1", above=footnotes)
    write_text(folder / "table1.tex", latex)
