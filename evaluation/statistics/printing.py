"""Tables on paper: CSV with every digit, Markdown and the terminal rounded; the device above each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from model.files import write_text
from model.recycling.matrix import AdjacencyMatrix

from ..records.runs import Run, sampling_words
from ..records.sweeps import not_available
from . import executions
from .acceptance import TEMPLATE, Accepted, by_depth, by_node, template
from .caveats import executed, incomplete, mixed, unknown_files
from .intervals import spans_one
from .markdown import markdown, shown
from .metrics import OVERALL
from .pools import pools
from .published import beside
from .table1 import write_table1
from .tables import BASELINES, GROUP, SHOWN, about, drift_unknown, main_table
from .unavailable import NOTE, with_unavailable

VOCABULARIES = (32_000, 128_256, 151_936)
NOT_SURE = "~: the 95 % interval of this speedup spans 1, so it does not say which of the two is faster"

QUESTIONS_ONLY = (
    "one repeat: the intervals of its speeds are over questions only and leave out how the machine drifts from run to "
    "run; repeats=3 measures it"
)


def write_tables(runs: Sequence[Run], folder: Path, notes: Sequence[str] = ()) -> pd.DataFrame:
    """Write main.csv (every digit), main.md (rounded) and what else the runs hold below `folder`.

    Returns:
        The table of what was measured; the files also list what was not available.
    """
    table = beside(main_table(runs))
    shown = with_unavailable(table, folder.parent)
    write_text(folder / "main.csv", shown.to_csv(index=False))
    write_text(folder / "main.md", to_markdown(runs, shown, notes))
    depths = acceptance_table(runs)
    if not depths.empty:
        write_text(folder / "acceptance_by_depth.csv", depths.to_csv(index=False))
        write_text(folder / "acceptance_by_node.csv", nodes_table(runs).to_csv(index=False))
    memory = memory_table(runs)
    if not memory.empty:
        write_text(folder / "memory.csv", memory.to_csv(index=False))
    greedy = [run for run in runs if not run.facets["temperature"]]  # as the paper's are
    if any(run.label == "hf" for run in greedy):  # without it there is nothing that the paper's speedups are over
        write_table1(greedy, folder, not_available(folder.parent))
    return table


def memory_table(runs: Sequence[Run]) -> pd.DataFrame:
    """What the methods keep beside the model, measured; and what a matrix of the same k and type takes elsewhere.

    For the usual vocabularies (LLaMA-2, LLaMA-3, Qwen) a real matrix is allocated and its bytes are read.
    """
    rows: list[dict[str, Any]] = []
    kinds: dict[tuple[int, str], None] = {}
    for pool in pools(runs):
        size, method = pool.first.summary.get("state_bytes"), pool.first.settings["method"]
        if size:
            about = {"method": pool.name, "k": method.get("k"), "dtype": method.get("dtype")}
            rows.append(about | {"vocabulary": pool.first.metadata.get("vocab_size"), "bytes": size, "source": "run"})
            if method["name"] == "recycling" and "dtype" in method:
                kinds[int(method["k"]), str(method["dtype"])] = None
    for vocabulary in VOCABULARIES:
        for k, dtype in kinds:
            size = AdjacencyMatrix(vocabulary, k, dtype=getattr(torch, dtype)).nbytes
            about = {"method": "recycling", "k": k, "dtype": dtype, "vocabulary": vocabulary}
            rows.append(about | {"bytes": size, "source": "allocated"})
    frame = pd.DataFrame(rows).drop_duplicates()
    return frame.assign(mib=frame["bytes"] / 2**20) if rows else frame


def acceptance_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Acceptance by depth of every method that drafts from a template, all questions together."""
    rows: list[dict[str, Any]] = []
    for pool in pools(runs):
        for depth in by_depth(Accepted.of(pool.rows)):
            shares = {"joint_acceptance": depth.joint, "conditional_acceptance": depth.conditional}
            rows.append(about(pool) | {"depth": depth.depth, "steps": depth.steps} | shares)
    return pd.DataFrame(rows)


def nodes_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Acceptance by node of a fixed template: of the steps in which its parent stood, those in which it stood."""
    rows: list[dict[str, Any]] = []
    for pool in pools(runs):
        if order := template(pool.first):
            for node in by_node(Accepted.of(pool.rows, TEMPLATE), order):
                words = {"rank_path": ",".join(map(str, node.path)), "parent_stood_steps": node.parent_stood}
                share = node.given_parent if node.parent_stood else math.nan
                rows.append(about(pool) | words | {"stood_steps": node.stood, "conditional_acceptance": share})
    return pd.DataFrame(rows)


def heading(runs: Sequence[Run]) -> list[str]:
    """What ran on what, for above a table: one line a device and setting."""
    lines = []
    for run in runs:
        settings, versions = run.settings, run.metadata["versions"]
        line = (
            f"{settings['model']['name']} ({settings['model']['dtype']}) on {run.metadata['device']}; "
            f"torch {versions['torch']}, transformers {versions['transformers']}; {sampling_words(settings)}, batch 1, "
            f"max_new_tokens {settings['max_new_tokens']}{'' if settings.get('timed', True) else '; not timed'}"
        )
        if line not in lines:
            lines.append(line)
    for run in runs:
        if (line := generation_left_out(run.metadata)) and line not in lines:
            lines.append(line)
    return lines


def generation_left_out(metadata: dict[str, Any]) -> str:
    """Which generation settings of the checkpoint no method uses, `hf` included; empty if it has none."""
    own: dict[str, Any] = metadata.get("generation_config_left_out") or {}
    words = ", ".join(f"{key}={value}" for key, value in own.items())
    return (
        f"{metadata['settings']['model']['name']}: the checkpoint's own {words} left out (plain greedy)" if own else ""
    )


def group_names(table: pd.DataFrame) -> dict[tuple[Any, ...], str]:
    """How a block of the table is called: model and bench, and what else tells it from other blocks."""
    keys: list[tuple[Any, ...]] = [tuple(key) for key, _ in table.groupby(GROUP, sort=False)]
    names = {}
    for key in keys:
        words = [str(key[GROUP.index("model")]), str(key[GROUP.index("bench")])]
        twins = [k for k in keys if k != key and (k[0], k[2]) == (key[0], key[2])]
        for i, column in enumerate(GROUP):
            if column == "questions_sha256":  # told where their number does not tell them apart
                twins = [k for k in twins if k[i - 1] == key[i - 1]]
            if column not in ("model", "bench") and any(k[i] != key[i] for k in twins):
                words.append(_facet(column, key[i]))
        names[key] = ", ".join(words)
    return names


def _facet(column: str, value: Any) -> str:
    words = {"bench_questions": f"{value} questions", "max_new_tokens": f"max_new_tokens {value}"}
    return (words | {"questions_sha256": f"questions #{value}"}).get(column, str(value))


def to_markdown(runs: Sequence[Run], table: pd.DataFrame, notes: Sequence[str] = ()) -> str:
    """The table for people: one block a model and bench."""
    out = ["# Main table", "", "\n\n".join(["\n".join(heading(runs)), *executions.in_words(table)]), ""]
    names = group_names(table)
    for key, block in table.groupby(GROUP, sort=False):
        columns = _columns(block, table)
        cells = ([_cell(row, c, interval=True) for c in columns] for _, row in block.iterrows())
        out += [f"## {names[key]}", "", markdown(columns, cells), ""]
    brackets = "[low, high]: 95 % bootstrap interval, of MAT over questions, of a speedup over questions and repeats"
    told = [
        *([brackets] if "[" in "".join(out) else []),
        *_notes(table),
        *executions.not_compared(pools(runs)),
        *incomplete(runs),
        *mixed(runs),
        *unknown_files(runs),
        *executed(runs),
        *notes,
    ]
    return "\n".join([*out, "\n\n".join(told), ""])


def to_text(runs: Sequence[Run], table: pd.DataFrame, category: str = OVERALL) -> str:
    """The table for the terminal: one category of every run, aligned."""
    out = [*heading(runs), *executions.in_words(table)]
    names = group_names(table)
    for key, block in table[table["category"] == category].groupby(GROUP, sort=False):
        columns = [c for c in _columns(block, table) if c != "category"]
        cells = [columns] + [[_cell(row, c) for c in columns] for _, row in block.iterrows()]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        out += ["", f"{names[key]}, {category}:"]
        for line in cells:
            first, *rest = (
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
            out.append("  ".join([first, *rest]))
    out += _notes(table[table["category"] == category])
    told = [*executions.not_compared(pools(runs)), *incomplete(runs), *mixed(runs), *unknown_files(runs)]
    return "\n".join([*out, *told])


def _notes(table: pd.DataFrame) -> list[str]:
    ends = [(table[f"speedup_{b}_low"], table[f"speedup_{b}_high"]) for b in BASELINES]
    unsure = any(spans_one(low, high) for lows, highs in ends for low, high in zip(lows, highs, strict=True))
    notes = [NOT_SURE] if unsure else []
    if drift_unknown(table):
        notes.append(QUESTIONS_ONLY)
    if "published_source" in table and (sources := table["published_source"].dropna().unique().tolist()):
        notes.append(
            f"published: {'; '.join(sources)} (data/reference); speedups over transformers' own decoding there"
        )
    return notes


def _columns(block: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """The columns worth showing: fixed ones, variant and execution where there are several, spreads and speedups."""
    variant = ["variant"] if (block["variant"] != "").any() else []
    executed = ["execution"] if len(executions.executions(table)) > 1 else []
    repeats = ["repeats"] if (block["repeats"] > 1).any() else []
    spread = [f"{c}_std" for c in ("tokens_per_second",) if repeats and block[f"{c}_std"].notna().any()]
    speedups = [f"speedup_{b}" for b in BASELINES if block[f"speedup_{b}"].notna().any()]
    published = [c for c in ("published_mat", "published_speedup_hf") if c in block and block[c].notna().any()]
    note = [NOTE] if NOTE in block and block[NOTE].notna().any() else []
    measures = [c for c in SHOWN[3:] if block[c].notna().any()]  # of what was not timed there is no speed
    return [SHOWN[0], *variant, *executed, *SHOWN[1:3], *repeats, *measures, *spread, *speedups, *published, *note]


def _cell(row: pd.Series[Any], column: str, *, interval: bool = False) -> str:
    """A value for people; a speedup whose interval spans 1 ends in ~."""
    text = shown(row[column])
    low, high = row.get(f"{column}_low"), row.get(f"{column}_high")
    if low is None or high is None or low != low:
        return text
    if column.startswith("speedup") and spans_one(low, high):
        text += "~"
    wanted = interval and low < high and (column == "mat" or column.startswith("speedup"))
    return f"{text} [{low:.2f}, {high:.2f}]" if wanted else text
