"""python -m evaluation.bench_step: where a step's time goes, on any model shape, next to plain decoding and the floor.

The last line of the output is one JSON object with every figure; `--against FILE` compares with a saved one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from model.errors import UserError
from model.files import write_json

from .errors import user_errors
from .figures.costs import roofline
from .figures.style import save, styled
from .loading.locks import exclusive
from .loading.models import load_model, random_model
from .loading.settings import ModelSettings
from .records.provenance import describe_device, versions
from .timing.floor import measure_rates
from .timing.step_bench import (
    StepBench,
    bench_drafting,
    method_names,
    print_comparison,
    prompts_for,
    read_saved,
    tree_settings,
)


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
    parser.add_argument("--linear", default="auto", help="onednn, fused, torch; default auto, see configs/model")
    parser.add_argument("--quantize", help="int8, int4; see configs/model")
    parser.add_argument("--prompts", type=int, default=14, help="of the sample bench (default 14: two a subtask)")
    parser.add_argument("--context", type=int, help="one random prompt of that many tokens instead")
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
        if min(arguments.prompts, arguments.repeats, arguments.max_new_tokens) < 1:
            raise UserError("--prompts, --repeats and --max-new-tokens must be at least 1")
        before = read_saved(arguments.against) if arguments.against else None
        options = {key: getattr(arguments, key) for key in ("dtype", "device", "attention", "linear", "quantize")}
        with exclusive(ModelSettings("bench", arguments.model_path, **options)) as settings:
            result = bench(arguments, settings)
        if before is not None:
            print_comparison(before, result)
        if arguments.save:
            write_json(arguments.save, result)
        if arguments.draw:
            with styled():
                print(f"\nroofline: {save(roofline(result), arguments.draw)}")
        print(json.dumps(result))


def bench(arguments: argparse.Namespace, settings: ModelSettings) -> dict[str, Any]:
    """Run all parts and print them."""
    tree = tree_settings(arguments.tree)
    loaded = random_model(arguments.shape, settings) if arguments.shape else load_model(settings)
    target = loaded.target
    target.execution = target.check_execution(arguments.execution)
    prompts = prompts_for(loaded, arguments.prompts, arguments.context)
    steps = StepBench(loaded, tree, arguments.k, prompts, arguments.max_new_tokens)
    device, what = describe_device(target.device), arguments.shape or arguments.model_path
    dtype = str(target.dtype).removeprefix("torch.")
    if arguments.quantize:
        what = f"{what}, weights in {arguments.quantize}"
    print(f"{what} ({dtype}) on {device}; {len(prompts)} prompts, tree {arguments.tree}")
    steps.warm_up()
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    speeds = steps.speeds(arguments.repeats)
    rates = measure_rates(target.device, target.dtype)
    copied, multiplied = rates.bytes_per_second / 1e9, rates.flop_per_second / 1e9
    print(f"\nthis device: {copied:.1f} GB/s copied, {multiplied:.0f} GFLOP/s multiplied")
    result: dict[str, Any] = {"what": what, "device": device, "versions": versions(), "execution": target.execution}
    result |= {"rates": dataclasses.asdict(rates)} | speeds
    result |= {name: steps.step(name, rates) for name in ("vanilla", "recycling")} | steps.drift()
    wanted = {"all": method_names(), "none": []}.get(arguments.drafting, arguments.drafting.split(","))
    if wanted and loaded.tokenizer is not None:
        result["drafting_us"] = bench_drafting(loaded, wanted, tree, arguments.datastore)
    if arguments.mat:
        result["tokens_per_second_at_mat"] = arguments.mat * 1e6 / result["recycling"]["step_us"]
        print(f"at MAT {arguments.mat}: {result['tokens_per_second_at_mat']:.0f} tokens/s decoding")
    if target.device.type == "cuda":
        result["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    return result


if __name__ == "__main__":
    main()
