"""The lines above a table (model, device, versions), and the notes below it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import pandas as pd

from model.engine.contract.sizing import steps_in_words

from ..records.rows import difference
from ..records.runs import GENERATE, INSIDE, SERVED, Run
from ..statistics.agreement import Audit
from ..statistics.intervals import FEWEST
from ..statistics.metrics import OVERALL, grouped
from ..statistics.pools import BASELINES, REFERENCE, Pool, mat_ratio
from .tables import blocks, speedups

MOST_GAINS = 12  # lines
BUSY = 0.5  # timings are doubtful if other processes use more cores than this
PLAIN = 1.005  # a MAT up to this counts as plain decoding: it is printed as 1.00
UNSURE = "~"  # the mark of a speedup whose interval spans 1
INTERVALS = (
    "[low, high]: 95 % bootstrap interval (MAT over questions, speeds over questions and repeats)"
)
MAY_BE_ONE = (
    f"{UNSURE}: the 95 % interval of this speedup includes 1, so neither of the two is clearly"
    " faster"
)
ONE_REPEAT = (
    "speeds are from one repeat: their intervals leave out how the machine drifts between runs"
    " (repeats=3 includes it)"
)

CUDNN = (
    "cuDNN's attention is off, for hf as well: it plans anew for each new shape of an eager step"
)
BATCHES = (
    "tokens/s and speedups of batches: all new tokens / all wall time, over a baseline of the same"
    " batch; by subtask, of the batches within it; compare batch sizes by tokens/s, total"
)


def verdict(audits: Sequence[Audit]) -> str:
    turns = sum(len(audit.turns) for audit in audits)
    different = sum(len(audit.different) for audit in audits)
    if not turns:
        return "Losslessness was not checked: no answers to compare with vanilla's."
    if not different:
        return f"Lossless: all {turns:,} turns of other methods equal vanilla's, token for token."
    names = _first_three(audit.pool.title for audit in audits if audit.different)
    return f"Not identical: {different:,} of {turns:,} turns differ from vanilla's ({names})."


def headlines(table: pd.DataFrame, pooled: Sequence[Any]) -> list[str]:
    """Summarise the overall rows, a line for each block that compares several."""
    overall = blocks(table[table["category"] == OVERALL].assign(pool=pooled))
    return [
        _headline(name, block)
        for name, block in overall.items()
        if len(block) > 1 or len(overall) == 1
    ]


def _headline(block: str, rows: pd.DataFrame) -> str:
    """Say which row accepts most, and which is fastest, if intervals say so."""
    words = [f"{block.replace(', ', ' on ', 1)}:"]
    accepting = None
    if (rows["mat"] > PLAIN).any():
        best, doubt = _first_by("mat", rows)
        accepting = best["pool"]
        claim = "has the highest MAT" if doubt else "accepts most"
        words.append(f"{accepting.name} {claim}, {best['mat']:.2f} tokens per step (MAT){doubt}.")

    # of one kind for every batch size
    batches = (rows["batch"] > 1).any()
    speed = "tokens_per_second_total" if batches else "tokens_per_second"
    if rows[speed].notna().any():
        fastest, doubt = _first_by(speed, rows)
        speedups_over = {name: fastest[f"speedup_{name}"] for name in BASELINES}
        gains = [
            f"{speedup:.2f} × {name}"
            for name, speedup in speedups_over.items()
            if name != fastest["method"] and pd.notna(speedup)
        ]
        over = f" ({' and '.join(gains)})" if gains else ""
        claim = "has the highest speed" if doubt else "is fastest"
        name = "It" if fastest["pool"] is accepting else fastest["pool"].name
        words.append(f"{name} {claim}, {fastest[speed]:,.0f} tokens/s{over}{doubt}.")

    return " ".join(words)


def _first_by(column: str, rows: pd.DataFrame) -> tuple[Any, str]:
    """Return the row with the highest value, and why another may have a higher one."""
    known = rows[rows[column].notna()]
    best = known.iloc[known[column].argmax()]
    pool = best["pool"]

    def lowest_ratio(other: Pool) -> float:
        if column == "mat":
            return mat_ratio(pool.cells, other.cells)[1]
        return speedups("", pool.speeds, other)["speedup__low"]

    others = [other for other in known["pool"] if other is not pool]
    close = [other.name for other in others if not lowest_ratio(other) > 1]
    if close and pool.questions < FEWEST:
        return best, "; too few questions for an interval"
    return best, f", not distinguishable from {_first_three(close)}" if close else ""


def table_notes(table: pd.DataFrame, intervals: bool, unsure: bool) -> list[str]:
    """Explain marks and columns.

    Args:
        intervals: whether the table prints them.
        unsure: whether it marks a speedup.
    """
    notes = []
    if intervals:
        notes.append(INTERVALS)
    if unsure:
        notes.append(MAY_BE_ONE)

    is_known = table["tokens_per_second_low"].notna()
    if (is_known & table["tokens_per_second_std"].isna()).any():
        notes.append(ONE_REPEAT)
    if (table["batch"] > 1).any():
        notes.append(BATCHES)

    if "published_source" in table:
        names = "; ".join(table["published_source"].dropna().unique())
        notes.append(f"published: {names} (data/reference), over transformers' own decoding, eager")

    return notes


def heading(runs: Sequence[Run]) -> list[str]:
    """Name model, device, versions, decoding and unused generation settings."""
    lines = []
    for same in grouped(runs, lambda run: run.comparable).values():
        batches = sorted({run.settings["batch"] for run in same})
        for run in same:
            versions = run.metadata["versions"]
            lines.append(
                f"{run.model} ({run.precision}) on {run.device};"
                f" torch {versions['torch']}, transformers {versions['transformers']};"
                f" {decoding(run, batches)}"
            )

    lines += filter(None, map(generation_left_out, runs))
    return list(dict.fromkeys(lines))


def decoding(run: Run, batches: Sequence[int] = ()) -> str:
    """Say how tokens were chosen, up to how many, and in batches of which sizes."""
    settings = run.settings
    answers = settings.get("num_choices") or 1
    sampling: dict[str, Any] = settings.get("sampling", {})
    sizes = ", ".join(map(str, batches or [settings["batch"]]))

    words = [] if sampling.get("temperature") else ["greedy"]
    words += [f"{key} {value}" for key, value in sampling.items()]
    words += [f"batch {sizes}", f"max_new_tokens {settings['max_new_tokens']}"]
    if answers > 1:
        words.append(f"{answers} answers a question")

    if not settings.get("timed", True):
        words.append("not timed")
    return ", ".join(words)


def generation_left_out(run: Run) -> str:
    """Name the checkpoint's generation settings that no method uses, not even `hf`."""
    left_out = run.metadata.get("generation_config_left_out", {})
    words = ", ".join(f"{key}={value}" for key, value in left_out.items())
    if not words:
        return ""
    return f"{run.settings['model']['name']}: the checkpoint's own {words} not used (plain greedy)"


def executions(table: pd.DataFrame) -> list[str]:
    """Return this engine's executions."""
    executed = table["execution"].dropna().unique()
    return [name for name in executed if name not in ("", GENERATE, SERVED)]


def execution_words(table: pd.DataFrame) -> list[str]:
    """Say how steps were taken and, if in several ways, which are compared."""
    names = executions(table)
    if not names:
        return []
    text = f"execution: {names[0]}"
    if len(names) > 1:
        text = (
            "execution: see its column; speedup_vanilla compares with vanilla in the same execution"
            f" ({INSIDE['eager']}: that of its steps)"
        )

    if (table["method"] == "hf").any():
        text += (
            "; hf is transformers' own generate, so speedup_hf also includes the difference between"
            " the two engines"
        )

    return [text]


def served(pooled: Sequence[Pool]) -> Iterator[str]:
    for pool in pooled:
        if not pool.first.is_served:
            continue
        method = pool.first.settings["method"]
        version = method["version"] or "of unknown version"
        engine = f"{method['engine']} {version}"
        line = f"{pool.name}: {engine}, model {method['model']}"
        line += "; threads, device and type are its own"
        yield line


def mixed(runs: Sequence[Run]) -> list[str]:
    """Say which runs were not measured under the first one's conditions.

    Runs on other devices may differ: they are in other blocks of every table.
    """
    others: dict[str, list[str]] = {}
    for same in grouped(runs, lambda run: run.device).values():
        first = same[0].metadata.get("circumstances", {})
        for run in same:
            own = run.metadata.get("circumstances", {})
            words = difference(first, own, words=(f"for {same[0].label}", ""))
            if words:
                others.setdefault(words, []).append(_repeat(run))

    return [
        f"runs under different conditions ({words} for {_first_three(names)})"
        for words, names in others.items()
    ]


def other_prompts(pooled: Sequence[Pool]) -> list[str]:
    """Say which configurations answered other prompts than their baselines."""
    names = []
    for pool in pooled:
        for base in filter(None, pool.baselines.values()):
            if count := pool.cells.other_prompts(base.cells).sum():
                names.append(f"{pool.title} with {base.label}: {count} questions")

    return [f"not compared, as prompts differ: {_first_three(names)}"] if names else []


def doubts(pooled: Sequence[Pool]) -> list[str]:
    """Say which runs on a CPU began while other processes were at work."""
    noisy = []
    for pool in pooled:
        for run in pool.runs:
            cores = run.metadata.get("cores_busy_elsewhere") or 0.0
            if cores > BUSY and run.settings.get("timed", True):
                noisy.append(f"{_repeat(run)}: {cores:.1f}")

    if not noisy:
        return []
    return [
        "timings are doubtful: other processes kept cores busy when a run began"
        f" ({_first_three(noisy)}); on a shared machine OMP_NUM_THREADS=1 suffers least"
    ]


def executed(runs: Sequence[Run]) -> list[str]:
    """Say why execution and threads were chosen, and what hf computes in."""
    lines = []
    for run in runs:
        metadata = run.metadata
        if metadata.get("execution_why"):
            used = metadata["execution_used"]
            lines.append(f"execution=auto chose {used}: {metadata['execution_why']}")

        if metadata.get("threads_why"):
            lines.append(f"threads: {metadata['threads']} ({metadata['threads_why']})")
        if run.execution == GENERATE and "16-bit" in run.precision:
            lines.append(f"{run.label} multiplies by {run.settings['model']['dtype']} weights")
        if metadata.get("cudnn_attention") is False:
            lines.append(CUDNN)

    return list(dict.fromkeys(lines))


def auto_lines(pooled: Sequence[Pool]) -> list[str]:
    """Describe the draft size and predicted speedup of each run that tunes its size."""
    lines = []
    for pool in pooled:
        for run in pool.runs:
            figures = run.summary.get("drafter", {})
            if "plain_steps" not in figures:
                continue

            repeat = f", repeat {run.repeat}" if len(pool.runs) > 1 else ""
            where = f"{pool.name}{repeat} on {pool.block['bench']}"
            line = f"{where}: {steps_in_words(figures)}"
            # of a batch, step times are those of the last steps' number of sequences
            if pool.first.facets["batch"] == 1 and figures.get("predicted_speedup"):
                gain = figures["predicted_speedup"]
                line += f"; predicted decoding speed over vanilla: {gain:.2f}"

            lines.append(line)

    return lines


def gains(pooled: Sequence[Pool]) -> list[str]:
    """Say each method's MAT over recycling's, paired by question.

    Both have the same batch, start and, where set, number of nodes. The last line names methods
    without such a recycling. A long list is left to the figures.
    """
    references = [pool for pool in pooled if pool.method == REFERENCE]
    methods = [pool for pool in pooled if pool.method not in (REFERENCE, *BASELINES)]
    if not references or not methods:
        return []
    pairs = [pair for pair in product(methods, references) if _alike(*pair)]
    if len(pairs) > MOST_GAINS:
        return [f"MAT over {REFERENCE}'s: {len(pairs)} pairs are too many to list; see the figures"]

    lines = [f"MAT over {REFERENCE}'s, paired by question:"]
    for pool, other in pairs:
        ratio, low, high = mat_ratio(pool.cells, other.cells)
        interval = "" if pd.isna(low) else f" [{low:.2f}, {high:.2f}]"
        lines.append(f"  {pool.name} over {other.name}: {ratio:.2f}{interval}")
    if alone := [pool.name for pool in methods if pool not in dict(pairs)]:
        why = f"no {REFERENCE} has their questions, start, nodes and batch"
        lines.append(f"  left out, as {why}: {', '.join(alone)}")
    return lines


def _alike(pool: Pool, reference: Pool) -> bool:
    starts = (None, reference.first.facets.get("start"))
    return (
        pool.block_name == reference.block_name
        and pool.cells.size == reference.cells.size
        and pool.first.facets.get("start") in starts
        and pool.budget in (None, reference.budget)
    )


def incomplete(runs: Sequence[Run]) -> list[str]:
    unfinished = [run for run in runs if not run.complete]
    stopped = grouped(unfinished, lambda r: f"{len(r.answers)} of {r.metadata['questions']}")
    return [
        f"incomplete: {_first_three(map(_repeat, same))}: {where} questions"
        for where, same in stopped.items()
    ]


def _repeat(run: Run) -> str:
    return f"{run.label}, repeat {run.repeat}"


def _first_three(words: Iterable[str]) -> str:
    names = list(words)
    text = "; ".join(names[:3])
    if len(names) > 3:
        text += f" and {len(names) - 3} more"
    return text
