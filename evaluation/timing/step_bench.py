"""Time the parts of a step: plain decoding and recycling in turns, and the drafting cost of each method."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from model.decoding import DeviceDrafter, generate
from model.errors import UserError
from model.files import ROOT

from ..configuration.methods import Method, build_method
from ..loading.bench import load_bench, prompt_ids
from ..loading.models import LoadedModel
from ..loading.step_times import PhaseClock
from .floor import Rates, launches, step_cost

TREE = {"name": "2.2.2", "nodes": None, "depth": None, "branching": None, "path": None}


def tree_settings(text: str) -> dict[str, Any]:
    """Parse a template: `name` or `name:nodes`."""
    name, _, nodes = text.partition(":")
    if nodes and not nodes.isdigit():
        raise UserError(f"--tree {text}: what follows the colon must be a number of nodes")
    return TREE | {"name": name, "nodes": int(nodes) if nodes else 80 if name == "auto" else None}


def prompts_for(loaded: LoadedModel, count: int, context: int | None) -> list[list[int]]:
    """Return first turns of the sample bench, evenly over subtasks, or one random prompt of the context given."""
    if context or loaded.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(3, loaded.target.vocab_size, (context or 500,), generator=generator).tolist()]
    questions = load_bench("sample", "data/sample/question.jsonl", per_category=-(-count // 7)).questions
    return [prompt_ids(loaded.template, loaded.tokenizer, [q.turns[0]], []) for q in questions[:count]]


class StepBench:
    """Time hf, vanilla and recycling on one model and the same prompts. Every measurement prints its result."""

    def __init__(self, loaded: LoadedModel, tree: dict[str, Any], k: int, prompts: list[list[int]], limit: int) -> None:
        settings = {name: method_settings(name) for name in ("hf", "vanilla", "recycling")}
        settings["recycling"]["k"] = k
        self.prompts, self.limit = prompts, limit
        self.methods = {name: build_method(loaded, options, tree, "hot") for name, options in settings.items()}
        self.fresh = build_method(loaded, settings["recycling"], tree, "hot")

    def warm_up(self) -> None:
        for method in self.methods.values():
            method.answer(self.prompts[0], self.limit)

    def speeds(self, repeats: int) -> dict[str, Any]:
        """Measure tokens per second of each method, medians over repeats, and medians of paired ratios."""
        speeds = paired_speeds(self.methods, self.prompts, self.limit, repeats)
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        print(f"\ntokens/s, methods taking turns, median of {repeats} (min - max):")
        for name, values in speeds.items():
            print(f"  {name:10} {medians[name]:8.1f}  ({min(values):.1f} - {max(values):.1f})")
        over_hf, over_vanilla = (
            statistics.median(a / b for a, b in zip(speeds[method], speeds[base], strict=True))
            for method, base in (("vanilla", "hf"), ("recycling", "vanilla"))
        )
        print(f"  vanilla / hf {over_hf:.2f}   recycling / vanilla {over_vanilla:.2f}")
        return {"tokens_per_second": medians, "vanilla_over_hf": over_hf, "recycling_over_vanilla": over_vanilla}

    def step(self, name: str, rates: Rates) -> dict[str, Any]:
        """Measure one method's step: its parts, nodes and share of the device's floor."""
        method = self.methods[name]
        assert method.drafter is not None
        context = sum(map(len, self.prompts)) // len(self.prompts) + self.limit // 2
        parts = phases(method, self.prompts, self.limit)
        total = sum(parts.values())
        nodes = len(method.drafter.tree) if isinstance(method.drafter, DeviceDrafter) else 1
        cost = step_cost(method.loaded.target, nodes, context)
        floor = 1e6 * cost.floor_seconds(rates)
        outside = 1 - parts["forward"] / total if "forward" in parts else float("nan")
        print(f"\n{name}: {total:.0f} us a step of {nodes} nodes, {100 * outside:.1f} % outside the forward")
        print("  " + "   ".join(f"{phase} {us:.0f}" for phase, us in parts.items()))
        print(
            f"  floor {floor:.0f} us ({100 * floor / total:.0f} % of the step): "
            f"{cost.bytes / total / 1e3:.1f} GB/s, {cost.flop / total / 1e3:.1f} GFLOP/s achieved"
        )
        return {
            "step_us": total,
            "nodes": nodes,
            "outside_forward": outside,
            "phases_us": parts,
            "floor_us": floor,
            "bytes": cost.bytes,
            "flop": cost.flop,
            "launches": launches(method.loaded.target, lambda: method.answer(self.prompts[0], 32)),
        }

    def drift(self, limit: int = 64, rounds: int = 100) -> dict[str, float]:
        """Compare the median microseconds of a step from a fresh state and after `rounds` prompts.

        Both answer the same prompt in turns, so that machine drift does not look like a growing cost.
        """
        prompt, methods = self.prompts[0], {"fresh": self.fresh, "used": self.methods["recycling"]}
        for _ in range(rounds):
            methods["used"].answer(prompt, limit)
        times: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(15):
            self.fresh.prepare()
            for name, method in methods.items():
                method.answer(prompt, limit)  # now both matrices have seen the prompt
                out = method.answer(prompt, limit)
                times[name].append(1e6 * out.decode_s / max(len(out.steps) - 1, 1))
        fresh, used = (statistics.median(times[name]) for name in methods)
        print(f"\nrecycling: {fresh:.0f} us a step when fresh, {used:.0f} after {rounds} prompts ({used / fresh:.2f})")
        return {"fresh_us": fresh, f"after_{rounds}_prompts_us": used}


def paired_speeds(
    methods: dict[str, Method], prompts: list[list[int]], limit: int, repeats: int
) -> dict[str, list[float]]:
    """Measure tokens per second of each method, one value per repeat; methods take turns prompt by prompt."""
    speeds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for method in methods.values():
            method.prepare()
        tokens, seconds = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0.0)
        for prompt in prompts:
            for name, method in methods.items():
                out = method.answer(prompt, limit)
                tokens[name] += len(out.tokens)
                seconds[name] += out.prefill_s + out.decode_s
        for name in methods:
            speeds[name].append(tokens[name] / seconds[name])
    return speeds


def phases(method: Method, prompts: list[list[int]], limit: int) -> dict[str, float]:
    """Measure mean microseconds per step by phase."""
    assert method.drafter is not None
    target = method.loaded.target
    clock = PhaseClock(target)
    for prompt in prompts:
        clock.restart()
        generate(target, method.drafter, prompt, max_new_tokens=limit, eos=method.loaded.eos, mark=clock.mark)
    times = {phase: 1e6 * seconds / clock.counts[phase] for phase, seconds in clock.seconds.items()}
    return {phase: us for phase, us in times.items() if phase not in ("prefill", "setup")}


def read_saved(path: Path) -> dict[str, Any]:
    """Read an earlier run's JSON object. Raises UserError for any other file."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        result["recycling"]["step_us"], result["vanilla"]["step_us"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"--against {path}: not a saved run of this bench ({error})") from None
    return result


def print_comparison(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Print step times and speeds next to those of an earlier run."""
    print("\nagainst the earlier run (now / before):")
    for key in ("vanilla", "recycling"):
        ratio = now[key]["step_us"] / before[key]["step_us"]
        print(f"  {key:10} step {before[key]['step_us']:.0f} -> {now[key]['step_us']:.0f} us ({ratio:.2f})")
    for key in now["tokens_per_second"]:
        ratio = now["tokens_per_second"][key] / before["tokens_per_second"][key]
        print(f"  {key:10} {ratio:.2f} x tokens/s")


EMBEDDED = "data/embedded"  # the model whose heads, draft model and datastore are shipped
CONTEXT = 2000  # tokens of the prompt
STEPS = 200  # timed per method, at most


def method_settings(name: str, model: str = "embedded") -> dict[str, Any]:
    """Return a method's settings from its YAML file, with the companions of that model config."""
    if name not in method_names():
        raise UserError(f"method {name}: no such method; there are {', '.join(method_names())}")
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        settings = compose("config", overrides=[f"method={name}", f"model={model}"]).method
        return dict(OmegaConf.to_container(settings, resolve=True))  # type: ignore[arg-type]


def method_names() -> list[str]:
    """Return the names of all methods with a YAML file."""
    return sorted(path.stem for path in (ROOT / "configs/method").glob("*.yaml"))


def long_prompt(loaded: LoadedModel, context: int = CONTEXT) -> list[int]:
    """Join the sample bench's questions to a text of so many tokens, cut at its start."""
    if loaded.tokenizer is None:
        raise UserError("drafting: the cost is measured on text, and this model has no tokenizer")
    questions = load_bench("sample", "data/sample/question.jsonl").questions
    text = [t for q in questions for t in prompt_ids(loaded.template, loaded.tokenizer, [q.turns[0]], [])]
    return (text * (context // len(text) + 1))[-context:]


class _StepClock:
    """Record the microseconds of each phase of each step."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.times.setdefault(phase, []).append(1e6 * (now - self._last))
        self._last = now


def drafting_cost(method: Method, prompt: list[int], steps: int = STEPS) -> dict[str, float]:
    """Measure median microseconds per step: `draft` (build the tree) and `observe` (learn from the verified step)."""
    assert method.drafter is not None
    clock = _StepClock()
    generate(method.loaded.target, method.drafter, prompt, max_new_tokens=steps, mark=clock.mark)
    return {phase: statistics.median(clock.times[phase]) for phase in ("draft", "observe")}


def bench_drafting(
    loaded: LoadedModel, names: list[str], tree: dict[str, Any], datastore: str | None
) -> dict[str, dict[str, float]]:
    """Print and return the drafting cost of each method; print why a method does not fit this model."""
    prompt = long_prompt(loaded, min(CONTEXT, loaded.target.context - STEPS - 1))
    before, loaded.target.execution = loaded.target.execution, "eager"  # only eager steps have separate phases
    costs: dict[str, dict[str, float]] = {}
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
        costs[name] = drafting_cost(method, prompt)
        print(f"  {name:18} draft {costs[name]['draft']:6.0f}   observe {costs[name]['observe']:6.0f}")
        sys.stdout.flush()
    loaded.target.execution = before
    return costs
