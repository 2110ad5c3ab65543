"""python -m evaluation.bench_step: where a step's time goes, paired against plain decoding and transformers' generate.

The last line of the output is one JSON object with every figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from typing import Any

from model.decoding import Target, decode
from model.errors import UserError

from .cli import user_errors
from .conversation import prompt_ids
from .devices import exclusive
from .methods import Method, build_method
from .models import LoadedModel, ModelSettings, load_model
from .provenance import describe_device
from .questions import load_bench

TREE = {"name": "2.2.2", "nodes": None, "depth": None, "branching": None, "path": None}
RECYCLING = {"name": "recycling", "k": 8, "recycle_prompt": False, "dtype": "int64"}


class PhaseClock:
    """Adds up seconds by phase; waits for the device at each mark, so that work counts where it was asked for."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        self.target.synchronize()
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self.counts[phase] += 1
        self._last = now


def build(loaded: LoadedModel, tree: dict[str, str | int | None], k: int) -> dict[str, Method]:
    """The methods that are paired."""
    own: dict[str, dict[str, Any]] = {
        "hf": {"name": "hf"},
        "vanilla": {"name": "vanilla"},
        "recycling": RECYCLING | {"k": k},
    }
    return {name: build_method(loaded, settings, tree, "hot") for name, settings in own.items()}


def paired_speeds(
    methods: dict[str, Method], prompts: list[list[int]], limit: int, repeats: int
) -> dict[str, list[float]]:
    """Tokens a second of each method, one figure a repeat; methods take turns prompt by prompt."""
    figures: dict[str, list[float]] = {name: [] for name in methods}
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
            figures[name].append(tokens[name] / seconds[name])
    return figures


def phases(method: Method, prompts: list[list[int]], limit: int) -> dict[str, float]:
    """Mean microseconds a step by phase."""
    assert method.drafter is not None
    target = method.loaded.target
    clock = PhaseClock(target)
    for prompt in prompts:
        clock._last = time.perf_counter()
        decode(target, method.drafter, prompt, max_new_tokens=limit, eos=method.loaded.eos, mark=clock.mark)
    return {phase: 1e6 * clock.seconds[phase] / clock.counts[phase] for phase in clock.seconds if phase != "prefill"}


def drift(method: Method, prompt: list[int], limit: int, rounds: int) -> tuple[float, float]:
    """Median step time, in microseconds, of the first and the last tenth of `rounds` answers to one prompt."""
    times = []
    for _ in range(rounds):
        out = method.answer(prompt, limit)
        times.append(1e6 * out.decode_s / max(out.forwards - 1, 1))
    tenth = max(rounds // 10, 1)
    return statistics.median(times[:tenth]), statistics.median(times[-tenth:])


def main() -> None:
    flags = argparse.ArgumentParser(prog="python -m evaluation.bench_step", description=__doc__)
    flags.add_argument("--model-path", default="data/embedded", help="folder or hub name (default: the embedded model)")
    flags.add_argument("--dtype", default="auto")
    flags.add_argument("--device", default="auto")
    flags.add_argument("--prompts", type=int, default=14, help="of the sample bench (default 14: two a subtask)")
    flags.add_argument("--max-new-tokens", type=int, default=128)
    flags.add_argument("--repeats", type=int, default=5)
    flags.add_argument("--tree", default="2.2.2", help="2.2.2, or best:N for its best N nodes")
    flags.add_argument("--k", type=int, default=8)
    arguments = flags.parse_args()
    with user_errors():
        bench(arguments)


def bench(arguments: argparse.Namespace) -> None:
    """Run all parts and print them."""
    if min(arguments.prompts, arguments.repeats, arguments.max_new_tokens) < 1:
        raise UserError("--prompts, --repeats and --max-new-tokens must be at least 1")
    settings = ModelSettings("bench", arguments.model_path, dtype=arguments.dtype, device=arguments.device)
    with exclusive(settings):
        _bench(arguments, settings)


def _bench(arguments: argparse.Namespace, settings: ModelSettings) -> None:
    loaded = load_model(settings)
    name, _, nodes = arguments.tree.partition(":")
    if nodes and not nodes.isdigit():
        raise UserError(f"--tree {arguments.tree}: what follows the colon must be a number of nodes")
    methods = build(loaded, TREE | {"name": name, "nodes": int(nodes) if nodes else None}, arguments.k)
    questions = load_bench("sample", "data/sample/question.jsonl", per_category=-(-arguments.prompts // 7)).questions
    prompts = [prompt_ids(loaded.template, loaded.tokenizer, [q.turns[0]], []) for q in questions[: arguments.prompts]]
    device = describe_device(loaded.target.device)
    dtype = str(loaded.target.dtype).removeprefix("torch.")
    print(f"{arguments.model_path} ({dtype}) on {device}; {len(prompts)} prompts, tree {arguments.tree}")
    limit = arguments.max_new_tokens
    for method in methods.values():  # warm up
        method.answer(prompts[0], limit)

    speeds = paired_speeds(methods, prompts, limit, arguments.repeats)
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    print(f"\ntokens/s, methods taking turns, median of {arguments.repeats} (min - max):")
    for key, values in speeds.items():
        print(f"  {key:10} {medians[key]:8.1f}  ({min(values):.1f} - {max(values):.1f})")
    over_hf = statistics.median(v / h for v, h in zip(speeds["vanilla"], speeds["hf"], strict=True))
    over_vanilla = statistics.median(r / v for r, v in zip(speeds["recycling"], speeds["vanilla"], strict=True))
    print(f"  vanilla / hf {over_hf:.2f}   recycling / vanilla {over_vanilla:.2f}")

    result: dict[str, object] = {"device": device, "tokens_per_second": medians, "vanilla_over_hf": over_hf}
    for key in ("vanilla", "recycling"):
        parts = phases(methods[key], prompts, limit)
        total = sum(parts.values())
        outside = 1 - parts["forward"] / total
        print(f"\n{key}: {total:.0f} us a step, {100 * outside:.1f} % outside the forward")
        print("  " + "   ".join(f"{phase} {us:.0f}" for phase, us in parts.items()))
        result[key] = {"step_us": total, "outside_forward": outside, "phases_us": parts}
    first, last = drift(methods["recycling"], prompts[0], 64, 100)
    print(f"\nrecycling over 100 prompts: {first:.0f} us a step in the first ten, {last:.0f} in the last ten")
    print(json.dumps(result | {"first_ten_us": first, "last_ten_us": last, "recycling_over_vanilla": over_vanilla}))


if __name__ == "__main__":
    main()
