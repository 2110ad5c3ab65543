"""Step times T(n) on this machine, cached by fingerprint; seconds by phase of a step."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from model.decoding import Drafter, Target
from model.files import ROOT, write_json
from model.sizing.draft_size import measure_step_seconds, sizes_on

from ..records.provenance import versions
from ..records.questions import read_questions
from .bench import prompt_ids
from .models import LoadedModel, devices_in_words
from .processes import from_first_rank, rank

CACHE = ROOT / "results/.step_times"
CONTEXT = 400  # tokens, as a question of Spec-Bench and half an answer: attention's share of T(n) grows with it
WARM_UP = ROOT / "data/sample/warmup.jsonl"  # held out from every bench


def warm_up_prompt(loaded: LoadedModel) -> list[int]:
    """Return a held-out prompt, cut to half the context."""
    question = read_questions(WARM_UP)[0]
    prompt = prompt_ids(loaded.template, loaded.tokenizer, [question.turns[0]], [])
    return prompt[: max(loaded.target.context // 2, 1)]


def fingerprint(loaded: LoadedModel, method: str, budget: int, k: int) -> str:
    """Return a hash of what changes step times: device, threads, model shape, dtype, kernels, library versions."""
    target = loaded.target
    shape = {key: value for key, value in target.model.config.to_dict().items() if isinstance(value, int | float | str)}
    shape.pop("_name_or_path", None)
    parts = [
        devices_in_words(loaded),
        str(target.dtype),
        loaded.settings.attention,
        target.linear,
        target.execution,
        shape,
        versions(),
        method,
        budget,
        k,
        sizes_on(target.device),
        CONTEXT,
        *([loaded.settings.quantize] if loaded.settings.quantize else []),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def step_seconds(
    loaded: LoadedModel, method: str, make: Callable[[int], Drafter], *, budget: int, k: int
) -> tuple[float, dict[int, float]]:
    """Return the seconds of a plain step, and T(n) by nodes below the root: measured now, or read from the cache.

    Args:
        method: its name. `make` builds its drafter for a number of nodes.
    """
    path = CACHE / f"{fingerprint(loaded, method, budget, k)}.json"
    cached = from_first_rank(lambda: _read(path))
    if cached is not None:
        return cached
    if rank() == 0:
        print(f"tree=auto: measuring step times of {method} (once for this machine and model)", file=sys.stderr)
    prompt = warm_up_prompt(loaded)
    prompt = (prompt * (CONTEXT // len(prompt) + 1))[: min(CONTEXT, loaded.target.context // 2)]
    measured = measure_step_seconds(loaded.target, prompt, make, budget=budget)
    plain, seconds = from_first_rank(lambda: measured)  # clocks differ, but all ranks must choose the same trees
    if rank() == 0:
        entry = {"device": devices_in_words(loaded), "model": loaded.settings.name, "plain": plain, "seconds": seconds}
        write_json(path, entry)
    return plain, seconds


def _read(path: Path) -> tuple[float, dict[int, float]] | None:
    """Read a cached measurement; None if there is none or it is broken, so that it is measured again."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        return float(entry["plain"]), {int(n): float(s) for n, s in entry["seconds"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


class PhaseClock:
    """Add up seconds by phase; synchronises the device at each mark, so that work counts in its phase."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self.restart()

    def restart(self) -> None:
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        self.target.synchronize()
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self.counts[phase] += 1
        self._last = now
