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
from .published import CODE, LIMIT, PAPER_NAMES, PAPER_SUBTASKS, WHOLE, read_published
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
ABOUT = ("model", "other_bench", "method", "name", "source", "measured", "complete", "execution")
PARTS: dict[str, tuple[str, ...]] = {"specbench": tuple(PAPER_SUBTASKS.values()), "mbpp": (CODE,)}
ASKED = [f"{part}_questions" for part in PARTS]
PAPER_DTYPE = "float16"
APART = "not comparable with the published figures"


def table1(runs: Sequence[Run], left_out: Sequence[dict[str, str]] = ()) -> pd.DataFrame:
    """The paper's Table 1: published rows and measured rows of all models, in the paper's order.

    Speedups are over `hf` (the paper's AR) and empty where the folder has no such run. What was left out (by model and
    method, with `why`) has a row whose source says so. `measured` says of what a row was measured: benches, questions,
    and what is not as published. Rows of other benches than the paper's name theirs as `other_bench`, and stand behind
    all others: they are of other questions.
    """
    published = [row | {"name": ROWS[row["method"]], "source": PUBLISHED} for row in read_published("paper_table1")]
    rows = _measured(runs)
    measured = {(row["model"], row["method"]) for row in rows}
    beside = {row["model"] for row in [*published, *rows] if "other_bench" not in row}
    for entry in {(e["model"], e["method"]): e for e in left_out}.values():
        model, method = entry["model"], PAPER_NAMES.get(entry["method"], entry["method"])
        if (model, method) not in measured:
            own = {"model": model, "method": method, "name": ROWS.get(method, method)}
            own |= {} if entry["bench"] in WHOLE or model in beside else {"other_bench": entry["bench"]}
            rows.append(own | {"source": f"not available: {entry['why']}"})
    rows += published
    models = list(dict.fromkeys(str(row["model"]) for row in rows))  # measured ones first
    order = list(ROWS)

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        at = order.index(row["method"]) if row["method"] in order else len(order)
        model, bench = models.index(str(row["model"])), row.get("other_bench", "")
        return bench != "", model, bench, at, row["source"] != PUBLISHED

    rows.sort(key=place)
    blank = dict.fromkeys(("other_bench", "measured", "execution", "device"), "")
    frame = pd.DataFrame([blank | row for row in rows])
    return frame.reindex(columns=[*ABOUT, *COLUMNS, *ASKED, "device"]).astype(dict.fromkeys(ASKED, "Int64"))


def _measured(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row a model, type, device, limit and method: of each part the run with most questions, wherever it was
    measured. What runs with fewer have measured stands in rows of their own, which say how many they are. Runs on
    another bench than the paper's are rows of that bench.
    """
    pooled = pools(runs)
    alike: dict[tuple[str, ...], list[Pool]] = {}
    for pool in pooled:
        key = [str(pool.group[k]) for k in ("model", "dtype", "device", "max_new_tokens")]
        other = "" if pool.group["bench"] in WHOLE else str(pool.group["bench"])
        alike.setdefault((*key, other, pool.first.execution, _name(pool)), []).append(pool)
    rows = []
    for (model, _, device, _, other, execution, name), own in alike.items():
        method = PAPER_NAMES.get(own[0].method, own[0].method)
        about = {"model": model, "method": method, "name": name, "source": MEASURED, "device": device}
        about |= {"execution": execution} | ({"other_bench": other} if other else {})
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


def _cells_of(parts: dict[str, Pool], pooled: Sequence[Pool]) -> dict[str, Any]:
    """The row's figures, each part's from its own runs, and what they were measured of; NaN where there are none."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, math.nan)
    first = next(iter(parts.values()))
    told: dict[str, None] = {}
    measured = []
    for part, pool in parts.items():
        base = baseline(pool, "hf", pooled)
        asked = pool.cells.of(*PARTS[part])
        row[f"{part}_questions"] = len(asked.questions)
        for column, value in zip(("mat", "tokens_per_second", "speedup"), _part(pool, base, PARTS[part]), strict=True):
            row[f"{part}_{column}"] = value
        if part == "specbench":
            row |= {column: _part(pool, base, (subtask,))[2] for column, subtask in PAPER_SUBTASKS.items()}
        if len(asked.questions):
            measured.append(pool)
            told[_told(pool)] = None
            common = len(asked.questions) if base is None else len(paired(asked, base.cells)[0].questions)
            if common < len(asked.questions):
                told[f"speedups over the {common} of them that AR has answered"] = None
    words = [*(told or [_told(first)]), *_departures(first)]
    return row | {"measured": "; ".join(words), "complete": all(pool.complete for pool in measured or [first])}


def _told(pool: Pool) -> str:
    """Of what it was measured: the bench, how many of its questions, and whether all of them are answered."""
    bench, asked = str(pool.group["bench"]), pool.questions
    answered = min(len(rows) for rows in pool.answers.values())
    text = f"{bench}, {answered}{'' if answered == asked else f' of {asked}'} questions"
    if asked < WHOLE.get(bench, asked):
        text += f" of its {WHOLE[bench]}"
    return text if pool.complete else f"{text}, incomplete"


def _departures(pool: Pool) -> list[str]:
    """What is not as published: the limit and the type."""
    own = pool.group
    limit = [f"max_new_tokens {own['max_new_tokens']}"] if own["max_new_tokens"] != LIMIT else []
    return limit + ([str(own["dtype"])] if own["dtype"] != PAPER_DTYPE else [])


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


def _of(row: dict[Any, Any]) -> str:
    """What a measured row is of, and how its steps were taken."""
    return "; ".join(word for word in (row["measured"], row["execution"]) if word)


def _markdown(table: pd.DataFrame) -> str:
    columns = ["method", "figures", *COLUMNS.values()]
    lines = ["# Table 1", ""]
    lines.append("Columns 3 to 8 are speedups by subtask; then Spec-Bench as a whole, then MBPP (the code subtask).")
    lines.append("Speedups are over AR: transformers' own generate. Published: A100-80GB, float16, 1,024 new tokens.")
    for (bench, model), block in table.groupby(["other_bench", "model"], sort=False):
        devices = [device for device in block["device"].unique() if device]
        where = f" (measured on {'; '.join(devices)})" if devices else ""
        lines += ["", f"## {model}{f' on {bench}' if bench else ''}{where}", ""]
        if bench:
            lines += [f"Of {bench}'s own questions, by subtask and as a whole: {APART}.", ""]
        rows = block.to_dict("records")
        sources = [f"{MEASURED}: {_of(row)}" if row["source"] == MEASURED else row["source"] for row in rows]
        cells = ([row["name"], source, *_cells(row)] for row, source in zip(rows, sources, strict=True))
        lines.append(markdown(columns, cells))
    return "\n".join([*lines, ""])


def _latex(table: pd.DataFrame) -> str:
    r"""The paper's layout: \usepackage{booktabs}; published rows in italics. A tabular more for each other bench."""
    lines = ["% needs \\usepackage{booktabs}; published rows are in italics"]
    for bench, block in table.groupby("other_bench", sort=False):
        name = _escape(str(bench))
        heads = (f"{name} ({APART})", f"{name}, code") if name else ("Spec-Bench", "MBPP")
        lines += [
            "\\begin{tabular}{ll" + "r" * len(COLUMNS) + "}",
            "\\toprule",
            f" & & \\multicolumn{{9}}{{c}}{{{heads[0]}}} & \\multicolumn{{3}}{{c}}{{{heads[1]}}} \\\\",
            "\\cmidrule(lr){3-11} \\cmidrule(lr){12-14}",
            " & ".join(["Model", "Method", *COLUMNS.values()]) + " \\\\",
        ]
        for model, own in block.groupby("model", sort=False):
            lines.append("\\midrule")
            for i, row in enumerate(own.to_dict("records")):
                lines.append(" & ".join([_escape(str(model)) if i == 0 else "", *_latex_cells(row)]) + " \\\\")
        lines += ["\\bottomrule", "\\end{tabular}", ""]
    return "\n".join(lines)


def _latex_cells(row: dict[Any, Any]) -> list[str]:
    """The method, in small print what its row was measured of, and its figures."""
    name, figures = _escape(str(row["name"])), [cell.replace("x", "$\\times$") for cell in _cells(row)]
    if row["source"] == PUBLISHED:
        return [f"\\textit{{{text}}}" for text in (name, *figures)]
    if row["source"] == MEASURED:
        return [f"{name} {{\\scriptsize ({_escape(_of(row))})}}", *figures]
    return [name, f"\\multicolumn{{{len(COLUMNS)}}}{{l}}{{{_escape(str(row['source']))}}}"]


def _escape(text: str) -> str:
    """What LaTeX reads as itself."""
    return "".join(f"\\{c}" if c in "&%$#_{}" else {"~": "\\~{}", "^": "\\^{}", "\\": "/"}.get(c, c) for c in text)
