"""Choose how steps are executed on this machine, and how many threads compute."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import psutil
import torch

from .devices import give_back, synchronize
from .engine import Draft, Drafter, Needs, Sampling, Target, Tree, generate
from .engine.graphs.compiled_layers import CompiledLayers
from .engine.loop.step import Executor
from .errors import UserError, one_line
from .methods.vanilla import Vanilla
from .recycling import TokenRecycling, build_template
from .weights.linear import LAYOUTS, is_narrow

GRAPH = "graph"  # what auto tries on a CUDA device
COMPILING = (
    "compiling kernels for this GPU: some 40 s in each process, less once PyTorch has some of them"
    " on disk"
)
TREE_KERNEL = "attention in a kernel of its own"
COMPILED = "layers compiled whole"
NODES = 12  # nodes below the root of the trial's draft and of its tree of the text
# Nodes of the drafts whose logits are compared. With 1 to 8 heads of a group, they need each tile
# of the kernel; layers are compiled for one row and for more.
SIZES = 0, 3, 7, NODES, 24, 80
# Tokens of the trial's prompt, the first that leave room for drafts: attention in parts then reads
# 768 or 256 columns of the cache, the last part of which no row sees
PROMPTS = 520, 100
TOKENS = 24  # tokens of each of the trial's answers
RUNS = 8  # runs of each step whose logits are compared and whose time is measured
# Tolerance for logits: TIMES the difference of two eager forwards, and at least ROUNDINGS roundings
TIMES = 8
ROUNDINGS = 4


@dataclass(frozen=True)
class Execution:
    name: str  # as `decode` takes it
    why: str = ""  # one line on why auto chose it; "" if the caller chose it or there was no choice

    def under(self, sampling: Sampling) -> str:
        """Return `name`, or eager if auto chose it and sampling reads the text."""
        return "eager" if self.why and sampling.reads_text else self.name


# files of a control group that hold its quota of cores and the quota's period: version 2, 1
QUOTAS = [
    ["sys/fs/cgroup/{}/cpu.max"],
    ["sys/fs/cgroup/cpu/{}/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/{}/cpu.cfs_period_us"],
]


def usable_cores(root: Path = Path("/")) -> float:
    """Return the number of cores that this process's control groups leave it."""
    limits = [float(psutil.cpu_count() or 1)]
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        groups = []

    for group in {Path(line.split(":", 2)[2].lstrip("/")) for line in groups}:
        for name in (group, *group.parents):  # each level has a limit
            for files in QUOTAS:
                with suppress(OSError, ValueError):  # no file here, or no limit: "max"
                    texts = [(root / file.format(name)).read_text() for file in files]
                    quota, period = map(int, " ".join(texts).split())
                    limits += [quota / period] * (quota > 0)  # -1: no limit

    return min(limits)


def busy_cores(seconds: float = 0.2) -> float:
    before = _computed()
    start = time.perf_counter()
    time.sleep(seconds)
    wall = time.perf_counter() - start
    beyond = (psutil.cpu_count() or 1) - usable_cores()
    return max(0.0, (_computed() - before) / wall - beyond)


def _computed() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0) - time.process_time())


def free_cores() -> int:
    return max(1, int(usable_cores() - round(busy_cores())))


_threads = 0, ""  # the number that `choose_threads` set, and why


def choose_threads(threads: int | None = None, why: str = "asked for") -> str:
    """Set torch's threads: this number, OMP_NUM_THREADS, or the free cores, at most torch's own.

    If one thread of a product gets no core, all are 20 to 100 times as slow. Returns a notice if
    other processes leave too few cores.
    """
    global _threads
    before = torch.get_num_threads()
    notice = ""
    if threads is not None and threads < 1:
        raise UserError(f"threads={threads}: must be 1 or more")
    if threads is None and os.environ.get("OMP_NUM_THREADS"):
        threads = before
        why = "OMP_NUM_THREADS"
    elif threads is None:
        free = free_cores()
        threads = min(before, free)
        why = f"{free} of {usable_cores():g} cores were free"
        if free < before:
            notice = f"threads: {threads}, as {why}; OMP_NUM_THREADS sets another number"
    torch.set_num_threads(threads)
    _threads = threads, why
    return notice


def threads_why() -> str:
    return _threads[1] if _threads[0] == torch.get_num_threads() else ""


_chosen: WeakKeyDictionary[Target, Execution] = WeakKeyDictionary()  # auto's choices


def choose_execution(target: Target, name: str = "auto") -> Execution:
    """Return the requested execution; auto runs a `trial` on one CUDA device, else is eager."""
    if name != "auto":
        return Execution(target.check_execution(name))
    if not captures(target):
        return Execution("eager")
    if target not in _chosen:
        _chosen[target] = trial(target)
    return _chosen[target]


def captures(target: Target) -> bool:
    return target.device.type == "cuda" and not target.no_fixed_shapes


def described(target: Target, execution: Execution) -> dict[str, str]:
    why = execution.why or ("" if captures(target) else "graphs are for one CUDA device")
    kind = target.copies.kind
    second_copy = kind == "half" and not is_narrow(target.model)
    what = LAYOUTS[kind] + (", a second copy of them" if second_copy else "")
    measured = target.linear.measured and f"; measured: {target.linear.measured}"
    threads = str(torch.get_num_threads())
    if because := threads_why():
        threads += f" ({because})"
    return {
        "execution": f"{execution.name} ({why})" if why else execution.name,
        **({"threads": threads} if target.device.type == "cpu" else {}),
        "linear": f"{target.linear} ({what}{measured})",
        **({} if target.lean is None else {"layers": str(target.lean)}),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": ", ".join(map(str, target.devices)),
        "context": f"{target.context} tokens",
    }


def trial(target: Target) -> Execution:
    """Compare graphs' logits of drafts and decoded text with those of eager steps."""
    steps = _Trial(target)
    if why := _failure(target, steps.difference):
        return Execution("eager", f"{GRAPH} failed its trial: {why}")
    # compiled kernels are kept in graphs if they are right and faster
    return Execution(
        GRAPH, f"a trial gave eager steps' logits and text{_try_kernels(target, steps)}"
    )


def _try_kernels(target: Target, steps: _Trial) -> str:
    plain_s = steps.seconds
    outcome = ""
    if target.device.type == "cuda":
        print(COMPILING, file=sys.stderr, flush=True)
    attends = target.can_attend_by_table
    if attends and target.no_kernel:
        attends = False
        outcome = f"; without {TREE_KERNEL}: {target.no_kernel}"
    for by_table, compiles in ((True, True), (False, True), (True, False)):
        if by_table and not attends:
            continue
        names = [TREE_KERNEL] * by_table + [COMPILED] * compiles
        why = _failure(target, partial(_with_kernels, target, steps, by_table, compiles))
        if not why and steps.seconds >= plain_s:
            why = "it is no faster"
        if not why:
            return (
                f"{outcome}; with {' and '.join(names)}, {steps.seconds / plain_s:.1f} of the time"
            )
        outcome += f"; without {' and '.join(names)}: {why}"
        target.attends_by_table = False
        target.kernels = nullcontext()
    return outcome


def _with_kernels(target: Target, steps: _Trial, by_table: bool, compiles: bool) -> str:
    target.attends_by_table = by_table
    if compiles:
        target.kernels = CompiledLayers(target)
    return steps.difference()


def _failure(target: Target, difference: Callable[[], str]) -> str:
    """Return what is wrong with graphs, or "".

    Kernels, compilers and drivers may raise anything. After an illegal access, torch's next call
    fails, too: it is made here, and raises UserError.
    """
    try:
        why = difference()
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(error)[:200]}"
    if why:
        target.caches.drop()
    try:  # by now the error and its frames are freed
        gc.collect()
        synchronize(target.device)
        give_back(target.device)
    except Exception as error:
        raise UserError(
            f"execution=auto: the trial of {GRAPH} steps left {target.device} unusable ({why}; then"
            f" {one_line(error)[:100]}); restart with execution=eager"
        ) from None
    return why


class _Trial:
    def __init__(self, target: Target) -> None:
        self.target = target
        self.seconds = 0.0
        length = next((n for n in PROMPTS if 2 * n <= target.context), target.context // 2)
        self._prompt = [3 + i % 40 for i in range(length)]
        trees = [build_template("best", nodes=nodes) if nodes else Tree.chain(0) for nodes in SIZES]
        self._drafts = [_draft(target, tree) for tree in trees]

    @cached_property
    def _eager(self) -> tuple[float, list[Any]]:
        return _tolerance(self.target, self._prompt), _logits(
            self.target, self._prompt, self._drafts
        )

    def difference(self) -> str:
        target = self.target
        prompt = self._prompt
        tolerance, expected = self._eager
        every, self.seconds = _graph_logits(target, prompt, self._drafts)
        for logits, eager in zip(every, expected, strict=True):
            error = _error(logits, eager)
            if not error <= tolerance:  # also if it is NaN
                limit = f"{tolerance:.1e} at most"
                return (
                    f"its logits are {error:.1e} of the greatest away from eager ones, which differ"
                    f" by {limit}"
                )
        tree = self._drafts[SIZES.index(NODES)].tree
        drafters = (
            Vanilla(target.device),
            TokenRecycling(target.vocab_size, tree, device=target.device),
        )
        equal = all(_gap(target, prompt, drafter) <= tolerance for drafter in drafters)
        return "" if equal else "its text is not eager decoding's"


def _error(logits: Any, expected: Any) -> float:
    """Return the largest error of logits (n, V) relative to its row's maximum."""
    errors: Any = (logits - expected).abs().amax(1) / expected.abs().amax(1)
    return float(errors.amax())


@torch.inference_mode()
def _tolerance(target: Target, prompt: list[int]) -> float:
    draft = _draft(target, Tree.chain(NODES))
    (masked,) = _logits(target, prompt, [draft])
    with target.cache(len(draft.tree)) as cache:
        plain = target.prefill(cache, [*prompt[:-1], int(draft.tokens[0])], draft).logits
    return max(TIMES * _error(plain.float(), masked), ROUNDINGS * torch.finfo(target.dtype).eps)


def _gap(target: Target, prompt: list[int], drafter: Drafter) -> float:
    """Return how far a graph's answer is below eager steps' greatest logits, over these."""
    answer = generate(target, drafter, prompt, max_new_tokens=TOKENS, execution=GRAPH).tokens
    before = torch.tensor([prompt[-1], *answer[:-1]], device=target.device)
    draft = Draft(Tree.chain(len(answer) - 1).on(target.device), before)
    (logits,) = _logits(target, prompt, [draft])  # (n, V)
    of_answer = logits[torch.arange(len(answer)), answer]
    return float(((logits.amax(1) - of_answer) / logits.abs().amax(1)).max())


def _draft(target: Target, tree: Tree) -> Draft:
    tokens = torch.arange(3, 3 + len(tree), device=target.device) % target.vocab_size
    return Draft(tree.on(target.device), tokens)


@torch.inference_mode()
def _logits(target: Target, prompt: list[int], drafts: list[Draft]) -> list[Any]:
    with target.cache(max(len(draft.tree) for draft in drafts)) as cache:
        target.prefill(cache, prompt)
        return [target.forward(cache, draft).logits.float() for draft in drafts]


@torch.inference_mode()
def _graph_logits(
    target: Target, prompt: list[int], drafts: list[Draft]
) -> tuple[list[Any], float]:
    every = []
    seconds = 0.0
    with target.cache(max(len(draft.tree) for draft in drafts)) as cache:
        target.prefill(cache, prompt)
        executor = Executor(target, target.device, GRAPH)
        for draft in drafts:
            drafter = TokenRecycling(target.vocab_size, draft.tree, device=target.device)
            drafter.needs = Needs(logits=True)
            times = list[float]()
            for _ in range(RUNS):  # each run sees what the previous one wrote
                target.synchronize()
                start = time.perf_counter()
                (out,) = executor.forward(cache, {0: draft}, drafter)
                target.synchronize()
                times.append(time.perf_counter() - start)
            assert out.logits is not None
            every.append(out.logits.float().clone())
            seconds += min(times)
    return every, seconds
