"""What every method is: a drafter says what to try next. Verification, cache and loop are the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .tree import Tree

if TYPE_CHECKING:
    from .verification import Verification


@dataclass(slots=True)
class Draft:
    """What to try: a tree and its tokens, int64 (n,) on the target's device; tokens[0] is the root.

    `source` says where the tokens come from, in the words of a drafter that has several sources.
    """

    tree: Tree
    tokens: torch.Tensor
    source: str | None = None


class Drafter:
    """The contract of a method. The base class drafts nothing: it is plain decoding.

    The engine calls `begin` once a prompt, then `draft` and `observe` in turn. State carried from prompt to prompt
    lives on the object; `reset` forgets it, `state_dict` holds all of it, so that a resumed run continues exactly.

    A step may be captured once and replayed: of host values it may depend on nothing but `tree` and `source`, as
    `choose` leaves them. What else `grow`, `learn` and `take` read or write are tensors that stay where they are.
    """

    stateful: bool = False  # does anything outlive a prompt? Then cold and hot start differ.
    needs_logits: bool = False  # `Verification.logits` is given to `observe` only if asked for.
    needs_prompt_logits: bool = False  # then `observe_prompt` is called, at the price of (P, V) logits.
    # Last hidden states, what enters the target's own head: `Verification.hidden`, `take` and `observe_prompt_hidden`.
    needs_hidden: ClassVar[bool] = False
    max_nodes: int = 1  # the largest draft it will ever make, root included; the cache keeps room for it.

    # The topology, where it stays from step to step: then `grow` and `learn` are all there is to a step, and it can
    # run without the host. None where every draft has a topology of its own: then `draft` and `observe` are overridden.
    tree: Tree | None
    source: str | None = None  # which of several sources `grow` takes the tokens from; two may fill the same tree
    static_steps: object = None  # kept here by the engine, so that it lives as long as the drafter

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._alone = self.tree = Tree.chain(0).on(device)

    def begin(self, prompt: list[int]) -> Draft | None:
        """Start a prompt.

        Returns:
            The first step's draft, if it is a chain: it goes through one forward with the prompt, whose last token is
            its root. None: the prompt's other tokens go first, then a first step that is like all others.
        """
        return self.root_alone(prompt[-1])

    def draft(self, root: int) -> Draft:
        """What to try after `root`, the last known token."""
        self.choose()
        assert self.tree is not None, "a drafter without a fixed topology overrides draft()"
        return Draft(self.tree, self.grow(torch.tensor([root], device=self.device)), self.source)

    def observe(self, verification: Verification) -> None:
        """Learn from a step: what was drafted, what the target chose, what stood."""
        if verification.logits is not None:
            self.learn(verification.draft.tokens, verification.logits, verification.stands)
        if verification.hidden is not None:
            self.take(verification.hidden[verification.node : verification.node + 1])
        self.account(verification)

    def choose(self) -> None:
        """On the host, before a step: `tree` and `source` may be exchanged here."""

    def grow(self, root: torch.Tensor) -> torch.Tensor:
        """The tokens of `tree` below `root` (1,): int64 (n,). On the device: no host value is read."""
        return root

    def learn(self, tokens: torch.Tensor, logits: torch.Tensor, stands: torch.Tensor) -> None:
        """Learn from a step, where `needs_logits`. On the device, as `grow`.

        Args:
            tokens: int64 (n,).
            logits: (n, V), after each node.
            stands: bool (n,), which nodes are what the target picks, all the way from the root.
        """

    def take(self, hidden: torch.Tensor) -> None:
        """The hidden state (1, H) that chose the next root, where `needs_hidden`. On the device, as `grow`."""

    def account(self, verification: Verification) -> None:
        """On the host, after a step: what stood."""

    def observe_prompt(self, prompt: list[int], logits: torch.Tensor) -> None:
        """Learn from the logits (m, V) after the prompt's first m tokens, where `needs_prompt_logits`.

        m is P where the first step goes through one forward with the prompt, else P - 1.
        """

    def observe_prompt_hidden(self, prompt: list[int], hidden: torch.Tensor) -> None:
        """Learn from the hidden states (m, H) of the same tokens, where `needs_hidden`. Called before `observe`."""

    def reset(self) -> None:
        """Forget everything that `state_dict` holds: a cold start."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All that is carried from prompt to prompt."""
        return {}

    def step_state(self) -> dict[str, torch.Tensor]:
        """What a step on the device writes into; more than `state_dict` where something lives within a prompt."""
        return self.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a saved state. Raises UserError if it does not fit."""

    def describe(self) -> dict[str, Any]:
        """Figures of its own for the run's summary."""
        return {}

    def root_alone(self, root: int) -> Draft:
        """The draft with nothing in it."""
        return Draft(self._alone, torch.tensor([root], device=self.device))
