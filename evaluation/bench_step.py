"""python -m evaluation.bench_step: where a step's time goes, on any model shape, beside plain decoding and the floor.

The last line of the output is one JSON object with every figure; `--against FILE` compares with a saved one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from model.decoding import DeviceDrafter, generate
from model.errors import UserError
from model.files import write_json

from .figures.roofline import roofline
from .figures.style import save, styled
from .records.provenance import describe_device, versions
from .running.bench import load_bench
from .running.conversation import prompt_ids
from .running.errors import user_errors
from .running.locks import exclusive
from .running.methods import Method, build_method
from .running.model_settings import ModelSettings
from .running.models import LoadedModel, load_model, random_model
from .running.phases import PhaseClock
from .stepping.drafting_cost import bench_drafting, method_names, method_settings
from .stepping.floor import Rates, launches, measure_rates, step_cost

TREE = {"name": "2.2.2", "nodes": None, "depth": None, "branching": None, "path": None}


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
        clock.restart()
        generate(target, method.drafter, prompt, max_new_tokens=limit, eos=method.loaded.eos, mark=clock.mark)
    return {
        phase: 1e6 * clock.seconds[phase] / clock.counts[phase]
        for phase in clock.seconds
        if phase not in ("prefill", "setup")
    }


def drift(used: Method, fresh: Method, prompt: list[int], limit: int, rounds: int = 100) -> tuple[float, float]:
    """Does a step cost more after many prompts? Median microseconds of a step: fresh, and after `rounds` prompts.

    Both answer the same prompt in turns, so that a drifting machine does not look like a growing cost.
    """
    for _ in range(rounds):
        used.answer(prompt, limit)
    times: dict[str, list[float]] = {"fresh": [], "used": []}
    for _ in range(15):
        fresh.prepare()
        for name, method in (("fresh", fresh), ("used", used)):
            method.answer(prompt, limit)  # the matrix knows the prompt now, in both alike
            out = method.answer(prompt, limit)
            times[name].append(1e6 * out.decode_s / max(len(out.steps) - 1, 1))
    return statistics.median(times["fresh"]), statistics.median(times["used"])


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evaluation.bench_step", description=__doc__)
    parser.add_argument(
        "--model-path", default="data/embedded", help="folder or hub name (default: the embedded model)"
    )
    parser.add_argument("--shape", help="random weights of a known shape instead: vicuna-7b, llama-3-8b, ...")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--execution", default="eager", help="eager, static, compiled, graph")
    parser.add_argument("--attention", default="sdpa", help="sdpa, eager; tree with a static execution")
    parser.add_argument("--linear", default="auto", help="packed, stock; default auto, see configs/model")
    parser.add_argument("--prompts", type=int, default=14, help="of the sample bench (default 14: two a subtask)")
    parser.add_argument("--context", type=int, help="one random prompt of so many tokens instead")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tree", default="2.2.2", help="2.2.2, auto, or best:N for its best N nodes")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--drafting", default="all", help="methods whose drafting is timed: a,b,...; none; default all")
    parser.add_argument("--datastore", help="for rest, instead of the shipped one")
    parser.add_argument("--mat", type=float, help="also say the tokens/s at this MAT, e.g. 2.70")
    parser.add_argument("--draw", type=Path, help="draw the roofline: PATH.png, .svg and .pdf")
    parser.add_argument("--save", type=Path, help="also write the JSON object here")
    parser.add_argument("--against", type=Path, help="compare with an earlier run's saved object")
    return parser


def main() -> None:
    arguments = flags().parse_args()
    with user_errors():
        bench(arguments)


def prompts_for(arguments: argparse.Namespace, loaded: LoadedModel) -> list[list[int]]:
    """The sample bench's first turns, evenly over subtasks; or one random prompt of the context asked for."""
    if arguments.context or loaded.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, loaded.target.vocab_size, (arguments.context or 500,), generator=generator)
        return [ids.tolist()]
    questions = load_bench("sample", "data/sample/question.jsonl", per_category=-(-arguments.prompts // 7)).questions
    return [prompt_ids(loaded.template, loaded.tokenizer, [q.turns[0]], []) for q in questions[: arguments.prompts]]


def bench(arguments: argparse.Namespace) -> None:
    """Run all parts and print them."""
    if min(arguments.prompts, arguments.repeats, arguments.max_new_tokens) < 1:
        raise UserError("--prompts, --repeats and --max-new-tokens must be at least 1")
    settings = ModelSettings(
        "bench",
        arguments.model_path,
        dtype=arguments.dtype,
        device=arguments.device,
        attention=arguments.attention,
        linear=arguments.linear,
    )
    with exclusive(settings) as settings:
        _bench(arguments, settings)


def _bench(arguments: argparse.Namespace, settings: ModelSettings) -> None:
    before = _saved(arguments.against) if arguments.against else None
    loaded = random_model(arguments.shape, settings) if arguments.shape else load_model(settings)
    target = loaded.target
    target.execution = target.check_execution(arguments.execution)
    name, _, nodes = arguments.tree.partition(":")
    if nodes and not nodes.isdigit():
        raise UserError(f"--tree {arguments.tree}: what follows the colon must be a number of nodes")
    tree = TREE | {"name": name, "nodes": int(nodes) if nodes else 80 if name == "auto" else None}
    own = {key: method_settings(key) for key in ("hf", "vanilla", "recycling")}
    own["recycling"]["k"] = arguments.k
    methods = {key: build_method(loaded, value, tree, "hot") for key, value in own.items()}
    prompts, limit = prompts_for(arguments, loaded), arguments.max_new_tokens
    device, what = describe_device(target.device), arguments.shape or arguments.model_path
    dtype = str(target.dtype).removeprefix("torch.")
    print(f"{what} ({dtype}) on {device}; {len(prompts)} prompts, tree {arguments.tree}")
    for method in methods.values():  # warm up
        method.answer(prompts[0], limit)
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    speeds = paired_speeds(methods, prompts, limit, arguments.repeats)
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    print(f"\ntokens/s, methods taking turns, median of {arguments.repeats} (min - max):")
    for key, values in speeds.items():
        print(f"  {key:10} {medians[key]:8.1f}  ({min(values):.1f} - {max(values):.1f})")
    over_hf = statistics.median(v / h for v, h in zip(speeds["vanilla"], speeds["hf"], strict=True))
    over_vanilla = statistics.median(r / v for r, v in zip(speeds["recycling"], speeds["vanilla"], strict=True))
    print(f"  vanilla / hf {over_hf:.2f}   recycling / vanilla {over_vanilla:.2f}")

    rates = measure_rates(target.device, target.dtype)
    copied, multiplied = rates.bytes_per_second / 1e9, rates.flop_per_second / 1e9
    print(f"\nthis device: {copied:.1f} GB/s copied, {multiplied:.0f} GFLOP/s multiplied")
    result: dict[str, Any] = {"what": what, "device": device, "versions": versions(), "execution": target.execution}
    result["rates"] = dataclasses.asdict(rates)
    result |= {"tokens_per_second": medians, "vanilla_over_hf": over_hf, "recycling_over_vanilla": over_vanilla}
    context = sum(map(len, prompts)) // len(prompts) + limit // 2
    for key in ("vanilla", "recycling"):
        result[key] = describe_step(key, methods[key], prompts, limit, rates, context)
    again = build_method(loaded, own["recycling"], tree, "hot")
    fresh, used = drift(methods["recycling"], again, prompts[0], 64)
    print(f"\nrecycling: {fresh:.0f} us a step when fresh, {used:.0f} after 100 prompts ({used / fresh:.2f})")
    result |= {"fresh_us": fresh, "after_100_prompts_us": used}
    wanted = {"all": method_names(), "none": []}.get(arguments.drafting, arguments.drafting.split(","))
    if wanted and loaded.tokenizer is not None:
        result["drafting_us"] = bench_drafting(loaded, wanted, tree, arguments.datastore)
    if arguments.mat:
        result["tokens_per_second_at_mat"] = arguments.mat * 1e6 / result["recycling"]["step_us"]
        print(f"at MAT {arguments.mat}: {result['tokens_per_second_at_mat']:.0f} tokens/s decoding")
    if target.device.type == "cuda":
        result["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    if before is not None:
        _compare(before, result)
    if arguments.save:
        write_json(arguments.save, result)
    if arguments.draw:
        with styled():
            print(f"\nroofline: {save(roofline(result), arguments.draw)}")
    print(json.dumps(result))


def describe_step(
    name: str, method: Method, prompts: list[list[int]], limit: int, rates: Rates, context: int
) -> dict[str, Any]:
    """Print and return one method's step: its parts, its nodes, and how near the device's floor it comes."""
    assert method.drafter is not None
    target = method.loaded.target
    parts = phases(method, prompts, limit)
    total = sum(parts.values())
    nodes = len(method.drafter.tree) if isinstance(method.drafter, DeviceDrafter) else 1
    cost = step_cost(target, nodes, context)
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
        "launches": launches(method, prompts[0]),
    }


def _saved(path: Path) -> dict[str, Any]:
    """An earlier run's object."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found["recycling"]["step_us"], found["vanilla"]["step_us"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"--against {path}: not a saved run of this bench ({error})") from None
    return found


def _compare(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Step times and speeds beside those of the earlier run."""
    print("\nagainst the earlier run (now / before):")
    for key in ("vanilla", "recycling"):
        ratio = now[key]["step_us"] / before[key]["step_us"]
        print(f"  {key:10} step {before[key]['step_us']:.0f} -> {now[key]['step_us']:.0f} us ({ratio:.2f})")
    for key in now["tokens_per_second"]:
        ratio = now["tokens_per_second"][key] / before["tokens_per_second"][key]
        print(f"  {key:10} {ratio:.2f} x tokens/s")


if __name__ == "__main__":
    main()
