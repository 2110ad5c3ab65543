"""How a run's steps are executed: as it was asked for, or by `auto` the fastest way that passes a trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from model.decoding import Draft, Target, Tree, generate
from model.decoding.static_step import StaticSteps
from model.errors import UserError
from model.recycling import TokenRecycling, build_template
from model.vanilla import Vanilla

from . import processes
from .errors import one_line
from .models import LoadedModel

# What auto tries on a CUDA device, the fastest first: an execution, and whether nodes attend by the tree kernel.
WAYS = (("compiled", True), ("compiled", False), ("graph", True), ("graph", False))
NODES = 12  # below the root of the trial's draft
TOKENS = 24  # of the trial's answers
APART = {torch.float32: 1e-3}  # how far logits of a step may be from eager ones, over the greatest of these
APART_OF_HALVES = 5e-2


@dataclass(frozen=True)
class Execution:
    """How steps are taken.

    Attributes:
        tree_attention: nodes attend by this project's kernel.
        passed_over: what auto tried before, and why it was not taken; one line, or "".
    """

    name: str
    tree_attention: bool
    passed_over: str = ""

    def take(self, target: Target) -> None:
        """Let a target take steps so from now on. Raises UserError if it cannot, or there is none of that name."""
        target.attend_by_tree(self.tree_attention)
        target.execution = target.check_execution(self.name)


_chosen: WeakKeyDictionary[Target, Execution] = WeakKeyDictionary()  # by auto


def choose_execution(name: str, loaded: LoadedModel, timed: bool = True, reads_text: bool = False) -> Execution:
    """The execution that was asked for, or what auto makes of this model on this device; tried once a loaded model.

    On one CUDA device auto takes the first of WAYS that gives eager decoding's logits and text in a trial, and eager
    if none does: compilers and kernels fail there. Elsewhere it is eager, as where what is sampled reads the text:
    on a CPU compiling takes ten seconds to two minutes for each method, more than a short run.

    Raises:
        UserError: not with a device map, or not untimed.
    """
    target, own = loaded.target, loaded.settings.attention
    # no trial with several ranks: one that fails it leaves the others waiting
    several = len(target.devices) > 1 or processes.world_size() > 1
    if name not in ("auto", "eager"):
        if not timed:
            raise UserError(
                f"execution={name}: with timed=false the methods share eager forwards; leave out one of the two"
            )
        if len(target.devices) > 1:
            raise UserError(
                f"execution={name}: a device map's model takes eager steps only; with model.tensor_parallel=true each "
                "process has one device, and they take any"
            )
    if name != "auto" or not timed or reads_text or several or target.device.type != "cuda":
        return Execution("eager" if name == "auto" else name, own == "tree")
    if target not in _chosen:
        _chosen[target] = tried(target, own)
    return _chosen[target]


def tried(target: Target, attention: str) -> Execution:
    """The first of WAYS that passes, or eager steps. `attention`: as in configs/model, which may leave some out."""
    ways = [(name, kernel) for name, kernel in WAYS if attention == "auto" or kernel == (attention == "tree")]
    failed: list[str] = []
    for name, tree_attention in ways:
        why = trial(target, name, tree_attention)
        if not why:
            return Execution(name, tree_attention, "; ".join(failed))
        failed.append(f"{name}{' with the tree kernel' if tree_attention else ''}: {why}")
    return Execution("eager", False, "; ".join(failed))


def trial(target: Target, name: str, tree_attention: bool) -> str:
    """Decode some steps so, and compare the logits of a draft, and a text, with eager ones: what is wrong, or "".

    Any error at all counts: compilers, kernels and drivers raise what they like, and eager steps need none of them.
    """
    try:
        prompt = [3 + i % 97 for i in range(40)]
        tree = build_template("best", nodes=NODES).on(target.device)
        draft = Draft(tree, torch.arange(3, 3 + len(tree), device=target.device))
        target.attend_by_tree(False)
        expected = _logits(target, "eager", prompt, draft)
        text = generate(target, Vanilla(target.device), prompt, max_new_tokens=TOKENS).tokens
        target.attend_by_tree(tree_attention)
        apart = (_logits(target, name, prompt, draft) - expected).abs().max().item() / expected.abs().max().item()
        if not apart <= _tie(target):  # NaN is none
            return f"its logits are {apart:.1e} of the greatest away from eager ones"
        drafters = (Vanilla(target.device), TokenRecycling(target.vocab_size, tree, device=target.device))
        found = [generate(target, drafter, prompt, max_new_tokens=TOKENS).tokens for drafter in drafters]
        return next(filter(None, (_wrong(target, prompt, text, answer) for answer in found if answer != text)), "")
    except Exception as error:
        return f"{type(error).__name__}: {one_line(error)[:200]}"


def _tie(target: Target) -> float:
    """What is no difference between two logits, over the greatest of them."""
    return APART.get(target.dtype, APART_OF_HALVES)


def _wrong(target: Target, prompt: list[int], text: list[int], found: list[int]) -> str:
    """Where an answer leaves the eager one, if that is no tie: what would be so were a step put together wrongly."""
    at = next(i for i, (one, other) in enumerate(zip(text, found, strict=True)) if one != other)
    before = prompt + text[:at]
    target.attend_by_tree(False)
    root = Draft(Tree.chain(0).on(target.device), torch.tensor(before[-1:], device=target.device))
    logits = _logits(target, "eager", before, root)[0]
    gap = (logits[text[at]] - logits[found[at]]).abs().item() / logits.abs().max().item()
    return "" if gap <= _tie(target) else f"its token {at} is {found[at]}, eager decoding's {text[at]}"


@torch.inference_mode()
def _logits(target: Target, name: str, prompt: list[int], draft: Draft) -> Any:
    """Of a draft behind a prompt, float32 (n, V)."""
    n = len(draft.tree)
    target.execution = target.check_execution(name)
    with target.cache(n) as cache:
        target.prefill(cache, prompt)
        if name == "eager":
            return target.forward(cache, draft).float()
        drafter = TokenRecycling(target.vocab_size, draft.tree, device=target.device)
        step, launch = StaticSteps(target).fed(cache, n, drafter, lambda phase: None)
        for _ in range(2):  # what a first run leaves behind is seen by the second
            step.feed(draft, cache.length)
            launch()
        return step.logits.float().clone()
