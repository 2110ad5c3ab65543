"""How a run's steps are executed: as it was asked for, or by `auto` captured ones where they pass a trial."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from model.decoding import Draft, Target, Tree, generate
from model.decoding.devices import give_back, synchronize
from model.decoding.step import Executor, unmarked
from model.errors import UserError
from model.recycling import TokenRecycling, build_template
from model.vanilla import Vanilla

from ..errors import one_line
from . import processes
from .models import LoadedModel

CAPTURED = "graph"  # what auto tries on a CUDA device
NODES = 12  # below the root of the trial's draft
TOKENS = 24  # of the trial's answers
# A difference of logits that is none: so many times what two eager forwards differ by, and at least so many roundings
TIMES, ROUNDINGS = 8, 4


@dataclass(frozen=True)
class Execution:
    """How steps are taken.

    Attributes:
        tree_attention: nodes attend by this project's kernel.
        why: what auto took it for, on one line; "" where it was asked for or nothing else could be.
    """

    name: str
    tree_attention: bool
    why: str = ""

    def take(self, target: Target) -> None:
        """Let a target take steps so from now on. Raises UserError if it cannot, or there is none of that name."""
        target.attend_by_tree(self.tree_attention)
        target.execution = target.check_execution(self.name)


_chosen: WeakKeyDictionary[Target, Execution] = WeakKeyDictionary()  # by auto


def choose_execution(name: str, loaded: LoadedModel, timed: bool = True, reads_text: bool = False) -> Execution:
    """The execution that was asked for, or what auto makes of this model on this device; tried once a loaded model.

    On one CUDA device auto takes captured steps where they give eager decoding's logits and text in a trial, else
    eager ones. Elsewhere it is eager, as where what is sampled reads the text. Compiled steps and the tree kernel are
    taken by name: they take minutes to compile, and the kernel was never run on a GPU by this project.

    Raises:
        UserError: not with a device map, or not untimed; model.attention=tree, whose steps fail the trial; a trial
            that left the device unusable.
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
    """Captured steps if they pass, or eager ones. `attention`: as in configs/model."""
    by_tree = attention == "tree"
    why = trial(target, CAPTURED, by_tree)
    if not why:
        return Execution(CAPTURED, by_tree, "a trial gave eager steps' logits and text")
    if by_tree:
        raise UserError(f"model.attention=tree: steps failed their trial ({why}); use model.attention=sdpa")
    return Execution("eager", False, f"{CAPTURED} failed its trial: {why}")


def trial(target: Target, name: str, tree_attention: bool) -> str:
    """Decode some steps so, and compare the logits of a draft, and a text, with eager ones: what is wrong, or "".

    Any error at all counts: compilers, kernels and drivers raise what they like, and eager steps need none of them.

    Raises:
        UserError: it failed in a way that later steps would not survive, either.
    """
    try:
        return _differs(target, name, tree_attention)
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(error)[:200]}"
    _recover(target, name, why)
    return why


def _recover(target: Target, name: str, why: str) -> None:
    """Leave nothing of a trial that raised. After an illegal access, or a capture that was broken off before torch
    2.12, torch fails at whatever comes next, somewhere else: so it is asked here."""
    try:
        gc.collect()
        synchronize(target.device)
        give_back(target.device)
    except Exception as error:
        raise UserError(
            f"execution=auto: the trial of {name} steps left {target.device} unusable ({why}; then "
            f"{one_line(error)[:100]}); restart with execution=eager"
        ) from None


def _differs(target: Target, name: str, tree_attention: bool) -> str:
    """Where steps of an execution differ from eager ones, or ""."""
    prompt = [3 + i % 97 for i in range(40)]
    tree = build_template("best", nodes=NODES).on(target.device)
    draft = Draft(tree, torch.arange(3, 3 + len(tree), device=target.device))
    target.attend_by_tree(False)
    tie = _tie(target, prompt)
    expected = _logits(target, "eager", prompt, draft)
    text = generate(target, Vanilla(target.device), prompt, max_new_tokens=TOKENS).tokens
    target.attend_by_tree(tree_attention)
    apart = _apart(_logits(target, name, prompt, draft), expected)
    if not apart <= tie:  # NaN is none
        return f"its logits are {apart:.1e} of the greatest away from eager ones, which differ by {tie:.1e} at most"
    drafters = (Vanilla(target.device), TokenRecycling(target.vocab_size, tree, device=target.device))
    found = [generate(target, drafter, prompt, max_new_tokens=TOKENS).tokens for drafter in drafters]
    return next(filter(None, (_wrong(target, prompt, text, answer, tie) for answer in found if answer != text)), "")


def _apart(logits: Any, expected: Any) -> float:
    """The largest difference of logits (n, V) in any row, over that row's greatest: a few wrong rows count in full."""
    gaps: Any = (logits - expected).abs().amax(1) / expected.abs().amax(1)
    return float(gaps.amax())


@torch.inference_mode()
def _tie(target: Target, prompt: list[int]) -> float:
    """What is no difference between two logits, over the greatest: what two ways to the same eager ones make of it.

    A chain behind the prompt, under a tree's mask and, in one forward with the prompt, without a mask.
    """
    chain = Tree.chain(NODES).on(target.device)
    draft = Draft(chain, torch.arange(3, 3 + len(chain), device=target.device))
    masked = _logits(target, "eager", prompt, draft)
    with target.cache(len(chain)) as cache:
        plain = target.prefill(cache, [*prompt[:-1], *draft.tokens.tolist(), 0], all_logits=True)
    noise = _apart(plain[-len(chain) :].float(), masked)
    return max(TIMES * noise, ROUNDINGS * torch.finfo(target.dtype).eps)


def _wrong(target: Target, prompt: list[int], text: list[int], found: list[int], tie: float) -> str:
    """Where an answer leaves the eager one, if that is no tie: what would be so were a step put together wrongly."""
    at = next(i for i, (one, other) in enumerate(zip(text, found, strict=True)) if one != other)
    before = prompt + text[:at]
    target.attend_by_tree(False)
    root = Draft(Tree.chain(0).on(target.device), torch.tensor(before[-1:], device=target.device))
    logits = _logits(target, "eager", before, root)[0]
    gap = (logits[text[at]] - logits[found[at]]).abs().item() / logits.abs().max().item()
    return "" if gap <= tie else f"its token {at} is {found[at]}, eager decoding's {text[at]}"


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
        step, launch = Executor(target).padded(cache, n, drafter, unmarked)
        for _ in range(2):  # what a first run leaves behind is seen by the second
            step.feed(draft, cache.length)
            launch()
        return step.logits.float().clone()
