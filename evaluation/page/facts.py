"""Facts about an experiment's runs, such as model, device and command, from their metadata."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..records.provenance import commit, module_command
from ..records.runs import Run
from ..statistics.notes import decoding, generation_left_out
from ..statistics.pools import Pool

TERMS: dict[str, Callable[[Pool, Run], str]] = {
    "bench": lambda pool, run: bench_words(pool, run),
    "device": lambda _, run: str(run.metadata["device"]),
    "model": lambda _, run: model_words(run),
    "decoding": lambda _, run: f"{decoding(run)}, seed {run.settings.get('seed')}",
    "not used": lambda _, run: generation_left_out(run),
    "execution": lambda _, run: run.metadata.get("execution_used", ""),
    "versions": lambda _, run: ", ".join(
        f"{name} {version}" for name, version in run.metadata["versions"].items()
    ),
    "code": lambda _, run: commit(run.metadata),
    "platform": lambda _, run: run.metadata.get("platform", ""),
}


def facts(ran: Mapping[str, Pool]) -> dict[str, list[tuple[str, str]]]:
    """Return the distinct values of each term, each with the configurations that have it.

    The configurations are empty if all have the value.
    """
    facts: dict[str, list[tuple[str, str]]] = {}
    for term, of in TERMS.items():
        values = _by_value((of(pool, run), name) for name, pool, run in _runs(ran))
        several = len(values) > 1
        facts[term] = [
            (value, "; ".join(names) if several else "") for value, names in values.items()
        ]

    started = [str(run.metadata.get("started") or "") for _, _, run in _runs(ran)]
    stamps = sorted(filter(None, started))
    minutes = [f"{stamp[:10]} {stamp[11:16]} {stamp[19:]}".strip() for stamp in stamps]
    if minutes:
        facts["started"] = [(" to ".join(dict.fromkeys([minutes[0], minutes[-1]])), "")]
    facts["repeats"] = [(str(max(len(pool.repeats) for pool in ran.values())), "")]
    return {term: values for term, values in facts.items() if values}


def _runs(ran: Mapping[str, Pool]) -> Iterator[tuple[str, Pool, Run]]:
    """Yield every run with its configuration and that one's name."""
    for name, pool in ran.items():
        for run in pool.runs:
            yield name, pool, run


def _by_value(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the values that are not empty, each with the configurations that have it."""
    names: dict[str, list[str]] = {}
    for value, name in pairs:
        if value and name not in names.setdefault(value, []):
            names[value].append(name)
    return names


def bench_words(pool: Pool, run: Run) -> str:
    """Name the bench, its size and the hash of its file."""
    digest = str(run.settings["bench"].get("sha256"))[:12]
    return f"{pool.group['bench']}, {pool.questions} questions, sha256 {digest}"


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


def commands(ran: Mapping[str, Pool]) -> dict[str, list[str]]:
    """Return the configurations that each recorded command line ran."""
    pairs = []
    for name, _, run in _runs(ran):
        line = run.metadata.get("command") or []
        pairs.append((shlex.join(module_command(line)), name))
    return _by_value(pairs)
