"""What a reader must know before believing a table: mixed circumstances, noise, runs that are not done."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..records.rows import difference
from ..records.runs import Run
from .pools import pools

BUSY = 0.5  # cores taken by others from which timings are doubtful


def mixed(runs: Sequence[Run]) -> list[str]:
    """What was not measured under one set of circumstances, one line each: a run in parts, runs beside each other.

    Runs on other devices than the first are blocks of their own in every table, and no matter here.
    """
    lines = []
    for run in runs:
        parts = run.metadata.get("parts", [])
        changes = [
            f"from question {part['first_question']} on under other circumstances "
            f"({difference(before['circumstances'], part['circumstances']).replace(' there and ', ' before, ')})"
            for before, part in itertools.pairwise(parts)
        ]
        if changes:
            lines.append(f"mixed: {run.label}, repeat {run.repeat}: {'; '.join(changes)}")
    first = next((run for run in runs if "circumstances" in run.metadata), None)
    others: dict[str, list[str]] = {}
    for run in runs:
        own = run.metadata.get("circumstances")
        if first is not None and own is not None and run.metadata["device"] == first.metadata["device"]:
            words = difference(first.metadata["circumstances"], own)
            if words:
                others.setdefault(words, []).append(f"{run.label}, repeat {run.repeat}")
    for words, names in others.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        words = words.replace(" there and ", f" for {first.label if first else ''}, ").removesuffix(" now")
        lines.append(f"measured under other circumstances ({words} for {'; '.join(names[:3])}{more})")
    return lines


def doubts(runs: Sequence[Run]) -> list[str]:
    """One line for the report where runs on a CPU began while other processes were at work."""
    noisy = [
        f"{pool.name}{f', repeat {repeat}' if len(pool.repeats) > 1 else ''} ({cores:.1f})"
        for pool in pools(runs)
        for repeat, shards in pool.repeats.items()
        if pool.first.settings.get("timed", True)
        and (cores := max(run.metadata.get("cores_busy_elsewhere") or 0.0 for run in shards)) > BUSY
    ]
    if not noisy:
        return []
    return [
        f"cores taken by other processes when a run began: {'; '.join(noisy)}; timings are doubtful. On a shared "
        "machine OMP_NUM_THREADS=1 suffers least"
    ]


def executed(runs: Sequence[Run]) -> list[str]:
    """What execution=auto took, and why, one line for the runs of which it is the same; and what CUDA goes without."""
    found: dict[str, str] = {}
    for run in runs:
        if run.metadata.get("execution_why"):
            found[run.metadata["execution_why"]] = run.metadata["execution_used"]
    lines = [f"execution=auto took {used}: {why}" for why, used in found.items()]
    if any(run.metadata.get("cudnn_attention") is False for run in runs):
        lines.append("cuDNN's attention is off, for hf as well: it would plan anew for the shape of every eager step")
    return lines


def unknown_files(runs: Sequence[Run]) -> list[str]:
    """One line for the runs of before a model's files were recorded: nobody can say of which weights they are."""
    names = [f"{run.label}, repeat {run.repeat}" for run in runs if "config" in run.metadata and not run.files]
    if not names:
        return []
    more = f" and {len(names) - 3} more" if names[3:] else ""
    return [
        f"of unknown weights: {'; '.join(names[:3])}{more}: made before the digests of a model's files were recorded; "
        "not taken for runs of the files that lie there now, nor compared with those"
    ]


def incomplete(runs: Sequence[Run]) -> list[str]:
    """The runs that are not done, a line for those that stopped at the same place."""
    found: dict[str, list[str]] = {}
    for run in runs:
        if not run.complete:
            place = f"{len(run.answers)} of {run.metadata['questions']} questions"
            found.setdefault(place, []).append(f"{run.label}, repeat {run.repeat}")
    return [
        f"incomplete: {names[0]}{f', and {len(names) - 1} more' if names[1:] else ''}: {place}"
        for place, names in found.items()
    ]
