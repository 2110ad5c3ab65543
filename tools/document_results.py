"""python -m tools.document_results [--check]: write the tables and figures of README.md and docs/
from shipped records.

    <!-- results: E                a folder of results/reference/; YAML follows
    where: QUERY                   of all cells
    columns: {TITLE: CELL, ...}
    rows: {TITLE: CELL, ...}
    first: ...                     the first column's title -->
    ... <!-- end -->

A cell is the row of E's main.csv that fits the queries (pandas' `query`) of its row and column.
`name` is a configuration's method and variant, `budget` its number of draft nodes. CELL is a query,
or these:

- where: a query; in: another experiment; show: a column (default: mat); interval: false hides it
- over: the query of another row. The cell is the ratio of the MATs, or with `show:
  tokens_per_second` of the speeds. `@row` is the cell's own row.
- begin, end: only steps that begin between these positions of an answer; loops: false: only those
  before 64 tokens occur again; novel: [LOW, HIGH]: only turns with such a share of novel tokens

E may be `definitions` (what columns mean) or `records` (what ships). A cell that fits no row is
empty.
"""

from __future__ import annotations

import itertools
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pandas as pd
import yaml

from evaluation import figures
from evaluation.errors import user_errors
from evaluation.figures import style
from evaluation.records.compact import FILE
from evaluation.records.provenance import commit
from evaluation.report import REFERENCE
from evaluation.statistics import metrics, pools
from evaluation.tables import rendering, tables
from evaluation.tables.experiment import Experiment
from evaluation.tables.tables import COLUMNS
from model.errors import Parser, UserError
from model.files import ROOT, replaced, write_text

# file in docs/figures: the experiment and the name of its figure
FIGURES = {
    "budget.png": ("dynamic_tree", "budget"),
    "topk.png": ("topk-whole", "topk"),
    "temperature.png": ("temperature", "temperature"),
    "batch.png": ("batch", "batch"),
    "novelty.png": ("whole", "novelty"),
    "speed.png": ("speed", "budget"),
}
PARTS = ("begin", "end", "loops", "novel")  # of answers, as `counts_between` takes them
BLOCK = re.compile(r"^<!-- results: ([^<]*?)-->\n(?:(?!<!-- ).*\n)*?<!-- end -->$", flags=re.M)


@cache
def shipped(name: str) -> Experiment:
    return Experiment.read(REFERENCE / name)


@cache
def table_of(name: str) -> pd.DataFrame:
    """Return a record's main table with `name`, `budget` and the pool of each row."""
    experiment = shipped(name)
    table = experiment.table.reset_index(drop=True)
    is_last = table["category"] == metrics.OVERALL  # of its configuration
    numbers = is_last.shift(fill_value=False).cumsum()
    pooled = [experiment.pools[number] for number in numbers]
    return table.assign(
        pool=pooled,
        name=[pool.name for pool in pooled],
        budget=[pool.budget for pool in pooled],
        drafter=[pool.method for pool in pooled],
        start=table["start"].fillna("stateless"),
    )


def row_of(table: pd.DataFrame, query: str, **names: Any) -> dict[Any, Any]:
    """Return the only row that fits; {} if none does. Raises UserError if several do."""
    fitting = table.query(query, local_dict=names, engine="python")
    if len(fitting) > 1:
        raise UserError(f"{query}: fits {len(fitting)} rows: {'; '.join(fitting['name'])}")
    return {} if fitting.empty else fitting.to_dict("records")[0]


def cell(spec: dict[str, Any]) -> str:
    table = table_of(spec["in"])
    query = " and ".join(spec["where"])
    if "category ==" not in query:
        query += " and category == 'overall'"
    row = row_of(table, query)
    base = row
    if row and "over" in spec:
        query = f"{spec['over']} and category == @row.category"
        base = row_of(table, query, row=SimpleNamespace(**row))
    if not row or not base:
        return ""

    column = spec.get("show", "mat")
    values = row
    if "over" in spec:
        values, column = ratio(row, base, column)
    elif part := {key: spec[key] for key in PARTS if key in spec}:
        values = row["pool"].of_part(**part)
    return rendering.cell(values, column, with_interval=spec.get("interval", True)).printed


def ratio(row: dict[Any, Any], base: dict[Any, Any], column: str) -> tuple[dict[Any, Any], str]:
    """Return the paired ratio of two rows' figures, and the column that it is printed like."""
    category = row["category"]
    if column == "tokens_per_second":
        speeds = row["pool"].speeds.of(category)
        return dict(tables.speedups("vanilla", speeds, base["pool"])), "speedup_vanilla"
    sides = (side["pool"].cells.of(category) for side in (row, base))
    return dict(zip(("mat", "mat_low", "mat_high"), pools.mat_ratio(*sides), strict=True)), "mat"


def page_table(spec: dict[str, Any]) -> str:
    rows = []
    for title, of_row in spec["rows"].items():
        texts = [str(title)]
        for of_column in spec["columns"].values():
            cell_spec = {"in": spec["results"]}
            queries = [spec["where"]] if "where" in spec else []
            for part in (of_row, of_column):
                about = {"where": part} if isinstance(part, str) else part
                queries += [about["where"]] if "where" in about else []
                cell_spec |= about
            texts.append(cell(cell_spec | {"where": queries}))
        rows.append(texts)

    titles = [spec.get("first", "method"), *map(str, spec["columns"])]
    table = rendering.markdown(titles, rows)
    # keeps an interval on one line
    return re.sub(r"(?<=\d), (?=[\d.]+\])", ",\N{NO-BREAK SPACE}", table)


def definitions() -> str:
    """Return the table of docs/concepts.md; columns of one meaning come together."""
    with_meaning = [column for column in COLUMNS if column.meaning]
    rows = []
    for of, same in itertools.groupby(with_meaning, key=lambda c: (c.unit, c.meaning)):
        rows.append((", ".join(f"`{column.name}`" for column in same), *of))
    return rendering.markdown(("name", "unit", "definition"), rows)


def records() -> str:
    rows = []
    for path in sorted(REFERENCE.glob(f"*/{FILE}")):
        for run in shipped(path.parent.name).runs:
            bench = run.settings["bench"]
            rows.append(
                {
                    "folder": f"`{path.parent.name}`",
                    "model": f"{run.model} ({run.settings['model']['dtype']})",
                    "bench": f"{bench['name']}, {bench['questions']} questions",
                    "device": run.metadata["device"],
                    "started": run.metadata["started"][:10],
                    "torch": run.metadata["versions"]["torch"],
                    "code": commit(run.metadata),
                    "note": run.metadata["note"],
                }
            )
    runs = pd.DataFrame(rows).groupby("folder", sort=False)
    table = runs.agg(_each_once).reset_index()
    return rendering.markdown(table.columns, table.to_numpy().tolist())


def _each_once(values: pd.Series[str]) -> str:
    return "; ".join(filter(None, values.unique()))


def rendered(block: re.Match[str]) -> str:
    spec = yaml.safe_load(f"results: {block[1]}")
    makers = {"definitions": definitions, "records": records}
    name = spec["results"]
    body = makers[name]() if name in makers else page_table(spec)
    return f"<!-- results: {block[1]}-->\n{body}\n<!-- end -->"


def save_figure(name: str) -> None:
    record, kind = FIGURES[name]
    data = max(figures.split(shipped(record)).values(), key=lambda data: len(data.pools))
    path = ROOT / "docs/figures" / name
    with style.styled(), replaced(path) as partial:
        figure = getattr(figures, kind)(data)
        figure.savefig(partial, format="png", metadata={"Software": None})


def main() -> None:
    parser = Parser(
        prog="python -m tools.document_results", description="Write documents' results."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; name stale pages")
    with user_errors():
        check = parser.parse_args().check
        pages = [ROOT / "README.md", ROOT / "results/README.md", *(ROOT / "docs").glob("*.md")]
        stale = []
        for page in pages:
            old = page.read_text(encoding="utf-8")
            new, blocks = BLOCK.subn(rendered, old)
            if blocks != old.count("<!-- results:"):
                raise UserError(f"{page.name}: a block is not closed by <!-- end -->")
            if new != old:
                stale.append(page.name)
            if not check:
                write_text(page, new)

        if check and stale:
            raise UserError(f"{', '.join(stale)}: python -m tools.document_results writes it anew")
        print("\n".join(f"{name}: written" for name in stale))
        for name in () if check else FIGURES:
            save_figure(name)


if __name__ == "__main__":
    main()
