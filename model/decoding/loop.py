"""The decoding loop, the same for every method, and its raw datum: the step record."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from ..errors import UserError
from .drafter import Drafter
from .step import make_step
from .target import Target
from .tree import RankPath
from .verification import Verification, verify


@dataclass(slots=True)
class StepRecord:
    """What one step added to the output; every metric derives from these.

    Attributes:
        accepted: tokens added, the model's own included; plain decoding adds 1.
        nodes: nodes forwarded, root included. 0 for the token that ends an answer: it was known from the step before
            and needs no forward, so it is counted and not computed.
        rank_path: ranks of the accepted nodes from the root down.
    """

    accepted: int
    nodes: int
    rank_path: RankPath


@dataclass(slots=True)
class Generation:
    """One answer.

    Attributes:
        tokens: new tokens, EOS included if it came. sum(accept_lengths) == len(tokens).
        steps: one record a step.
        stop: eos | length (max_new_tokens) | context (the model's or the setting's limit).
        forwards: target forwards, the prefill included.
        prefill_s, decode_s: seconds until the first token is known, and from then on, without setup_s.
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

    def add(self, pending: list[int], verification: Verification, limit: int, eos: Collection[int]) -> int | None:
        """Add a step: `pending` (the root, unless the prompt holds it) and accepted drafts, cut at the answer's end.

        Returns:
            The next root, or None where the answer has ended.
        """
        *drafts, root = verification.tokens
        tokens = (pending + drafts)[: limit - len(self.tokens)]
        tokens = next((tokens[: i + 1] for i, token in enumerate(tokens) if token in eos), tokens)
        if tokens:
            tree = verification.draft.tree
            path = tree.rank_paths[verification.node][: len(tokens) - len(pending)]
            self.tokens += tokens
            self.steps.append(StepRecord(len(tokens), len(tree), path))
            if tokens[-1] in eos or len(self.tokens) == limit:
                return None
        if root in eos or len(self.tokens) + 1 == limit:  # the next root ends the answer: no forward is needed for it
            self.tokens.append(root)
            self.steps.append(StepRecord(1, 0, ()))
            return None
        return root


def _unmarked(phase: str) -> None:
    """The default `mark`: nobody is timing phases."""


@torch.inference_mode()
def decode(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    *,
    max_new_tokens: int,
    eos: Collection[int] = (),
    mark: Callable[[str], None] = _unmarked,
) -> Generation:
    """Decode greedily: the output is the target's own, whatever the drafter tries.

    The prefill is a step whose root is the prompt's last token; most drafters draft nothing there. From then on the
    root is the last token known: a step forwards it with a draft below it, commits it with the drafts that stand, and
    learns the next root.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: at most so many new tokens.
        eos: ids that end an answer (it is part of the output).
        mark: called with a phase's name when it ends: prefill, then draft, forward, verify, commit, observe
            and loop; in static steps setup (when one is made), step and loop.

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
    target.synchronize()
    start = time.perf_counter()
    draft = drafter.begin(prompt)
    logits = target.prefill(prompt, draft, all_logits=drafter.needs_prompt_logits)
    if drafter.needs_prompt_logits:
        drafter.observe_prompt(prompt, logits)
    verification = verify(draft, logits[-len(draft.tree) :])  # syncs: what follows is decoding
    verification.prefill = True
    out.forwards, out.prefill_s = 1, time.perf_counter() - start
    target.commit(verification)
    if target.hidden is not None:  # (P - 1 + n, H)
        drafter.observe_prompt_hidden(prompt, target.hidden[: len(prompt)])
        verification.hidden = target.hidden[-len(draft.tree) :]
    drafter.observe(verification)
    root = out.add([], verification, limit, eos)
    mark("prefill")
    step = make_step(target, drafter, mark)
    made = step.setup_s
    while root is not None:
        verification = step(root)
        out.forwards += 1
        root = out.add([root], verification, limit, eos)
        mark("loop")
    target.synchronize()
    out.setup_s = step.setup_s - made
    out.decode_s = time.perf_counter() - start - out.prefill_s - out.setup_s
    if out.tokens[-1] in eos:
        out.stop = "eos"
    else:
        out.stop = "length" if limit == max_new_tokens else "context"
    return out
