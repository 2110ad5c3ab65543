"""The decoding loop, the same for every method, and its raw datum: the step record."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from ..errors import UserError
from .drafter import Drafter
from .step import EagerStep, Mark, StaticSteps, conclude, make_step, unmarked
from .target import Target
from .tree import RankPath
from .verification import Verification


@dataclass(slots=True)
class StepRecord:
    """What one step, a forward over a root, added to the output; every metric derives from these.

    Attributes:
        accepted: tokens added: the drafts that stand and the target's own next token, cut at the answer's end. Plain
            decoding adds 1.
        nodes: nodes forwarded, root included.
        rank_path: ranks of the accepted nodes from the root down.
        source: where the draft came from, for a drafter with several sources.
    """

    accepted: int
    nodes: int
    rank_path: RankPath
    source: str | None = None


@dataclass(slots=True)
class Generation:
    """One answer.

    Attributes:
        tokens: new tokens, EOS included if it came. sum(accept_lengths) == len(tokens).
        steps: one record a step.
        stop: eos | length (max_new_tokens) | context (the model's or the setting's limit).
        forwards: target forwards: the steps, and the prompt's own where it is one more.
        prefill_s, decode_s: seconds until the first step's tokens are known, and from then on, without setup_s.
        setup_s: seconds spent on steps of a shape not met before, compiling and capturing included; 0 if eager.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    stop: str = ""
    forwards: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    setup_s: float = 0.0

    @property
    def accept_lengths(self) -> list[int]:
        return [s.accepted for s in self.steps]

    def add(self, verification: Verification, limit: int, eos: Collection[int]) -> int | None:
        """Add a step's tokens, cut at the answer's end. Returns the next root, or None where the answer has ended."""
        draft = verification.draft
        tokens = verification.tokens[: limit - len(self.tokens)]
        tokens = next((tokens[: i + 1] for i, token in enumerate(tokens) if token in eos), tokens)
        path = draft.tree.rank_paths[verification.node][: len(tokens)]
        self.tokens += tokens
        self.steps.append(StepRecord(len(tokens), len(draft.tree), path, draft.source))
        return None if tokens[-1] in eos or len(self.tokens) == limit else tokens[-1]


@torch.inference_mode()
def decode(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    *,
    max_new_tokens: int,
    eos: Collection[int] = (),
    mark: Mark = unmarked,
) -> Generation:
    """Decode greedily: the output is the target's own, whatever the drafter tries.

    The root is the last token known, at first the prompt's last one. A step forwards it with a draft below it, commits
    it with the drafts that stand, and puts out these and the target's own next token, which is the next root.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: at most so many new tokens.
        eos: ids that end an answer (it is part of the output).
        mark: called with a phase's name when it ends: prefill, then for each step draft, forward, verify, commit,
            observe and loop; in static steps setup (when one is made), step and loop.

    Raises:
        UserError: max_new_tokens < 1, or the prompt leaves no room for an answer.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens}: must be at least 1")
    if not 1 <= len(prompt) < target.context:
        raise UserError(
            f"prompt of {len(prompt)} tokens: must have 1 to {target.context - 1} (context {target.context})"
        )
    limit = min(max_new_tokens, target.context - len(prompt))
    out = Generation()
    target.reserve(drafter.max_nodes)
    target.keep_hidden(drafter.needs_hidden)
    try:
        _decode(target, drafter, prompt, limit, eos, mark, out)
    finally:
        target.keep_hidden(False)
    if out.tokens[-1] in eos:
        out.stop = "eos"
    else:
        out.stop = "length" if limit == max_new_tokens else "context"
    return out


def _decode(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    limit: int,
    eos: Collection[int],
    mark: Mark,
    out: Generation,
) -> None:
    """Step after step until the answer ends, each added to `out`."""
    step = make_step(target, drafter, mark)
    made = step.setup_s
    target.synchronize()
    start = time.perf_counter()
    verification = _first_step(target, drafter, prompt, step, mark, out)
    setup = step.setup_s - made
    out.prefill_s = time.perf_counter() - start - setup
    root = out.add(verification, limit, eos)
    mark("loop")
    while root is not None:
        verification = step(root)
        out.forwards += 1
        root = out.add(verification, limit, eos)
        mark("loop")
    target.synchronize()
    out.setup_s = step.setup_s - made
    out.decode_s = time.perf_counter() - start - out.prefill_s - out.setup_s


def _first_step(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    step: EagerStep | StaticSteps,
    mark: Mark,
    out: Generation,
) -> Verification:
    """The prompt and the first step, in one forward where the drafter begins with a chain, else in two."""
    draft = drafter.begin(prompt)
    first = prompt if draft is not None else prompt[:-1]  # tokens whose logits are the prompt's own
    logits = target.prefill(prompt, draft, all_logits=drafter.needs_prompt_logits)
    if first and drafter.needs_prompt_logits:
        drafter.observe_prompt(first, logits[: len(first)])
    if first and target.hidden is not None:  # (P - 1 + n, H)
        drafter.observe_prompt_hidden(first, target.hidden[: len(first)])
    if draft is None:
        mark("prefill")
        out.forwards = 1 + bool(first)
        return step(prompt[-1])
    out.forwards = 1
    verification = conclude(target, drafter, draft, logits[-len(draft.tree) :])
    mark("prefill")
    return verification
