"""Time of one layer's tree attention, by kernel: ours, SDPA under a mask as transformers calls it, FlexAttention.

    python -m tools.bench_attention [--sweep]

On CUDA a graph of many layers is replayed, each with a cache of its own, so that keys and values come from memory as
they do in a model and not from the L2 cache. On a CPU the torch twin is timed at toy sizes: a test of this script. GB/s
counts each used row of the cache once, and queries and outputs; `of copy` relates it to a measured device copy.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AttentionInterface

from model.decoding.attention import Plan, TreeAttention, tree_attention_reference
from model.decoding.tree import Tree

BEYOND_L2 = 256 << 20  # bytes of keys and values that a timed graph touches; an H200's L2 holds 60 MB
Layer = tuple[torch.Tensor, torch.Tensor]
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of one layer's k and v


@dataclass(frozen=True)
class Case:
    """One point: H, Hkv, D, nodes n, committed tokens."""

    heads: int
    kv_heads: int
    dim: int
    nodes: int
    length: int

    @property
    def capacity(self) -> int:
        return 1 << (self.length + self.nodes - 1).bit_length()

    def nbytes(self, itemsize: int) -> int:
        """Bytes that must move: used keys and values once, queries and outputs once."""
        used = self.kv_heads * (self.length + self.nodes) + self.heads * self.nodes
        return 2 * used * self.dim * itemsize


def seconds(call: Call, layers: list[Layer], repeats: int) -> float:
    """Median seconds of one call, over replays of a graph (CUDA) or plain loops (CPU) of one call a layer."""

    def loop() -> None:
        for k, v in layers:
            call(k, v)

    def nothing() -> None:
        """What there is to wait for on a CPU."""

    run: Callable[[], None] = loop
    wait: Callable[[], None] = nothing
    loop()
    if layers[0][0].is_cuda:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loop()
        run, wait = graph.replay, torch.cuda.synchronize
        run()
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times) / len(layers)


def copy_bandwidth(device: str) -> float:
    """Bytes a second of a device copy, read and write counted."""
    source = torch.zeros((1 << 30) if device == "cuda" else (1 << 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    layers = [(source, target)] * 8
    return 2 * source.numel() / seconds(lambda a, b: b.copy_(a), layers, 5)


def sdpa_call(case: Case, q: torch.Tensor, ancestors: torch.Tensor) -> Call:
    """transformers' own function on the used part of the cache, with an additive mask (1, 1, n, length + n)."""
    used = case.length + case.nodes
    mask = torch.zeros(1, 1, case.nodes, used, dtype=q.dtype, device=q.device)
    mask[..., case.length :].masked_fill_(~ancestors, torch.finfo(q.dtype).min)
    module, sdpa = SimpleNamespace(num_key_value_groups=case.heads // case.kv_heads), AttentionInterface()["sdpa"]

    def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = sdpa(module, q, k[:, :, :used], v[:, :, :used], mask, scaling=case.dim**-0.5)[0]
        return output.transpose(1, 2)

    return call


def flex_call(case: Case, q: torch.Tensor, ancestors: torch.Tensor, length: torch.Tensor) -> Call:
    """FlexAttention over the whole capacity; its block mask skips what lies behind the draft."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def mask(b: torch.Tensor, h: torch.Tensor, node: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        other = row - length
        inside = (other >= 0) & (other < case.nodes)
        return (row < length) | (inside & ancestors[node, other.clamp(0, case.nodes - 1)])

    blocks = create_block_mask(mask, None, None, case.nodes, case.capacity, device=str(q.device))
    torch.compiler.reset()  # or the limit of recompilations makes later cases run uncompiled, in silence
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda k, v: compiled(q, k, v, block_mask=blocks, enable_gqa=case.heads != case.kv_heads)


def plans(chosen: Plan) -> Iterator[Plan]:
    """The neighbourhood of a plan that --sweep tries."""
    for m, n, s, stages in product((0.5, 1, 2), (32, 64), (0.5, 1, 2), (2, 3)):
        block_m, splits = int(chosen.block_m * m), int(chosen.splits * s)
        if 16 <= block_m <= 128 and 1 <= splits <= 64:
            yield replace(
                chosen, block_m=block_m, block_n=n, splits=splits, stages=stages, warps=8 if block_m == 128 else 4
            )


def measure(case: Case, dtype: torch.dtype, device: str, repeats: int, sweep: bool) -> dict[str, Any]:
    """One row of the table; a kernel that cannot run has None and the reason."""
    torch.manual_seed(0)
    count = max(1, min(64, BEYOND_L2 // case.nbytes(dtype.itemsize))) if device == "cuda" else 2
    shape = (1, case.kv_heads, case.capacity, case.dim)
    layers = [
        (torch.randn(shape, dtype=dtype, device=device), torch.randn(shape, dtype=dtype, device=device))
        for _ in range(count)
    ]
    q = torch.randn(1, case.nodes, case.heads, case.dim, dtype=dtype, device=device).transpose(1, 2)
    rng = random.Random(0)
    parents = sorted(rng.randrange(max(1, i // 2)) for i in range(1, case.nodes))
    ancestors = Tree([0, *parents]).ancestors.to(device)
    length = torch.tensor(case.length, device=device)
    sizes = (case.heads, case.kv_heads, case.dim, case.nodes, case.capacity)

    ours = TreeAttention(*sizes, length, dtype)
    ours.set_tree(ancestors)
    expected = tree_attention_reference(q, *layers[0], length, ancestors).float()
    row: dict[str, Any] = asdict(case) | {"layers": count, "backend": ours.backend, "notes": {}}
    calls: dict[str, Callable[[], Call]] = {
        "tree": lambda: partial(ours, q),
        "sdpa": lambda: sdpa_call(case, q, ancestors),
        "flex": lambda: flex_call(case, q, ancestors, length),
    }
    if device != "cuda":
        del calls["flex"]  # it would compile C++ for half a minute
    for name, make in calls.items():
        try:
            call = make()
            row[f"{name}_error"] = float((call(*layers[0]).float() - expected).abs().max())
            row[f"{name}_us"] = 1e6 * seconds(call, layers, repeats)
        except Exception as error:  # a benchmark goes on without a rival, and says so
            if name == "tree":
                raise
            row[f"{name}_us"], row["notes"][name] = None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if ours.backend == "triton":
        row["plan"] = asdict(ours.plan)
    if sweep and ours.backend == "triton":
        found = []
        for plan in plans(ours.plan):
            other = TreeAttention(*sizes, length, dtype, plan=plan)
            other.set_tree(ancestors)
            try:
                found.append((1e6 * seconds(partial(other, q), layers, repeats), asdict(plan)))
            except Exception as error:  # too much shared memory, as a rule
                row["notes"][str(plan)] = type(error).__name__
        row["best_us"], row["best_plan"] = min(found, key=lambda pair: pair[0])
    row["gb_per_s"] = case.nbytes(dtype.itemsize) / row["tree_us"] / 1e3
    return row


def main(arguments: list[str] | None = None) -> None:
    """Print the table; the last line is all of it as JSON."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--heads", nargs="+", default=["32/32/128", "32/8/128"] if cuda else ["4/4/16", "4/2/16"], help="H/Hkv/D"
    )
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 16, 24, 81] if cuda else [1, 8])
    parser.add_argument("--lengths", nargs="+", type=int, default=[100, 500, 2000, 8000] if cuda else [20, 50])
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16" if cuda else "float32"
    )
    parser.add_argument("--repeats", type=int, default=10, help="timed replays; the median counts")
    parser.add_argument(
        "--sweep", action="store_true", help="also try 36 plans around the chosen one (CUDA; slow: each is compiled)"
    )
    args = parser.parse_args(arguments)
    device, dtype = "cuda" if cuda else "cpu", getattr(torch, args.dtype)
    name = torch.cuda.get_device_name() if cuda else "CPU: the torch twin at toy sizes, a test of this script"
    copy = copy_bandwidth(device)
    print(f"{name}, torch {torch.__version__}, {args.dtype}, copy {copy / 1e9:.0f} GB/s")
    columns = ["H/Hkv/D", "n", "length", "tree us", "sdpa us", "flex us", "best us", "GB/s", "of copy", "max error"]
    print("  ".join(f"{column:>9}" for column in columns))
    rows = []
    for heads, nodes, length in product(args.heads, args.nodes, args.lengths):
        with torch.inference_mode():
            h, kv, dim = map(int, heads.split("/"))
            row = measure(Case(h, kv, dim, nodes, length), dtype, device, args.repeats, args.sweep)
        row["of_copy"] = row["gb_per_s"] * 1e9 / copy
        rows.append(row)
        times = [f"{row[f'{c}_us']:.1f}" if row.get(f"{c}_us") else "-" for c in ("tree", "sdpa", "flex", "best")]
        cells = [heads, nodes, length, *times, f"{row['gb_per_s']:.0f}", f"{row['of_copy']:.0%}", row["tree_error"]]
        print("  ".join(f"{c:9.1e}" if isinstance(c, float) else f"{c:>9}" for c in cells), flush=True)
        for rival, why in row["notes"].items():
            print(f"    {rival}: {why}")
    print(json.dumps({"device": name, "dtype": args.dtype, "copy_gb_per_s": copy / 1e9, "rows": rows}))


if __name__ == "__main__":
    main()
