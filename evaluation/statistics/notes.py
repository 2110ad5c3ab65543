"""The lines above a table (model, device, versions), and the notes below it.

The notes are what a reader needs to judge the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

from model.engine.sizing import steps_in_words

from ..records.rows import difference
from ..records.runs import GENERATE, INSIDE, SERVED, SERVER, Run
from .intervals import spans_one
from .metrics import OVERALL, choices, grouped
from .pools import BASELINES, COMPARED, Pool
from .tables import blocks

BUSY = 0.5  # timings are doubtful if other processes use more cores than this
PLAIN = 1.005  # a MAT up to this counts as plain decoding: it is printed as 1.00
UNSURE = "~"  # the mark of a speedup whose interval spans 1
ONE_REPEAT = (
    "speeds are from one repeat: their intervals leave out how the machine drifts between runs"
    " (repeats=3 includes it)"
)

BATCHES = (
    "tokens/s and speedups of batches: all new tokens / all wall time, over a baseline of the same"
    " batch; by subtask, of the batches within it; compare batch sizes by tokens/s, total"
)


def headlines(table: pd.DataFrame) -> list[str]:
    """Summarise the overall rows in a line per block of the table."""
    overall = table[table["category"] == OVERALL]
    return [_headline(name, block.to_dict("records")) for name, block in blocks(overall).items()]


def _headline(block: str, rows: list[dict[Any, Any]]) -> str:
    """Say which of a block's rows accepts most, and which is fastest."""
    text = f"{block.replace(', ', ' on ', 1)}: "

    accepting = [row for row in rows if row["mat"] > PLAIN]
    best = max(accepting, key=lambda row: row["mat"], default=None)
    if best:
        text += f"{_row_name(best)} accepts most, {best['mat']:.2f} tokens per step (MAT). "

    timed = [row for row in rows if pd.notna(row["tokens_per_second"])]
    if timed:
        batches = any(row["batch"] > 1 for row in rows)
        # of one kind for every batch size
        speed = "tokens_per_second_total" if batches else "tokens_per_second"
        fastest = max(timed, key=lambda row: row[speed])

        who = "It" if fastest is best else _row_name(fastest)
        size = f" in total at batch {fastest['batch']}" if batches else ""
        over = _gains(fastest, " of the same batch" if batches else "")
        text += f"{who} is fastest, {fastest[speed]:,.0f} tokens/s{size}{over}."
    return text


def _gains(row: dict[Any, Any], of: str) -> str:
    """Name a row's speedups over the baselines, in brackets; empty without any."""
    gains = []
    for name in BASELINES:
        speedup = row[f"speedup_{name}"]
        if name != row["method"] and pd.notna(speedup):
            gains.append(f"{speedup:.2f} × {name}")
    return f" ({' and '.join(gains)}{of})" if gains else ""


def _row_name(row: dict[Any, Any]) -> str:
    return ", ".join(filter(None, (str(row["method"]), row["variant"])))


def table_notes(table: pd.DataFrame, intervals: bool) -> list[str]:
    """Explain the marks and columns that these rows of the main table show.

    Args:
        intervals: whether the table prints them.
    """
    notes = []
    if intervals:
        notes.append(
            "[low, high]: 95 % bootstrap interval (MAT over questions, speeds over questions and"
            " repeats)"
        )

    speedups = [f"speedup_{name}" for name in (*BASELINES, SERVER)]
    speedups = [name for name in speedups if f"{name}_low" in table]
    ends = [(table[f"{name}_low"], table[f"{name}_high"]) for name in speedups]
    if any(any(map(spans_one, low, high)) for low, high in ends):
        notes.append(
            f"{UNSURE}: the 95 % interval of this speedup includes 1, so neither of the two is"
            " clearly faster"
        )

    speeds = [name for name in ("tokens_per_second", *speedups) if f"{name}_std" in table]
    if any(_from_one_repeat(table, name) for name in speeds):
        notes.append(ONE_REPEAT)
    if (table["batch"] > 1).any():
        notes.append(BATCHES)

    sources = table.get("published_source", pd.Series()).dropna().unique().tolist()
    if sources:
        names = "; ".join(sources)
        notes.append(
            f"published: {names} (data/reference), with speedups over transformers' own decoding"
        )
    return notes


def _from_one_repeat(table: pd.DataFrame, name: str) -> bool:
    """Return whether a speed of some row has an interval, but no deviation over repeats."""
    has_interval = table[f"{name}_low"] < table[f"{name}_high"]
    return bool((table[f"{name}_std"].isna() & has_interval).any())


def heading(runs: Sequence[Run]) -> list[str]:
    """Name model, device, versions and decoding, one line for each combination.

    Also name unused generation settings.
    """
    lines = []
    for same in grouped(runs, lambda run: run.comparable).values():
        batches = sorted({run.settings.get("batch", 1) for run in same})
        for run in same:
            versions = run.metadata["versions"]
            lines.append(
                f"{run.model} ({run.precision}) on {run.metadata['device']};"
                f" torch {versions['torch']}, transformers {versions['transformers']};"
                f" {decoding(run, batches)}"
            )
    lines += filter(None, map(generation_left_out, runs))
    return list(dict.fromkeys(lines))


def decoding(run: Run, batches: Sequence[int] = ()) -> str:
    """Say how tokens were chosen, up to how many, and in batches of which sizes.

    By default, the size is the run's own.
    """
    settings = run.settings
    answers = settings.get("num_choices") or 1
    sampling: dict[str, Any] = settings.get("sampling", {})
    sizes = ", ".join(map(str, batches or [settings.get("batch", 1)]))

    words = [] if sampling.get("temperature") else ["greedy"]
    words += [f"{key} {value}" for key, value in sampling.items()]
    words += [f"batch {sizes}", f"max_new_tokens {settings['max_new_tokens']}"]
    if answers > 1:
        words.append(f"{answers} answers a question")

    timed = settings.get("timed", True)
    return ", ".join(words) + ("" if timed else "; not timed")


def generation_left_out(run: Run) -> str:
    """Name the checkpoint's generation settings that no method uses, not even `hf`.

    Empty if it has none.
    """
    left_out = run.metadata.get("generation_config_left_out") or {}
    words = ", ".join(f"{key}={value}" for key, value in left_out.items())
    if not words:
        return ""
    return f"{run.settings['model']['name']}: the checkpoint's own {words} not used (plain greedy)"


def executions(table: pd.DataFrame) -> list[str]:
    """Return this engine's executions, by the rows of the main table; each once."""
    executed = table.get("execution", pd.Series()).dropna().unique()
    return [name for name in executed if name not in ("", GENERATE, SERVED)]


def execution_words(table: pd.DataFrame) -> list[str]:
    """Say in one line how steps were taken: one execution for all rows, or several.

    Of several, say which are compared.
    """
    names = executions(table)
    if not names:
        return []
    several = len(names) > 1
    compared = []
    for name in BASELINES:
        if table.loc[table["method"] != name, f"speedup_{name}"].notna().any():
            compared.append(name)

    clauses = ["execution: see its column" if several else f"execution: {names[0]}"]
    if several and "vanilla" in compared:
        inside = not set(names).isdisjoint(INSIDE.values())
        other = f" ({INSIDE['eager']}: that of its steps)" if inside else ""
        clauses.append(f"speedup_vanilla compares with vanilla in the same execution{other}")
    if (table["method"] == "hf").any():
        clause = "hf is transformers' own generate"
        if "hf" in compared:
            clause += ", so speedup_hf also includes the difference between the two engines"
        clauses.append(clause)
    return ["; ".join(clauses)]


def not_compared(pooled: Sequence[Pool]) -> list[str]:
    """Name what has no speedup because vanilla ran only in another execution.

    There is one line for each pair of executions.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for pool in pooled:
        if pool.label in BASELINES or pool.baselines["vanilla"] or pool.first.is_served:
            continue
        other = pool.closest("vanilla", set(COMPARED) - {"execution"})
        if other:
            names.setdefault((pool.first.execution, other.first.execution), []).append(pool.name)

    lines = []
    for (execution, base), of in names.items():
        where = f"execution {execution} here, {base} for vanilla"
        lines.append(f"no speedup over vanilla for {'; '.join(of)}: {where}")
    return lines


def served(pooled: Sequence[Pool]) -> Iterator[str]:
    """Name each server's engine, version and model.

    Also say if its token ids were made from its text.
    """
    for pool in pooled:
        if not pool.first.is_served:
            continue
        method = pool.first.settings["method"]
        version = method["version"] or "of unknown version"
        line = f"{pool.name}: {method['engine']} {version}, model {method['model']}"
        line += "; threads, device and type are its own"
        if any(any(choice["ids_remade"]) for choice in choices(pool.rows)):
            line += "; token ids were made from its text"
        yield line


def mixed(runs: Sequence[Run]) -> list[str]:
    """Say which runs were not measured under the first one's conditions.

    There is a line for each difference. Runs on other devices than the first one's are ignored, as
    they are in other blocks of every table.
    """
    recorded = [run for run in runs if "circumstances" in run.metadata]
    others: dict[str, list[str]] = {}
    for run in recorded:
        first = recorded[0]
        if run.metadata["device"] != first.metadata["device"]:
            continue
        pair = (first.metadata["circumstances"], run.metadata["circumstances"])
        words = difference(*pair, words=(f"for {first.label}", ""))
        if words:
            others.setdefault(words, []).append(_repeat(run))

    return [
        f"runs under different conditions ({words} for {_first_three(names)})"
        for words, names in others.items()
    ]


def doubts(pooled: Sequence[Pool]) -> list[str]:
    """Say in one line which runs on a CPU began while other processes were at work."""
    noisy = []
    for pool in pooled:
        if not pool.first.settings.get("timed", True):
            continue
        for repeat, shards in pool.repeats.items():
            cores = max(run.metadata.get("cores_busy_elsewhere") or 0.0 for run in shards)
            name = f"{pool.name}, repeat {repeat}" if len(pool.repeats) > 1 else pool.name
            if cores > BUSY:
                noisy.append(f"{name}: {cores:.1f}")

    if not noisy:
        return []
    return [
        "timings are doubtful: other processes kept cores busy when a run began"
        f" ({_first_three(noisy)}); on a shared machine OMP_NUM_THREADS=1 suffers least"
    ]


def executed(runs: Sequence[Run]) -> list[str]:
    """Say how the runs were executed.

    This is what execution=auto chose and why, how many threads ran and why, what a head reads, and
    if cuDNN's attention is off.
    """
    auto: dict[str, str] = {}
    threads: list[str] = []
    heads: list[str] = []
    stock: list[str] = []
    for run in runs:
        metadata = run.metadata
        if metadata.get("execution_why"):
            auto[metadata["execution_why"]] = metadata["execution_used"]
        if metadata.get("threads_why"):
            threads.append(f"threads: {metadata['threads']} ({metadata['threads_why']})")
        states = run.summary.get("drafter", {}).get("hidden_states")
        if states:
            heads.append(f"{run.label} reads hidden states {states}")
        if run.execution == GENERATE and "16-bit" in run.precision:
            stock.append(f"{run.label} multiplies by {run.settings['model']['dtype']} weights")

    lines = [f"execution=auto chose {used}: {why}" for why, used in auto.items()]
    lines += dict.fromkeys(threads + heads + stock)
    if any(run.metadata.get("cudnn_attention") is False for run in runs):
        lines.append(
            "cuDNN's attention is off, for hf as well: it plans anew for each new shape of an eager"
            " step"
        )
    return lines


def auto_lines(pooled: Sequence[Pool]) -> list[str]:
    """Describe the draft size and predicted speedup of each run of tree=auto, a line for each.

    Of a batch no speedup is predicted: the step times are those of the last steps' number of
    sequences.
    """
    lines = []
    for pool in pooled:
        batched = pool.first.facets["batch"] > 1
        for run in pool.runs:
            figures = run.summary.get("drafter") or {}
            gain = None if batched else figures.get("predicted_speedup")
            if "plain_steps" not in figures or not (batched or gain):
                continue  # older records do not count them

            repeat = f", repeat {run.repeat}" if len(pool.runs) > 1 else ""
            line = f"{pool.name}{repeat} on {pool.group['bench']}: {steps_in_words(figures)}"
            if gain:
                line += f"; predicted decoding speed over vanilla: {gain:.2f}"
            lines.append(line)
    return lines


def incomplete(runs: Sequence[Run]) -> list[str]:
    """Name the unfinished runs.

    There is one line for those that stopped after the same number of questions.
    """
    stopped: dict[str, list[str]] = {}
    for run in runs:
        if not run.complete:
            place = f"{len(run.answers)} of {run.metadata['questions']} questions"
            stopped.setdefault(place, []).append(_repeat(run))
    return [f"incomplete: {_first_three(names)}: {place}" for place, names in stopped.items()]


def _repeat(run: Run) -> str:
    return f"{run.label}, repeat {run.repeat}"


def _first_three(words: Iterable[str]) -> str:
    names = list(words)
    text = "; ".join(names[:3])
    return f"{text} and {len(names) - 3} more" if len(names) > 3 else text
