"""python -m evaluation.bench_step [model=NAME model.KEY=VALUE ...]: the time of a step by the
number of drafted nodes.

Times transformers' `generate`, plain decoding and recycling (or dynamic recycling) in turns: eager
steps and, on CUDA, captured steps, `generate` with compiled steps, and the floor: the time in which
weights and cache can be read. Random weights of a known shape (--shape) give times but no
acceptance. The last line is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from itertools import groupby, product
from typing import Any

import torch
from torch.utils.benchmark import Timer
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from model.engine import Drafter, Request, Target, Tree, decode
from model.engine.loop.batch import decode_batch
from model.errors import Parser, UserError
from model.methods.dynamic.dynamic import DynamicRecycling
from model.methods.vanilla import Vanilla
from model.recycling import TokenRecycling
from model.recycling.templates import best_order
from model.tuning import captures, choose_execution, choose_threads

from .configuration.jobs import group_settings
from .errors import user_errors
from .loading.devices import exclusive
from .loading.models import (
    SHAPES,
    LoadedModel,
    ModelSettings,
    devices_in_words,
    load_model,
    random_model,
)
from .loading.stock import stock_generate
from .records.provenance import git_state, versions
from .tables.rendering import aligned

METHODS = ("recycling", "dynamic")
K = 8  # candidates per token
STEPS = 8  # steps timed in a row; few, so that the context hardly grows
UNCOUNTED = 2  # steps before these: the first one forwards the prompt
WARM_UP = 1  # turns that are not counted: they allocate memory, load kernels and capture steps
LARGE = 1 << 30  # bytes; many times what a processor's own caches hold
READS = 20  # of them in a row
HF = "hf_compiled", "hf"  # transformers' generate, with compiled steps and without
MOST = 512  # maximum number of nodes, and of sequences


def main() -> None:
    parser = Parser(prog="python -m evaluation.bench_step", description=__doc__)
    parser.add_argument(
        "overrides", nargs="*", help="as for evaluation.run: model=NAME, model.path=..."
    )
    parser.add_argument("--shape", help=f"random weights instead of a model: {', '.join(SHAPES)}")
    parser.add_argument(
        "--nodes",
        default="1,2,4,8,16,24,32,48,64,80",
        help="sizes of drafts (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        default="1",
        help="sequences decoded together (default: %(default)s; several: 1,4,16)",
    )
    parser.add_argument(
        "--method", choices=METHODS, default=METHODS[0], help="what drafts (default: %(default)s)"
    )
    parser.add_argument(
        "--context", type=int, help="tokens before a step (default: 500, or half of the model's)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of all sizes; medians are printed (default: 5)"
    )
    with user_errors("nothing was measured to its end"):
        options = parser.parse_intermixed_args()
        settings = model_settings(options.overrides, options.shape)
        sizes = sorted({0, *numbers("--nodes", options.nodes)})
        batches = sorted({*numbers("--batch", options.batch)})
        if options.rounds < 1:
            raise UserError(f"--rounds {options.rounds}: must be at least 1")
        with exclusive(settings) as settings:
            choose_threads()
            loaded = (
                random_model(options.shape, settings) if options.shape else load_model(settings)
            )
            result = bench(
                loaded, sizes, batches, options.context, options.rounds, method=options.method
            )
        print(f"{table(result)}\n{json.dumps(result)}")


def model_settings(overrides: list[str], shape: str | None) -> ModelSettings:
    model = group_settings(overrides, "model")["model"]
    if not shape:
        return ModelSettings(**model)
    for override in overrides:
        if override.startswith(("model=", "model.path=")):
            raise UserError(
                f"{override}: --shape {shape} takes random weights; leave out one of the two"
            )
    return ModelSettings(**model | {"name": shape, "path": "random weights"})


def numbers(flag: str, text: str) -> list[int]:
    parts = text.split(",")
    least = int(flag == "--batch")
    if not all(part.strip().isdecimal() and least <= int(part) <= MOST for part in parts):
        raise UserError(
            f"{flag} {text}: must be whole numbers from {least} to {MOST} with commas between them"
        )
    return [*map(int, parts)]


def bench(
    loaded: LoadedModel,
    sizes: list[int],
    batches: list[int],
    context: int | None,
    rounds: int,
    *,
    method: str,
) -> dict[str, Any]:
    """Measure and return everything that is printed.

    Args:
        sizes: nodes of the drafts; 0 is plain decoding.
        batches: sequences decoded together.
        context: tokens before a step; None: 500, or half of the model's context.
    """
    target = loaded.target
    deepest = max((len(path) for path in best_order(max(sizes), K)), default=0)
    room = target.context - (UNCOUNTED + STEPS) * (2 + deepest)
    context = min(500, target.context // 2) if context is None else context
    if not 2 <= context <= room:
        raise UserError(
            f"--context {context}: must be from 2 to {room} for {loaded.settings.name} and these"
            " --nodes"
        )
    model = dataclasses.asdict(loaded.settings)
    model["dtype"] = str(target.dtype).removeprefix("torch.")
    result: dict[str, Any] = {
        "model": model,
        "linear": str(target.linear),
        "device": devices_in_words(loaded),
        "versions": versions(),
        "git": git_state(),
        "context": context,
        "rounds": rounds,
        "method": method,
    }
    packages = result["versions"]
    print(
        f"{model['name']} ({model['dtype']}) on {result['device']}; torch {packages['torch']},"
        f" transformers {packages['transformers']}\n{context} tokens of context; median of {rounds}"
        f" rounds of {STEPS} steps, in turns\nmeasuring ...",
        flush=True,
    )
    prompt = torch.randint(
        3, target.vocab_size, (context,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    executions = ["eager"]
    if captures(target):
        # from here on, steps use kernels that the trial chose
        execution = choose_execution(target)
        result["trial"] = execution.why
        print(execution.why, flush=True)
        if execution.name not in executions:  # what the trial refused is not timed
            executions.append(execution.name)
    # by what is timed, a function that takes a turn and returns the seconds of a step
    turns: dict[Any, Callable[[], float]] = {"hf": partial(hf_step_s, loaded, prompt, False)}
    if captures(target):
        if not model["quantize"]:  # such weights do not say what they take
            result["floor_s"] = floor_of(target, prompt)
        try:
            compiled = partial(hf_step_s, loaded, prompt, True)
            compiled()
            turns["hf_compiled"] = compiled
        except UserError as error:  # no compiler is found, or a model has no such cache
            print(f"left out: {error}", flush=True)

    target.reserve(1 + max(sizes))
    for size, way, nodes in product(batches, executions, sizes):
        drafter = drafter_of(target, nodes, method)
        turns[way, size, nodes] = partial(drafted_step_s, target, drafter, prompt, way, size)

    seconds = defaultdict[Any, list[float]](list)
    for number in range(WARM_UP + rounds):
        for timed, take_turn in turns.items():
            measured = take_turn()
            if number >= WARM_UP:
                seconds[timed].append(measured)

    median_s = {timed: statistics.median(of_turns) for timed, of_turns in seconds.items()}
    result |= {f"{name}_s": median_s[name] for name in HF if name in median_s}
    result["steps"] = []
    for size, way, nodes in product(batches, executions, sizes):
        row = {
            "execution": way,
            "batch": size,
            "nodes": nodes,
            "seconds": median_s[way, size, nodes],
            "over_plain": median_s[way, size, nodes] / median_s[way, size, 0],
        }
        result["steps"].append(row)
    return result


def floor_of(target: Target, prompt: list[int]) -> dict[str, float]:
    """Return the seconds in which a large read would read the weights, and one sequence's cache.

    An embedding counts if it is the head, too. Of experts and windows a step reads fewer.
    """
    model = target.model
    large = torch.ones(LARGE // 4, device=target.device)
    weights = {*model.parameters()} - {model.get_input_embeddings().weight}
    weights |= {model.get_output_embeddings().weight}
    with target.cache(1) as cache:
        target.prefill(cache, prompt)
        tensors = (
            getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")
        )
        cached = [kv[:, :, : cache.length] for kv in tensors if kv is not None]
    byte_s = Timer("large.sum()", globals={"large": large}).timeit(READS).mean / large.nbytes
    parts = {"weights": weights, "cache": cached}
    return {name: byte_s * sum(tensor.nbytes for tensor in part) for name, part in parts.items()}


class Arrivals(BaseStreamer):
    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def hf_step_s(loaded: LoadedModel, prompt: list[int], compiled: bool) -> float:
    most = 2 + STEPS  # the prompt and the first step are not counted
    config = GenerationConfig(
        max_new_tokens=most, min_new_tokens=most, do_sample=False, pad_token_id=0
    )
    arrivals = Arrivals()
    stock_generate(loaded, [prompt], config, compiled=compiled, streamer=arrivals)
    return (arrivals.times[-1] - arrivals.times[-1 - STEPS]) / STEPS


def drafter_of(target: Target, nodes: int, method: str) -> Drafter:
    if not nodes:
        return Vanilla(target.device)
    if method == "dynamic":
        return DynamicRecycling(target.vocab_size, nodes=nodes, k=K, device=target.device)
    tree = Tree.from_rank_paths(best_order(nodes, K))
    return TokenRecycling(target.vocab_size, tree, k=K, device=target.device)


def drafted_step_s(
    target: Target, drafter: Drafter, prompt: list[int], execution: str, size: int
) -> float:
    with closing(drafted_steps(target, drafter, prompt, execution, size)) as steps:
        for _ in range(UNCOUNTED):
            next(steps)
        target.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            next(steps)
        target.synchronize()  # the device may still be busy
        return (time.perf_counter() - start) / STEPS


def drafted_steps(
    target: Target, drafter: Drafter, prompt: list[int], execution: str, size: int
) -> Generator[Any, None, Any]:
    """Decode, and yield after each step; what the last turn forwarded is reused."""
    settings = dict[str, Any](
        max_new_tokens=target.context - len(prompt), execution=execution, reuse=True
    )
    if size == 1:
        yield from decode(target, drafter.session(), prompt, **settings)
        return
    requests = [(prompt, Request(**settings))] * size
    for number, _ in decode_batch(target, drafter, requests, size):
        if number == size - 1:
            yield


def table(result: dict[str, Any]) -> str:
    lines = []
    floor = result.get("floor_s")
    for (execution, batch), group in groupby(
        result["steps"], lambda row: (row["execution"], row["batch"])
    ):
        steps = [(str(row["nodes"]), row["seconds"]) for row in group]
        over = {"/ plain": steps[0][1]}
        references = {}
        if floor:
            over["/ floor"] = floor["weights"] + batch * floor["cache"]
            references["floor"] = over["/ floor"]
        references |= {name: result[f"{name}_s"] for name in HF if f"{name}_s" in result}
        if batch == 1:
            steps = [*references.items(), *steps]
        cells = [["nodes", "ms", *over]]
        for name, seconds in steps:
            ratios = [f"{seconds / other:.2f}" for other in over.values()]
            cells.append([name, f"{1e3 * seconds:.3f}", *ratios])
        title = execution if batch == 1 else f"{execution}, batch {batch}"
        lines += ["", f"{title}:", *map(str.rstrip, aligned(cells))]
    break_even = (
        "Drafts of n nodes pay where their MAT is above their time / plain, the break-even MAT."
    )
    return "\n".join([*lines, "", f"0 nodes is plain decoding. {break_even}"])


if __name__ == "__main__":
    main()
