"""Facts about an experiment's runs, such as model, device and command, from their metadata."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

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
    stamps = []
    for pool in pools:
        for run in pool.runs:
            stamps.append(str(run.metadata.get("started") or ""))
            for term, value in _terms(pool, run).items():
                _add(found.setdefault(term, {}), value, pool.title)

    facts = {}
    for term, values in found.items():
        several = len(values) > 1
        facts[term] = [(value, "; ".join(values[value]) if several else "") for value in values]
    stamps = sorted(filter(None, stamps))
    minutes = [f"{stamp[:10]} {stamp[11:16]} {stamp[19:]}".strip() for stamp in stamps]
    if minutes:
        facts["started"] = [(" to ".join(dict.fromkeys([minutes[0], minutes[-1]])), "")]
    facts["repeats"] = [(str(max(len(pool.repeats) for pool in pools)), "")]
    return {term: values for term, values in facts.items() if values}


def _add(values: Names, value: str, name: str) -> None:
    """Add a configuration to those that have this value, if there is a value."""
    if value and name not in values.setdefault(value, []):
        values[value].append(name)


def _terms(pool: Pool, run: Run) -> dict[str, str]:
    """Return what a run's metadata say, in words."""
    about = run.metadata
    bench = run.settings["bench"]
    versions = [f"{name} {version}" for name, version in about["versions"].items()]
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
    revision = f" at revision {model['revision']}" if model.get("revision") else ""
    quantized = f" with weights in {model['quantize']} (torchao)" if model.get("quantize") else ""
    words = [
        f"{run.model} ({model.get('path')}{revision})",
        f"{run.precision}{quantized}",
        f"{model.get('attention')} attention",
        f"context {model.get('context')}",
        f"template {model.get('template')}",
    ]
    source = run.metadata.get("converted_from")
    return ", ".join(words) + (_converted_words(source) if source else "")


def _converted_words(source: dict[str, Any]) -> str:
    """Say from which file a model was converted."""
    kinds = source.get("tensor_types", {}).items()
    types = ", ".join(f"{count} tensors {kind}" for kind, count in kinds)
    return f"; de-quantised from {source['file']} ({types})"


def commands(pools: Sequence[Pool]) -> Names:
    """Return the configurations that each recorded command line ran."""
    lines: Names = {}
    for pool in pools:
        for run in pool.runs:
            _add(lines, shlex.join(module_command(run.metadata.get("command") or [])), pool.title)
    return lines
