"""Facts about an experiment's runs, such as model, device and command, from their metadata."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..records.provenance import commit, module_command
from ..records.runs import Run
from ..statistics.notes import decoding, generation_left_out
from ..statistics.pools import Pool

# the configurations that have a value
Names = dict[str, list[str]]


def facts(pools: Sequence[Pool]) -> dict[str, list[tuple[str, str]]]:
    """Return the distinct values of each term, each with the configurations that have it.

    The configurations are empty if all have the value.
    """
    found: dict[str, Names] = {}
    for pool in pools:
        for run in pool.runs:
            for term, value in _terms(pool, run).items():
                _add(found.setdefault(term, {}), value, pool.title)

    facts: dict[str, list[tuple[str, str]]] = {}
    for term, values in found.items():
        facts[term] = []
        for value, names in values.items():
            who = "; ".join(names) if len(values) > 1 else ""
            facts[term].append((value, who))

    facts["started"] = [(_started(pools), "")]
    repeats = max(len(pool.repeats) for pool in pools)
    facts["repeats"] = [(str(repeats), "")]
    return {term: values for term, values in facts.items() if values}


def _started(pools: Sequence[Pool]) -> str:
    """Return the minutes in which the first and the last run began."""
    minutes = []
    for pool in pools:
        for run in pool.runs:
            stamp = str(run.metadata.get("started") or "")
            minute = f"{stamp[:10]} {stamp[11:16]} {stamp[19:]}"
            minutes.append(minute.strip())

    first_and_last = dict.fromkeys([min(minutes), max(minutes)])
    return " to ".join(first_and_last)


def _add(values: Names, value: str, name: str) -> None:
    """Add a configuration to those that have this value, if there is a value."""
    if not value:
        return
    names = values.setdefault(value, [])
    if name not in names:
        names.append(name)


def _terms(pool: Pool, run: Run) -> dict[str, str]:
    """Return what a run's metadata say, in words."""
    about = run.metadata
    bench = run.settings["bench"]
    versions = []
    for name, version in about["versions"].items():
        versions.append(f"{name} {version}")

    digest = str(bench.get("sha256"))[:12]
    return {
        "bench": f"{bench['name']}, {pool.questions} questions, sha256 {digest}",
        "device": str(about["device"]),
        "model": model_words(run),
        "decoding": f"{decoding(run)}, seed {run.settings.get('seed')}",
        "not used": generation_left_out(run),
        "execution": about.get("execution_used", ""),
        "versions": ", ".join(versions),
        "code": commit(about),
        "platform": about.get("platform", ""),
    }


def model_words(run: Run) -> str:
    """Say which model it was, from where, and how it was loaded."""
    model = run.config.get("model", {}) | run.settings["model"]
    path = str(model.get("path"))
    if model.get("revision"):
        path += f" at revision {model['revision']}"
    precision = run.precision
    if model.get("quantize"):
        precision += f" with weights in {model['quantize']} (torchao)"

    words = [
        f"{run.model} ({path})",
        precision,
        f"{model.get('attention')} attention",
        f"context {model.get('context')}",
        f"template {model.get('template')}",
    ]
    source = run.metadata.get("converted_from")
    if source:
        kinds = source.get("tensor_types", {}).items()
        types = ", ".join(f"{count} tensors {kind}" for kind, count in kinds)
        words.append(f"de-quantised from {source.get('file')} ({types})")
    return ", ".join(words)


def commands(pools: Sequence[Pool]) -> Names:
    """Return the configurations that each recorded command line ran."""
    lines: Names = {}
    for pool in pools:
        for run in pool.runs:
            command = module_command(run.metadata.get("command") or [])
            _add(lines, shlex.join(command), pool.title)
    return lines
