"""Published figures (data/reference/, facts with their sources), and the paper's Table 1 with measured ones beside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from model.files import write_text

from ..records.runs import Run
from .caveats import mixed
from .markdown import markdown, shown
from .pools import Cells, Pool, paired, pools
from .published import CODE, PAPER_NAMES, PAPER_SUBTASKS, read_published
from .tables import baseline, speedup

# The paper's rows, in its order and by its names; what it calls AR is transformers' own generate.
ROWS = {"ar": "AR", "lookahead": "Lookahead", "pld": "PLD", "rest": "REST", "medusa": "Medusa"}
ROWS |= {"recycling": "Token Recycling"}
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


def table1(runs: Sequence[Run], left_out: Sequence[dict[str, str]] = ()) -> pd.DataFrame:
    """The paper's Table 1: published rows and measured rows of all models, in the paper's order.

    Speedups are over `hf` (the paper's AR) and empty where the folder has no such run. What was left out (by model and
    method, with `why`) has a row whose source says so.
    """
    rows = _measured(runs)
    measured = {(row["model"], row["method"]) for row in rows}
    for entry in {(e["model"], e["method"]): e for e in left_out}.values():
        model, method = entry["model"], PAPER_NAMES.get(entry["method"], entry["method"])
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


PARTS: dict[str, tuple[str, ...]] = {"specbench": tuple(PAPER_SUBTASKS.values()), "mbpp": (CODE,)}


def _measured(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row a model, type, device, limit and method: of each part the run with most questions, wherever it was
    measured. What runs with fewer have measured stands in rows of their own, which say how many they are.
    """
    pooled = pools(runs)
    alike: dict[tuple[str, ...], list[Pool]] = {}
    for pool in pooled:
        key = (*(str(pool.group[k]) for k in ("model", "dtype", "device", "max_new_tokens")), _name(pool))
        alike.setdefault(key, []).append(pool)
    rows = []
    for (model, _, device, _, name), own in alike.items():
        method = PAPER_NAMES.get(own[0].method, own[0].method)
        about = {"model": model, "method": method, "name": name, "source": MEASURED, "device": device}
        counts = {part: [len(pool.cells.of(*subtasks).questions) for pool in own] for part, subtasks in PARTS.items()}
        most = {part: count.index(max(count)) for part, count in counts.items()}  # of equals the first
        rows.append(about | _cells_of({part: own[i] for part, i in most.items()}, pooled))
        for i, pool in enumerate(own):
            rest = {part: pool for part in PARTS if most[part] != i and counts[part][i]}
            if rest:
                asked = sum(counts[part][i] for part in rest)
                rows.append(about | {"name": f"{name}, {asked} questions"} | _cells_of(rest, pooled))
    return rows


def _name(pool: Pool) -> str:
    """The method as the paper calls it, its start where that is not the paper's, and its variant."""
    name = ROWS.get(PAPER_NAMES.get(pool.method, pool.method), pool.method)
    if pool.first.settings["method"].get("start") not in (None, "hot"):
        name += pool.label.removeprefix(pool.method)
    return f"{name}, {pool.variant}" if pool.variant else name


def _cells_of(parts: dict[str, Pool], pooled: Sequence[Pool]) -> dict[str, float]:
    """The row's figures, each part's from its own runs; NaN where there are none."""
    row = dict.fromkeys(COLUMNS, math.nan)
    for part, pool in parts.items():
        base = baseline(pool, "hf", pooled)
        for column, value in zip(("mat", "tokens_per_second", "speedup"), _part(pool, base, PARTS[part]), strict=True):
            row[f"{part}_{column}"] = value
        if part == "specbench":
            row |= {column: _part(pool, base, (subtask,))[2] for column, subtask in PAPER_SUBTASKS.items()}
    return row


def _part(pool: Pool, base: Pool | None, subtasks: Sequence[str]) -> tuple[float, float, float]:
    """MAT, tokens/s and speedup over the baseline on these subtasks."""
    own = pool.cells.of(*subtasks)
    if own.questions.empty:
        return math.nan, math.nan, math.nan
    steps = np.nansum(own.steps)
    mat = float(np.nansum(own.tokens) / steps) if steps else math.nan
    speeds = own.mean_speed()
    speed = float(np.nanmean(speeds)) if np.isfinite(speeds).any() else math.nan  # of runs that were not timed
    return mat, speed, math.nan if base is None else _speedup(own, base.cells)


def _speedup(own: Cells, base: Cells) -> float:
    mine, theirs = paired(own, base)
    return speedup(mine.mean_speed(), theirs.mean_speed())


def write_table1(runs: Sequence[Run], folder: Path, left_out: Sequence[dict[str, str]] = ()) -> None:
    """table1.csv (every digit), table1.md and table1.tex (booktabs), in the paper's layout."""
    table = table1(runs, left_out)
    write_text(folder / "table1.csv", table.to_csv(index=False))
    write_text(folder / "table1.md", "\n\n".join([_markdown(table).rstrip(), *mixed(runs)]) + "\n")
    write_text(folder / "table1.tex", "".join(f"% {line}\n" for line in mixed(runs)) + _latex(table))


def _cells(row: dict[Any, Any]) -> list[str]:
    """The row's figures as printed: speedups and MAT with two digits, the speed with x behind it."""
    cells = {column: shown(row[column]) for column in COLUMNS}
    return [f"{text}x" if column.endswith("speedup") and text != "-" else text for column, text in cells.items()]


def _markdown(table: pd.DataFrame) -> str:
    columns = ["method", "figures", *COLUMNS.values()]
    lines = ["# Table 1", ""]
    lines.append("Columns 3 to 8 are speedups by subtask; then Spec-Bench as a whole, then MBPP (the code subtask).")
    lines.append("Speedups are over AR: transformers' own generate. Published: A100-80GB, float16.")
    for model, block in table.groupby("model", sort=False):
        devices = [str(d) for d in block.get("device", pd.Series(dtype=str)).dropna().unique()]
        lines += ["", f"## {model}" + (f" (measured on {'; '.join(devices)})" if devices else ""), ""]
        lines.append(markdown(columns, ([r["name"], r["source"], *_cells(r)] for r in block.to_dict("records"))))
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
