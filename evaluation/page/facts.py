"""Facts about an experiment's runs from their metadata."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..records.provenance import commit, module_command
from ..records.runs import Run
from ..statistics.pools import Pool
from ..tables.notes import decoding, generation_left_out

# the configurations that have a value, as keys
Names = dict[str, dict[str, None]]


def facts(pools: Sequence[Pool]) -> dict[str, Names]:
    """Return the distinct values of each term, each with the configurations that have it."""
    terms: dict[str, Names] = {}
    for pool in pools:
        for run in pool.runs:
            for term, value in _terms(pool, run).items():
                _add(terms.setdefault(term, {}), value, pool.title)
    return {term: values for term, values in terms.items() if values}


def _add(values: Names, value: str, name: str) -> None:
    if value:
        values.setdefault(value, {})[name] = None


def _terms(pool: Pool, run: Run) -> dict[str, str]:
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
        "started": str(about.get("started", ""))[:10],
        "repeats": str(len(pool.repeats)),
    }


def model_words(run: Run) -> str:
    model = run.config.get("model", {}) | run.settings["model"]
    words = [f"{run.model} ({model.get('path')})", run.precision]
    for key in ("revision", "quantize", "attention", "context", "template"):
        if model.get(key):
            words.append(f"{key} {model[key]}")
    if source := run.metadata.get("converted_from"):
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
