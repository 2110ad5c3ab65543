"""What ran on what, and the commands that did it, from the metadata of the runs."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..records.provenance import flat
from ..records.runs import Run, sampling_words
from ..statistics.notes import generation_left_out
from ..statistics.pools import Pool, pools

_UNNAMED = re.compile(r"sha256|(^|\.)path$|bench\.questions|method\.name")  # settings that would name a run badly
_PLAIN = ("model.name", "bench.name")  # settings whose value says enough without their key


class Configuration(NamedTuple):
    """What ran, its repeats and shards together, under a name that no other configuration of the page has."""

    name: str
    pool: Pool


class Fact(NamedTuple):
    """One line of what ran: `values` are the distinct ones, each with those it holds for (none named: all)."""

    term: str
    values: list[tuple[str, str]]


class Command(NamedTuple):
    """A recorded command line, what it ran, and how many answers are still to be given."""

    line: str
    ran: list[str]
    missing: int


def configurations(runs: list[Run]) -> list[Configuration]:
    """Group the runs by configuration, named as in tables and figures, each name once."""
    pooled = pools(runs)
    every = [pool.first.settings | {"device": pool.first.metadata.get("device")} for pool in pooled]
    named = [{key: value for key, value in flat(settings) if value != {}} for settings in every]
    names: list[str] = []
    for pool, settings in zip(pooled, named, strict=True):
        peers = [other for p, other in zip(pooled, named, strict=True) if p.name == pool.name]
        keys = [k for k in settings if not _UNNAMED.search(k) and any(peer.get(k) != settings[k] for peer in peers)]
        words = [str(settings[k]) if k in _PLAIN else f"{k.rsplit('.', 1)[-1]}={settings[k]}" for k in keys]
        names.append(", ".join([pool.name, *words]))
    for tell in (lambda pool: f"{pool.questions} questions", lambda pool: pool.first.folder.name[-8:]):
        pairs = zip(names, pooled, strict=True)
        names = [f"{name}, {tell(pool)}" if names.count(name) > 1 else name for name, pool in pairs]
    return [Configuration(name, pool) for name, pool in zip(names, pooled, strict=True)]


def incomplete(ran: list[Configuration]) -> list[tuple[str, int, int]]:
    """Return the name of each configuration that is not done, its answers, and those asked for, over all repeats."""
    counts = [sum(int(run.metadata["questions"]) for run in configuration.pool.runs) for configuration in ran]
    return [(c.name, len(c.pool.rows), n) for c, n in zip(ran, counts, strict=True) if len(c.pool.rows) < n]


def facts(ran: list[Configuration]) -> list[Fact]:
    """Say what ran on what; a fact in which configurations differ lists each value with those it holds for."""
    terms = [
        ("device", _of_runs(lambda m: str(m.get("device", "")))),
        ("model", _of_runs(_model)),
        ("bench", _bench),
        ("decoding", _of_runs(_decoding)),
        ("not used", _of_runs(generation_left_out)),
        ("execution", _of_runs(lambda m: str(m.get("execution_used", "")))),
        ("versions", _of_runs(lambda m: ", ".join(f"{k} {v}" for k, v in m.get("versions", {}).items()))),
        ("code", _of_runs(_code)),
        ("platform", _of_runs(lambda m: str(m.get("platform", "")))),
    ]
    lines = [_fact(term, of, ran) for term, of in terms]
    started = sorted(str(r.metadata["started"]) for c in ran for r in c.pool.runs if r.metadata.get("started"))
    if started:
        dated = r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\d"
        first, last = (re.sub(dated, r"\1 \2 ", stamp).strip() for stamp in (started[0], started[-1]))
        lines.append(Fact("started", [(first if first == last else f"{first} to {last}", "")]))
    repeats = max(len(configuration.pool.repeats) for configuration in ran)
    if repeats > 1:
        lines.append(Fact("repeats", [(str(repeats), "")]))
    return [line for line in lines if line.values]


def _of_runs(of: Callable[[dict[str, Any]], str]) -> Callable[[Configuration], list[str]]:
    """Return a function that reads the metadata of each run."""
    return lambda configuration: [of(run.metadata) for run in configuration.pool.runs]


def _fact(term: str, of: Callable[[Configuration], Sequence[str]], ran: list[Configuration]) -> Fact:
    """Return the values of a term, each with the names of those that have it."""
    names: dict[str, list[str]] = {}
    for configuration in ran:
        for value in dict.fromkeys(of(configuration)):
            names.setdefault(value, []).append(configuration.name)
    names.pop("", None)
    return Fact(term, [(value, "" if len(names) == 1 else "; ".join(who)) for value, who in names.items()])


def _model(metadata: dict[str, Any]) -> str:
    model, source = metadata["settings"]["model"], metadata.get("converted_from")
    revision = f" at revision {model['revision']}" if model.get("revision") else ""
    quantized = f" with weights in {model['quantize']} (torchao)" if model.get("quantize") else ""
    text = (
        f"{model['name']} ({model.get('path')}{revision}), {model.get('dtype')}{quantized}, "
        f"{model.get('attention')} attention, context {model.get('context')}, template {model.get('template')}"
    )
    if not source:
        return text
    types = ", ".join(f"{count} tensors {kind}" for kind, count in source.get("tensor_types", {}).items())
    return f"{text}; de-quantised from {source['file']} ({types})"


def _bench(configuration: Configuration) -> list[str]:
    bench, pool = configuration.pool.first.settings["bench"], configuration.pool
    count = pool.questions if pool.first.asked else pool.first.metadata["questions"]
    return [f"{bench['name']}, {count} questions, sha256 {str(bench.get('sha256'))[:12]}"]


def _decoding(metadata: dict[str, Any]) -> str:
    settings = metadata["settings"]
    choices = settings.get("num_choices", 1)
    often = f"{choices} answers a question, " if choices > 1 else ""
    untimed = "" if settings.get("timed", True) else ", not timed"
    return (
        f"{sampling_words(settings)}, batch 1, at most {settings['max_new_tokens']} new tokens a turn, {often}seed "
        f"{settings.get('seed')}{untimed}"
    )


def _code(metadata: dict[str, Any]) -> str:
    git = metadata.get("git") or {}
    changed = ", with uncommitted changes" if git.get("modified") else ""
    return f"commit {git['commit'][:12]}{changed}" if git.get("commit") else ""


def commands(ran: list[Configuration]) -> list[Command]:
    """Return the recorded command lines, each once. Repeated, a command answers what is missing and nothing twice."""
    names: dict[str, dict[str, None]] = {}
    missing: Counter[str] = Counter()
    for configuration in ran:
        for run in configuration.pool.runs:
            if line := command_line(run.metadata.get("command") or []):
                names.setdefault(line, {})[configuration.name] = None
                missing[line] += int(run.metadata["questions"]) - len(run.answers)
    return [Command(line, list(of), missing[line]) for line, of in names.items()]


def command_line(argv: list[str]) -> str:
    """Return what to type: `python -m evaluation.NAME ...` for a module of this repository, else as recorded."""
    for i, part in enumerate(map(Path, argv[:2])):
        if part.suffix == ".py" and part.parent.name == "evaluation":
            return shlex.join(["python", "-m", f"evaluation.{part.stem}", *argv[i + 1 :]])
    return shlex.join(argv)
