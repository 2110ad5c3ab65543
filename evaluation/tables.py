"""Tables: the runs of an experiment as rows, numbers kept as numbers, the device above."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from model.errors import UserError

from .answers import read_answers
from .metrics import Row, by_subtask, measure, speedup

BASELINES = ("hf", "vanilla")
METHODS = ("hf", "vanilla", "pld", "recycling")  # in the order tables and figures show them
SHOWN = ("method", "category", "questions", "new_tokens", "mat", "mat_macro", "tokens_per_second")


@dataclass(frozen=True)
class Run:
    """A run as it lies on disk: its metadata and its answers in the order of the bench."""

    folder: Path
    metadata: dict[str, Any]
    answers: list[Row]

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.metadata["settings"])

    @property
    def label(self) -> str:
        return str(self.metadata["label"])

    @property
    def complete(self) -> bool:
        return len(self.answers) == int(self.metadata["questions"])

    @property
    def bench_key(self) -> tuple[str, ...]:
        """Runs with the same key may be compared: same model, bench, device, type and limit."""
        settings = self.settings
        parts = settings["model"] | {"bench": settings["bench"]["name"], "limit": settings["max_new_tokens"]}
        return tuple(f"{key}={parts[key]}" for key in sorted(parts)) + (self.metadata["device"],)


def read_runs(folder: Path) -> list[Run]:
    """All runs below an experiment's folder, methods in the tables' order. Raises UserError if there is none."""
    runs = []
    for path in sorted(folder.glob("runs/*/metadata.json")):
        answers = path.parent / "answers.jsonl"
        if answers.exists():
            metadata = json.loads(path.read_text(encoding="utf-8"))
            runs.append(Run(path.parent, metadata, list(read_answers(answers)[0].values())))
    if not runs:
        raise UserError(f"{folder}: no runs here (runs/*/metadata.json with answers.jsonl)")
    order = {name: i for i, name in enumerate(METHODS)}

    def key(run: Run) -> tuple[Any, ...]:
        method = run.settings["method"]
        return run.bench_key, order.get(method["name"], 99), run.label, method.get("k", 0), method.get("tree_nodes", 0)

    return sorted(runs, key=key)


def main_table(runs: list[Run]) -> pd.DataFrame:
    """One row for each model, bench, method and category; speedups are against the runs of the same folder."""
    baselines = {(run.bench_key, run.label): run for run in runs}
    rows: list[dict[str, Any]] = []
    for run in runs:
        settings = run.settings
        groups = by_subtask(run.answers)
        for category, answers in groups.items():
            row: dict[str, Any] = {
                "model": settings["model"]["name"],
                "bench": settings["bench"]["name"],
                "method": run.label,
                "category": category,
                **asdict(measure(answers)),
            }
            for name in BASELINES:
                base = baselines.get((run.bench_key, name))
                row[f"speedup_{name}"] = speedup(answers, base.answers) if base is not None else float("nan")
            method = settings["method"]
            row |= {key: method.get(key) for key in ("start", "tree", "tree_nodes", "k")}
            row |= {"dtype": settings["model"]["dtype"], "device": run.metadata["device"], "complete": run.complete}
            rows.append(row)
    return pd.DataFrame(rows)


def write_tables(runs: list[Run], folder: Path) -> pd.DataFrame:
    """Write main.csv (every digit) and main.md (rounded) below `folder`; return the table."""
    table = main_table(runs)
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / "main.csv", index=False)
    (folder / "main.md").write_text(to_markdown(runs, table), encoding="utf-8")
    return table


def heading(runs: list[Run]) -> list[str]:
    """What ran on what, for above a table: one line a device and setting."""
    lines = []
    for run in runs:
        settings, versions = run.settings, run.metadata["versions"]
        line = (
            f"{settings['model']['name']} ({settings['model']['dtype']}) on {run.metadata['device']}; "
            f"torch {versions['torch']}, transformers {versions['transformers']}; greedy, batch 1, "
            f"max_new_tokens {settings['max_new_tokens']}"
        )
        if line not in lines:
            lines.append(line)
    return lines


def to_markdown(runs: list[Run], table: pd.DataFrame) -> str:
    """The table for people: one block a model and bench."""
    out = ["# Main table", "", *heading(runs), ""]
    for (model, bench), block in table.groupby(["model", "bench"], sort=False):
        columns = _columns(block)
        out += [f"## {model}, {bench}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        out += ["| " + " | ".join(_format(row[c]) for c in columns) + " |" for _, row in block.iterrows()]
        out.append("")
    return "\n".join(out)


def to_text(runs: list[Run], table: pd.DataFrame, category: str = "overall") -> str:
    """The table for the terminal: one category of every run, aligned."""
    out = list(heading(runs))
    for (model, bench), block in table[table["category"] == category].groupby(["model", "bench"], sort=False):
        columns = [c for c in _columns(block) if c != "category"]
        cells = [columns] + [[_format(row[c]) for c in columns] for _, row in block.iterrows()]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        out += ["", f"{model}, {bench}, {category}:"]
        for line in cells:
            first, *rest = (
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
            out.append("  ".join([first, *rest]))
        unfinished = [run for run in runs if not run.complete]
        out += [f"incomplete: {run.label}, {len(run.answers)} of {run.metadata['questions']}" for run in unfinished]
    return "\n".join(out)


def _columns(block: pd.DataFrame) -> list[str]:
    """The columns worth showing: fixed ones, speedups that exist, and settings in which the runs differ."""
    varied = [c for c in ("tree", "tree_nodes", "k") if block.groupby("method")[c].nunique(dropna=True).max() > 1]
    speedups = [f"speedup_{b}" for b in BASELINES if block[f"speedup_{b}"].notna().any()]
    return [SHOWN[0], *varied, *SHOWN[1:], *speedups]


def _format(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
