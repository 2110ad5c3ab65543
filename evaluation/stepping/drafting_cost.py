"""What drafting alone costs, method by method, at a long context."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from model.decoding import generate
from model.errors import UserError
from model.files import ROOT

from ..running.bench import load_bench
from ..running.conversation import prompt_ids
from ..running.methods import Method, build_method
from ..running.models import LoadedModel

EMBEDDED = "data/embedded"  # the model whose heads, draft model and datastore are shipped
CONTEXT = 2000  # tokens of the prompt
STEPS = 200  # timed at most, a method


def method_settings(name: str, model: str = "embedded") -> dict[str, Any]:
    """A method as its YAML has it, with the companions of that choice of model."""
    if name not in method_names():
        raise UserError(f"method {name}: no such method; there are {', '.join(method_names())}")
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        settings = compose("config", overrides=[f"method={name}", f"model={model}"]).method
        return dict(OmegaConf.to_container(settings, resolve=True))  # type: ignore[arg-type]


def method_names() -> list[str]:
    """Every method there is a YAML for."""
    return sorted(path.stem for path in (ROOT / "configs/method").glob("*.yaml"))


def long_prompt(loaded: LoadedModel, context: int = CONTEXT) -> list[int]:
    """The sample bench's questions one behind the other, the last of them whole: text with its own repeats."""
    if loaded.tokenizer is None:
        raise UserError("drafting: the cost is measured on text, and this model has no tokenizer")
    questions = load_bench("sample", "data/sample/question.jsonl").questions
    text = [t for q in questions for t in prompt_ids(loaded.template, loaded.tokenizer, [q.turns[0]], [])]
    return (text * (context // len(text) + 1))[-context:]


class _StepClock:
    """Keeps the microseconds of each draft and each observe."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.times.setdefault(phase, []).append(1e6 * (now - self._last))
        self._last = now


def drafting_cost(method: Method, prompt: list[int], steps: int = STEPS) -> dict[str, float]:
    """Median microseconds a step: `draft` (look up, grow the tree) and `observe` (learn from what was verified)."""
    assert method.drafter is not None
    clock = _StepClock()
    generate(method.loaded.target, method.drafter, prompt, max_new_tokens=steps, mark=clock.mark)
    return {phase: statistics.median(clock.times[phase]) for phase in ("draft", "observe")}


def bench_drafting(
    loaded: LoadedModel, names: list[str], tree: dict[str, Any], datastore: str | None
) -> dict[str, dict[str, float]]:
    """Print and return the cost of each method; one that does not fit this model is named with its reason."""
    prompt = long_prompt(loaded, min(CONTEXT, loaded.target.context - STEPS - 1))
    before, loaded.target.execution = loaded.target.execution, "eager"  # only there are the phases apart
    found: dict[str, dict[str, float]] = {}
    print(f"\ndrafting alone at {len(prompt)} tokens of context, median us a step:")
    for name in names:
        settings = method_settings(name, "embedded" if loaded.settings.path == EMBEDDED else "path")
        if name == "rest" and datastore is not None:
            settings["datastore_path"] = datastore
        if settings["drafter"] is None:
            continue
        try:
            method = build_method(loaded, settings, tree, "hot")
        except UserError as error:
            print(f"  {name:18} not measured: {error}")
            continue
        found[name] = drafting_cost(method, prompt)
        print(f"  {name:18} draft {found[name]['draft']:6.0f}   observe {found[name]['observe']:6.0f}")
        sys.stdout.flush()
    loaded.target.execution = before
    return found
