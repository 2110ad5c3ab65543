"""Published figures (data/reference/, facts with their sources), and the paper's Table 1 with measured ones beside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from .questions import ROOT
from .runs import Pool, Run, pools
from .tables import baseline, ratio

REFERENCE = ROOT / "data/reference"
SUBTASKS = {"mt": "mt_bench"} | {name: name for name in ("translation", "summarization", "qa", "math_reasoning", "rag")}
CODE = "code"  # MBPP's subtask
# The paper's rows, in its order and by its names; what it calls AR is transformers' own generate.
ROWS = {"ar": "AR", "lookahead": "Lookahead", "pld": "PLD", "rest": "REST", "medusa": "Medusa"}
ROWS |= {"recycling": "Token Recycling"}
MEASURED_AS = {"hf": "ar"}
COLUMNS = {
    "mt": "MT",
    "translation": "Trans.",
    "summarization": "Sum.",
    "qa": "QA",
    "math_reasoning": "Math",
    "rag": "RAG",
    "specbench_mat": "MAT",
    "specbench_tokens_per_second": "Tokens/s",
    "specbench_speedup": "Speed",
    "mbpp_mat": "MAT",
    "mbpp_tokens_per_second": "Tokens/s",
    "mbpp_speedup": "Speed",
}
PUBLISHED, MEASURED = "published", "measured"


def read_published(name: str) -> list[dict[str, Any]]:
    """The rows of one file of data/reference."""
    rows: list[dict[str, Any]] = pd.read_csv(REFERENCE / f"{name}.csv").to_dict("records")  # type: ignore[assignment]
    return rows


def table1(runs: Sequence[Run], left_out: Sequence[dict[str, str]] = ()) -> pd.DataFrame:
    """The paper's Table 1: published rows and measured rows of all models, in the paper's order.

    Speedups are over `hf` (the paper's AR) and empty where the folder has no such run. What was left out (by model and
    method, with `why`) has a row whose source says so.
    """
    rows = _measured(runs)
    measured = {(row["model"], row["method"]) for row in rows}
    for entry in {(e["model"], e["method"]): e for e in left_out}.values():
        model, method = entry["model"], MEASURED_AS.get(entry["method"], entry["method"])
        if (model, method) not in measured:
            about = {"model": model, "method": method, "name": ROWS.get(method, method)}
            rows.append(about | dict.fromkeys(COLUMNS, math.nan) | {"source": f"not available: {entry['why']}"})
    rows += [row | {"name": ROWS[row["method"]], "source": PUBLISHED} for row in read_published("paper_table1")]
    models = list(dict.fromkeys(str(row["model"]) for row in rows))  # measured ones first
    order = list(ROWS)

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        at = order.index(row["method"]) if row["method"] in order else len(order)
        return models.index(str(row["model"])), at, row["source"] != PUBLISHED

    rows.sort(key=place)
    frame = pd.DataFrame(rows)
    return frame[["model", "method", "name", "source", *COLUMNS, *(["device"] if "device" in frame else [])]]


def _measured(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row a model, type, device and method: its Spec-Bench part and its code part, wherever they were measured."""
    pooled = pools(runs)
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for pool in pooled:
        model = pool.first.settings["model"]
        method = MEASURED_AS.get(pool.method, pool.method)
        name = ROWS.get(method, pool.method)
        if pool.first.settings["method"].get("start") not in (None, "hot"):
            name += pool.label.removeprefix(pool.method)
        name += f", {pool.variant}" if pool.variant else ""
        limit = pool.first.settings["max_new_tokens"]
        key = (model["name"], model["dtype"], pool.first.metadata["device"], str(limit), name)
        row = rows.setdefault(key, {"model": model["name"], "method": method, "name": name, "source": MEASURED})
        row["device"] = pool.first.metadata["device"]
        base = baseline(pool, "hf", pooled)
        for column, subtask in SUBTASKS.items():
            _set(row, column, _part(pool, base, [subtask])[2])
        for prefix, subtasks in (("specbench", list(SUBTASKS.values())), ("mbpp", [CODE])):
            for column, value in zip(("mat", "tokens_per_second", "speedup"), _part(pool, base, subtasks), strict=True):
                _set(row, f"{prefix}_{column}", value)
    return list(rows.values())


def _set(row: dict[str, Any], column: str, value: float) -> None:
    if not math.isnan(value) or column not in row:
        row[column] = value


def _part(pool: Pool, base: Pool | None, subtasks: list[str]) -> tuple[float, float, float]:
    """MAT, tokens/s and speedup over the baseline on these subtasks."""
    own = _questions(pool, subtasks)
    if own.empty:
        return math.nan, math.nan, math.nan
    steps = own["steps"].sum()
    mat = float(own["tokens"].sum() / steps) if steps else math.nan
    speed = float(own["speed"].mean())
    if base is None:
        return mat, speed, math.nan
    return mat, speed, ratio(own, _questions(base, subtasks))[0]


def _questions(pool: Pool, subtasks: list[str]) -> pd.DataFrame:
    return pool.by_question[pool.by_question["subtask"].isin(subtasks)]


def write_table1(runs: Sequence[Run], folder: Path, left_out: Sequence[dict[str, str]] = ()) -> None:
    """table1.csv (every digit), table1.md and table1.tex (booktabs), in the paper's layout."""
    table = table1(runs, left_out)
    table.to_csv(folder / "table1.csv", index=False)
    (folder / "table1.md").write_text(_markdown(table), encoding="utf-8")
    (folder / "table1.tex").write_text(_latex(table), encoding="utf-8")


def _cells(row: dict[Any, Any]) -> list[str]:
    """The row's figures as printed: speedups and MAT with two digits, the speed with x behind it."""
    out = []
    for column in COLUMNS:
        value = row[column]
        text = "-" if value != value else f"{value:.2f}"
        out.append(f"{text}x" if column.endswith("speedup") and text != "-" else text)
    return out


def _markdown(table: pd.DataFrame) -> str:
    columns = ["method", "figures", *COLUMNS.values()]
    lines = ["# Table 1", ""]
    lines.append("Columns 3 to 8 are speedups by subtask; then Spec-Bench as a whole, then MBPP (the code subtask).")
    lines.append("Speedups are over AR: transformers' own generate. Published: A100-80GB, float16.")
    for model, block in table.groupby("model", sort=False):
        devices = [str(d) for d in block.get("device", pd.Series(dtype=str)).dropna().unique()]
        lines += ["", f"## {model}" + (f" (measured on {'; '.join(devices)})" if devices else ""), ""]
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += [
            "| " + " | ".join([row["name"], row["source"], *_cells(row)]) + " |" for row in block.to_dict("records")
        ]
    return "\n".join([*lines, ""])


def _latex(table: pd.DataFrame) -> str:
    r"""The paper's layout: \usepackage{booktabs}; published rows in italics."""
    lines = [
        "% needs \\usepackage{booktabs}; published rows are in italics",
        "\\begin{tabular}{ll" + "r" * len(COLUMNS) + "}",
        "\\toprule",
        " & & \\multicolumn{9}{c}{Spec-Bench} & \\multicolumn{3}{c}{MBPP} \\\\",
        "\\cmidrule(lr){3-11} \\cmidrule(lr){12-14}",
        " & ".join(["Model", "Method", *COLUMNS.values()]) + " \\\\",
    ]
    for model, block in table.groupby("model", sort=False):
        lines.append("\\midrule")
        for i, row in enumerate(block.to_dict("records")):
            cells = [_escape(str(model)) if i == 0 else "", _escape(row["name"])]
            figures = [cell.replace("x", "$\\times$") for cell in _cells(row)]
            if row["source"] == PUBLISHED:
                cells[1], figures = f"\\textit{{{cells[1]}}}", [f"\\textit{{{cell}}}" for cell in figures]
            elif row["source"] != MEASURED:
                figures = [f"\\multicolumn{{{len(COLUMNS)}}}{{l}}{{{_escape(row['source'])}}}"]
            lines.append(" & ".join([*cells, *figures]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _escape(text: str) -> str:
    """What LaTeX reads as itself."""
    return "".join(f"\\{c}" if c in "&%$#_{}" else {"~": "\\~{}", "^": "\\^{}", "\\": "/"}.get(c, c) for c in text)
