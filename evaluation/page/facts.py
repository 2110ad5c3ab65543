"""What ran on what, and the commands that did it, from the metadata of the runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping

from ..records.provenance import commit, module_command
from ..records.runs import Run
from ..statistics.notes import decoding, generation_left_out
from ..statistics.pools import Pool


def facts(ran: Mapping[str, Pool]) -> dict[str, list[tuple[str, str]]]:
    """Say what ran on what: the distinct values of each term, each with the configurations it holds for (none: all)."""
    of_runs: dict[str, Callable[[Run], str]] = {
        "device": lambda run: str(run.metadata["device"]),
        "model": _model,
        "decoding": lambda run: f"{decoding(run)}, seed {run.settings.get('seed')}",
        "not used": generation_left_out,
        "execution": lambda run: run.metadata.get("execution_used", ""),
        "versions": lambda run: ", ".join(f"{name} {version}" for name, version in run.metadata["versions"].items()),
        "code": lambda run: commit(run.metadata),
        "platform": lambda run: run.metadata.get("platform", ""),
    }
    terms = {"bench": _distinct({name: [_bench(pool)] for name, pool in ran.items()})}
    for term, of in of_runs.items():
        terms[term] = _distinct({name: map(of, pool.runs) for name, pool in ran.items()})
    stamps = sorted(str(run.metadata.get("started") or "") for pool in ran.values() for run in pool.runs)
    dated = [re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\d", r"\1 \2 ", stamp).strip() for stamp in stamps if stamp]
    terms["started"] = [(" to ".join(dict.fromkeys([*dated[:1], *dated[-1:]])), "")] if dated else []
    terms["repeats"] = [(str(max(len(pool.repeats) for pool in ran.values())), "")]
    return {term: values for term, values in terms.items() if values}


def _distinct(values: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    """Return the values, each with the names of those that have it; with none where all have."""
    names: dict[str, list[str]] = {}
    for name, of_name in values.items():
        for value in dict.fromkeys(of_name):
            names.setdefault(value, []).append(name)
    names.pop("", None)
    return [(value, "" if len(names) == 1 else "; ".join(who)) for value, who in names.items()]


def _model(run: Run) -> str:
    model, source = run.config.get("model", {}) | run.settings["model"], run.metadata.get("converted_from")
    revision = f" at revision {model['revision']}" if model.get("revision") else ""
    quantized = f" with weights in {model['quantize']} (torchao)" if model.get("quantize") else ""
    text = (
        f"{run.model} ({model.get('path')}{revision}), {run.precision}{quantized}, "
        f"{model.get('attention')} attention, context {model.get('context')}, template {model.get('template')}"
    )
    if not source:
        return text
    types = ", ".join(f"{count} tensors {kind}" for kind, count in source.get("tensor_types", {}).items())
    return f"{text}; de-quantised from {source['file']} ({types})"


def _bench(pool: Pool) -> str:
    bench = pool.first.settings["bench"]
    count = pool.questions if pool.identity.question_keys else pool.first.metadata["questions"]
    return f"{bench['name']}, {count} questions, sha256 {str(bench.get('sha256'))[:12]}"


def commands(ran: Mapping[str, Pool]) -> dict[str, list[str]]:
    """Return what each of the recorded command lines ran."""
    names: dict[str, dict[str, None]] = {}
    for name, pool in ran.items():
        for run in pool.runs:
            if line := shlex.join(module_command(run.metadata.get("command") or [])):
                names.setdefault(line, {})[name] = None
    return {line: list(of) for line, of in names.items()}
