"""Facts about an experiment's runs, such as model, device and command, from their metadata."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

from ..records.provenance import commit, module_command
from ..records.runs import Run
from ..statistics.notes import decoding, generation_left_out
from ..statistics.pools import Pool

TERMS: dict[str, Callable[[Pool, Run], str]] = {
    "bench": lambda pool, run: (
        f"{pool.group['bench']}, {pool.questions} questions, sha256"
        f" {str(run.settings['bench'].get('sha256'))[:12]}"
    ),
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
    """Return the distinct values of each term, each with the configurations that have it; empty if
    all have it.
    """
    facts = {}
    for term, of in TERMS.items():
        values = _by_value(
            [(of(pool, run), name) for name, pool in ran.items() for run in pool.runs]
        )
        facts[term] = [
            (value, "" if len(values) == 1 else "; ".join(names)) for value, names in values.items()
        ]
    stamps = sorted(
        str(run.metadata.get("started") or "") for pool in ran.values() for run in pool.runs
    )
    minutes = [f"{stamp[:10]} {stamp[11:16]} {stamp[19:]}".strip() for stamp in stamps if stamp]
    facts["started"] = (
        [(" to ".join(dict.fromkeys([*minutes[:1], *minutes[-1:]])), "")] if minutes else []
    )
    facts["repeats"] = [(str(max(len(pool.repeats) for pool in ran.values())), "")]
    return {term: values for term, values in facts.items() if values}


def _by_value(pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the values that are not empty, each with the names of the configurations that have
    it.
    """
    names: dict[str, dict[str, None]] = {}
    for value, name in pairs:
        if value:
            names.setdefault(value, {})[name] = None
    return {value: list(of_value) for value, of_value in names.items()}


def model_words(run: Run) -> str:
    """Say which model it was, from where, and how it was loaded."""
    model = run.identity.asked.get("model", {}) | run.settings["model"]
    source = run.metadata.get("converted_from")
    revision = f" at revision {model['revision']}" if model.get("revision") else ""
    quantized = f" with weights in {model['quantize']} (torchao)" if model.get("quantize") else ""
    loaded = (
        f"{model.get('attention')} attention, context {model.get('context')}, template"
        f" {model.get('template')}"
    )
    if source:
        types = ", ".join(
            f"{count} tensors {kind}" for kind, count in source.get("tensor_types", {}).items()
        )
        loaded += f"; de-quantised from {source['file']} ({types})"
    return f"{run.model} ({model.get('path')}{revision}), {run.precision}{quantized}, {loaded}"


def commands(ran: Mapping[str, Pool]) -> dict[str, list[str]]:
    """Return the configurations that each recorded command line ran."""
    lines = [
        (run.metadata.get("command") or [], name) for name, pool in ran.items() for run in pool.runs
    ]
    return _by_value([(shlex.join(module_command(line)), name) for line, name in lines])
