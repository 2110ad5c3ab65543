"""The lines above a table (model, device, versions), and the notes below it that a reader needs to
judge it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

from model.engine.sizing import steps_in_words

from ..records.identity import SERVER
from ..records.rows import difference
from ..records.runs import GENERATE, INSIDE, SERVED, Run
from .intervals import spans_one
from .metrics import OVERALL, grouped
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
    lines = []
    for name, block in blocks(table[table["category"] == OVERALL]).items():
        rows = block.to_dict("records")
        text = f"{name.replace(', ', ' on ', 1)}: "
        most = max(
            (row for row in rows if pd.notna(row["mat"])), key=lambda row: row["mat"], default=None
        )
        if drafts := most is not None and most["mat"] > PLAIN:
            text += f"{_row_name(most)} accepts most, {most['mat']:.2f} tokens per step (MAT). "
        if timed := [row for row in rows if pd.notna(row["tokens_per_second"])]:
            batches = any(row["batch"] > 1 for row in rows)
            # of one kind for every batch size
            speed = "tokens_per_second_total" if batches else "tokens_per_second"
            fastest = max(timed, key=lambda row: row[speed])
            others = [
                name
                for name in BASELINES
                if name != fastest["method"] and pd.notna(fastest[f"speedup_{name}"])
            ]
            over = " and ".join(f"{fastest[f'speedup_{name}']:.2f} × {name}" for name in others)
            size = f" in total at batch {fastest['batch']}" if batches else ""
            who = "It" if drafts and fastest is most else _row_name(fastest)
            over = f" ({over}{' of the same batch' * batches})" if over else ""
            text += f"{who} is fastest, {fastest[speed]:,.0f} tokens/s{size}{over}."
        lines.append(text)
    return lines


def _row_name(row: dict[Any, Any] | None) -> str:
    return ", ".join(filter(None, (str(row["method"]), row["variant"]))) if row else ""


def table_notes(table: pd.DataFrame, intervals: bool) -> list[str]:
    """Explain the marks and columns that these rows of the main table show, and its intervals where
    it prints them.
    """
    notes = []
    if intervals:
        notes.append(
            "[low, high]: 95 % bootstrap interval (MAT over questions, speeds over questions and"
            " repeats)"
        )
    over = [name for name in (*BASELINES, SERVER) if f"speedup_{name}_low" in table]
    ends = [(table[f"speedup_{b}_low"], table[f"speedup_{b}_high"]) for b in over]
    if any(
        spans_one(low, high) for lows, highs in ends for low, high in zip(lows, highs, strict=True)
    ):
        notes.append(
            f"{UNSURE}: the 95 % interval of this speedup includes 1, so neither of the two is"
            " clearly faster"
        )
    speeds = [
        c for c in ("tokens_per_second", *(f"speedup_{b}" for b in over)) if f"{c}_std" in table
    ]
    if any(
        (table[f"{c}_std"].isna() & (table[f"{c}_low"] < table[f"{c}_high"])).any() for c in speeds
    ):
        notes.append(ONE_REPEAT)
    if (table["batch"] > 1).any():
        notes.append(BATCHES)
    if "published_source" in table and (
        sources := table["published_source"].dropna().unique().tolist()
    ):
        names = "; ".join(sources)
        notes.append(
            f"published: {names} (data/reference), with speedups over transformers' own decoding"
        )
    return notes


def heading(runs: Sequence[Run]) -> list[str]:
    """Name model, device, versions and decoding, one line for each combination, and unused
    generation settings.
    """
    lines = [
        f"{run.model} ({run.precision}) on {run.metadata['device']}; torch"
        f" {run.metadata['versions']['torch']}, transformers"
        f" {run.metadata['versions']['transformers']}; {decoding(run, batches)}"
        for same in grouped(runs, lambda run: run.identity.comparable).values()
        for batches in [sorted({run.settings.get("batch", 1) for run in same})]
        for run in same
    ]
    lines += filter(None, map(generation_left_out, runs))
    return list(dict.fromkeys(lines))


def decoding(run: Run, batches: Sequence[int] = ()) -> str:
    """Say how tokens were chosen, up to how many, and in batches of which sizes; default: the run's
    own.
    """
    settings = run.settings
    choices = run.settings.get("num_choices") or 1
    sampling: dict[str, Any] = settings.get("sampling", {})
    chosen = [] if sampling.get("temperature") else ["greedy"]
    chosen += [f"{key} {value}" for key, value in sampling.items()]
    sizes = ", ".join(map(str, batches or [settings.get("batch", 1)]))
    words = f"{', '.join(chosen)}, batch {sizes}, max_new_tokens {settings['max_new_tokens']}"
    words += f", {choices} answers a question" if choices > 1 else ""
    return words if settings.get("timed", True) else f"{words}; not timed"


def generation_left_out(run: Run) -> str:
    """Name the checkpoint's generation settings that no method uses, not even `hf`; empty if it has
    none.
    """
    left_out = run.metadata.get("generation_config_left_out") or {}
    words = ", ".join(f"{key}={value}" for key, value in left_out.items())
    return (
        f"{run.settings['model']['name']}: the checkpoint's own {words} not used (plain greedy)"
        if words
        else ""
    )


def executions(table: pd.DataFrame) -> list[str]:
    """Return this engine's executions, by the rows of the main table; each once."""
    executed = table.get("execution", pd.Series()).dropna().unique()
    return [name for name in executed if name not in ("", GENERATE, SERVED)]


def execution_words(table: pd.DataFrame) -> list[str]:
    """Say in one line how steps were taken: one execution for all rows, or several and which are
    compared.
    """
    names = executions(table)
    if not names:
        return []
    compared = {
        name
        for name in BASELINES
        if table.loc[table["method"] != name, f"speedup_{name}"].notna().any()
    }
    clauses = [f"execution: {names[0]}" if len(names) == 1 else "execution: see its column"]
    if len(names) > 1 and "vanilla" in compared:
        other = f" ({INSIDE['eager']}: that of its steps)" if {*names} & {*INSIDE.values()} else ""
        clauses.append(f"speedup_vanilla compares with vanilla in the same execution{other}")
    if (table["method"] == "hf").any():
        over = (
            ", so speedup_hf also includes the difference between the two engines"
            if "hf" in compared
            else ""
        )
        clauses.append(f"hf is transformers' own generate{over}")
    return ["; ".join(clauses)]


def not_compared(pooled: Sequence[Pool]) -> list[str]:
    """Name what has no speedup because vanilla ran only in another execution; one line for each
    pair of executions.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for pool in pooled:
        if pool.label in BASELINES or pool.baselines["vanilla"] or pool.identity.is_served:
            continue
        if other := pool.closest("vanilla", set(COMPARED) - {"execution"}):
            names.setdefault((pool.first.execution, other.first.execution), []).append(pool.name)
    return [
        f"no speedup over vanilla for {'; '.join(of)}: execution {execution} here, {base} for"
        " vanilla"
        for (execution, base), of in names.items()
    ]


def served(pooled: Sequence[Pool]) -> Iterator[str]:
    """Name each server's engine, version and model, and say if its token ids were made from its
    text.
    """
    for pool, said in ((pool, pool.identity.method) for pool in pooled if pool.identity.is_served):
        of = f"{said['engine']} {said['version'] or 'of unknown version'}, model {said['model']}"
        remade = any(any(choice["ids_remade"]) for row in pool.rows for choice in row["choices"])
        own = (
            "threads, device and type are its own" + "; token ids were made from its text" * remade
        )
        yield f"{pool.name}: {of}; {own}"


def mixed(runs: Sequence[Run]) -> list[str]:
    """Say which runs were not measured under the first one's conditions, a line for each
    difference.

    Runs on other devices than the first one's are ignored, as they are in other blocks of every
    table.
    """
    others: dict[str, list[str]] = {}
    recorded = [run for run in runs if "circumstances" in run.metadata]
    for run in recorded:
        if run.metadata["device"] == recorded[0].metadata["device"]:
            pair = recorded[0].metadata["circumstances"], run.metadata["circumstances"]
            if words := difference(*pair, words=(f"for {recorded[0].label}", "")):
                others.setdefault(words, []).append(_repeat(run))
    return [
        f"runs under different conditions ({words} for {_first_three(names)})"
        for words, names in others.items()
    ]


def doubts(pooled: Sequence[Pool]) -> list[str]:
    """Say in one line which runs on a CPU began while other processes were at work."""
    noisy = [
        f"{pool.name}{f', repeat {repeat}' if len(pool.repeats) > 1 else ''}: {cores:.1f}"
        for pool in pooled
        for repeat, shards in pool.repeats.items()
        if pool.first.settings.get("timed", True)
        and (cores := max(run.metadata.get("cores_busy_elsewhere") or 0.0 for run in shards)) > BUSY
    ]
    line = (
        "timings are doubtful: other processes kept cores busy when a run began"
        f" ({_first_three(noisy)}); on a shared machine OMP_NUM_THREADS=1 suffers least"
    )
    return [line] if noisy else []


def executed(runs: Sequence[Run]) -> list[str]:
    """Say what execution=auto chose and why, how many threads ran and why, what a head reads, if
    cuDNN's is off.
    """
    every = [run.metadata for run in runs]
    reasons = {m["execution_why"]: m["execution_used"] for m in every if m.get("execution_why")}
    lines = [f"execution=auto chose {used}: {why}" for why, used in reasons.items()]
    lines += dict.fromkeys(
        f"threads: {m['threads']} ({m['threads_why']})" for m in every if m.get("threads_why")
    )
    read = [(run.label, run.summary.get("drafter", {}).get("hidden_states")) for run in runs]
    lines += dict.fromkeys(
        f"{label} reads hidden states {states}" for label, states in read if states
    )
    stock = [run for run in runs if run.execution == GENERATE and "16-bit" in run.precision]
    lines += dict.fromkeys(
        f"{run.label} multiplies by {run.settings['model']['dtype']} weights" for run in stock
    )
    if any(metadata.get("cudnn_attention") is False for metadata in every):
        lines.append(
            "cuDNN's attention is off, for hf as well: it plans anew for each new shape of an eager"
            " step"
        )
    return lines


def auto_lines(pooled: Sequence[Pool]) -> list[str]:
    """Describe the draft size and predicted speedup of each run of tree=auto; one line for each
    run.

    Of a batch no speedup is predicted: the step times are those of the last steps' number of
    sequences.
    """
    lines = []
    for pool, run in ((one, run) for one in pooled for run in one.runs):
        figures = run.summary.get("drafter") or {}
        batched = pool.identity.facets["batch"] > 1
        gain = None if batched else figures.get("predicted_speedup")
        if "plain_steps" in figures and (batched or gain):  # older records do not count them
            repeat = f", repeat {run.identity.repeat}" if len(pool.runs) > 1 else ""
            predicted = f"; predicted decoding speed over vanilla: {gain:.2f}" if gain else ""
            said = f"{pool.name}{repeat} on {pool.group['bench']}: {steps_in_words(figures)}"
            lines.append(said + predicted)
    return lines


def incomplete(runs: Sequence[Run]) -> list[str]:
    """Name the unfinished runs, one line for those that stopped after the same number of
    questions.
    """
    unfinished = [run for run in runs if not run.complete]
    stopped = grouped(
        unfinished, lambda run: f"{len(run.answers)} of {run.metadata['questions']} questions"
    )
    return [
        f"incomplete: {_first_three(map(_repeat, same))}: {place}"
        for place, same in stopped.items()
    ]


def _repeat(run: Run) -> str:
    return f"{run.label}, repeat {run.identity.repeat}"


def _first_three(words: Iterable[str]) -> str:
    names = list(words)
    return "; ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
