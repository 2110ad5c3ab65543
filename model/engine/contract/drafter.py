"""The contract of every method; verification, cache and loop are the engine's.

A drafter holds what its sequences share, a session what belongs to one sequence. A `Drafter`'s
session drafts any tree; a `DeviceDrafter`'s step runs on the device, in one of a few trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..attention.cache import TreeCache
from ..rule.sampling import GREEDY, Choice
from ..rule.tree import Draft, Tree
from ..rule.verification import Verification
from .sizing import Sizing

Device = torch.device | str


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter needs of the target, next to the new tokens."""

    logits: bool = False  # `Verification.logits`; shared forwards store them, too
    candidates: int = 0  # k of the top-k after each node: `Verification.candidates`, `learn`
    log_probs: bool = False  # also the log2 of their probabilities: `Verification.log_probs`
    # of all nodes; False: sampling may give -1 for rejected nodes, which saves work
    choices: bool = False
    prompt_logits: bool = False  # call `Session.observe_prompt`
    tree: bool = False  # verify the whole draft tree; False: verifying one chain of it suffices
    # Which hidden states (see `layers.LAST`): `Verification.hidden`, `set_hidden`,
    # `observe_prompt_hidden`
    hidden: tuple[int, ...] = ()


class Drafter:
    """What a method's sequences share, and the state kept between prompts.

    Attributes:
        stores: what holds that state. Each has `reset`, `state_dict`, `read`, which checks a saved
            state and returns its own part (None: absent), and `load`, which takes this part after a
            reset.
        needs: of the target; constant.
        stateful: True if state is kept between prompts. Then cold and hot start differ.
        max_nodes: of the largest draft, root included.
        draft_tree: the tree that drafts are parts of; None: any tree.
        joins: True if a DeviceDrafter has one tree, and its sessions do nothing in steps. `grow`
            and `learn` then also take S sequences at once, as a first dimension.
        sizing: tunes the size of drafts while decoding.
        vocab_size: of the targets that it drafts for; None: any.
    """

    needs: Needs = Needs()
    stores: Sequence[Any] = ()
    stateful: bool = False
    max_nodes: int = 1
    draft_tree: Tree | None = None
    joins: bool = False
    sizing: Sizing | None = None

    def __init__(self, device: Device, vocab_size: int | None = None) -> None:
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        # Executors by cache, written by the engine; each lives as long as its cache and this
        # drafter.
        self.executors: WeakKeyDictionary[TreeCache, Any] = WeakKeyDictionary()

    def session(self) -> Session:
        """Open a session for one sequence; several can be open and take steps in turns.

        Other sessions may draft before a step is observed, so all that a draft needs, but its
        tokens, must belong to its session.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Forget everything that `state_dict` holds: a cold start."""
        for store in self.stores:
            store.reset()

    def state_dict(self) -> dict[str, Tensor]:
        """Return all state kept between prompts, so that a resumed run continues exactly."""
        return {
            name: tensor for store in self.stores for name, tensor in store.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a saved state, all of it or nothing. Raises UserError if it does not fit."""
        contents = [store.read(state) for store in self.stores]
        for store, content in zip(self.stores, contents, strict=True):
            store.reset()
            if content is not None:
                store.load(content)

    def describe(self) -> dict[str, Any]:
        """Return figures for the run's summary."""
        return {} if self.sizing is None else self.sizing.describe()

    def root_alone(self, root: int) -> Draft:
        """Return a draft of the root alone, on the host."""
        return Draft(Tree.chain(0), torch.tensor([root]))


class Session:
    """One sequence: `begin`, then `draft` and `observe` in turn, then `close`."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.choice = Choice(GREEDY, drafter.device)  # the target's rule; set before `begin`

    def begin(self, prompt: list[int]) -> Draft | None:
        """Start the sequence.

        Returns:
            The first step's draft, a chain whose root is the prompt's last token: one forward takes
                prompt and draft. With a `sizing`, it is not used.
            None: the prompt's other tokens are forwarded first.
        """
        return self.drafter.root_alone(prompt[-1])

    def draft(self, root: int) -> Draft:
        """Return the draft below `root`, the last known token."""
        raise NotImplementedError

    def likeliest_chain(self, draft: Draft) -> Draft:
        """Return the draft's chain of first children, for a target whose states cannot branch."""
        path = draft.tree.first_path
        tree = Tree.chain(len(path) - 1).on(draft.tree.device)
        return Draft(tree, draft.tokens[path], draft.source)

    def observe(self, verification: Verification) -> None:
        """Learn from a step: its draft, the target's choices, the accepted nodes."""

    def skip(self, tokens: list[int]) -> None:
        """Append the tokens of a plain step, which the session neither drafts nor observes."""

    def observe_prompt(self, prompt: list[int], start: int, logits: Tensor) -> None:
        """Learn from the logits (m, V) of m prompt tokens from `start` on, where `prompt_logits`.

        A long prompt comes in parts, without its last token unless one forward takes the prompt and
        the first step. With a `sizing`, only the last tokens come, after `skip`.
        """

    def observe_prompt_hidden(self, prompt: list[int], hidden: Tensor) -> None:
        """Learn from the same tokens' hidden states (m, w H), if `needs.hidden`."""

    def close(self) -> None:
        """End the sequence: give back what it borrowed."""


class DeviceDrafter(Drafter):
    """A drafter whose step runs on the device: `grow`, the target's forward, `learn`, `set_hidden`.

    Such a step can be captured and replayed, so it reads no value on the host: but for `tree` and
    `source`, which the session's `choose` sets, all that it uses are tensors that are never
    reallocated. The base class drafts nothing.
    """

    tree: Tree  # of the next step, one of a few: each is captured separately
    source: str | None = None  # of the tokens, where `grow` has several; two may fill the same tree

    def __init__(self, device: Device, vocab_size: int | None = None) -> None:
        super().__init__(device, vocab_size)
        self.tree = Tree.chain(0).on(self.device)

    def session(self) -> DeviceSession:
        return DeviceSession(self)

    def draft_all(self, roots: Sequence[int]) -> list[Draft]:
        joined = torch.tensor(roots)[:, None].to(self.device, non_blocking=True)
        return [Draft(self.tree, tokens, self.source) for tokens in self.grow(joined)]

    def observe_all(self, verifications: Sequence[Verification]) -> None:
        """Learn from those drafts at once, as if one after the other: the last one wins."""
        if self.needs.candidates:
            parts = [(step.draft.tokens, step.candidates, step.accepted) for step in verifications]
            tokens, candidates, accepted = map(torch.stack, zip(*parts, strict=True))
            self.learn(tokens, candidates, accepted.to(self.device, non_blocking=True))

    def grow(self, root: Tensor) -> Tensor:
        """Return the tokens of `tree` below this root (1,): int64 (n,), a new tensor."""
        return root.clone()

    def learn(self, tokens: Tensor, candidates: Tensor, accepted: Tensor) -> None:
        """Learn from a step, if `needs.candidates`.

        Args:
            tokens: int64 (n,).
            candidates: int64 (n, k), the top-k after each node, best first.
            accepted: bool (n,), True for accepted nodes.
        """

    def set_hidden(self, hidden: Tensor) -> None:
        """Store the hidden states (1, w H) that chose the next root, if `needs.hidden`."""

    def step_state(self) -> dict[str, Tensor]:
        """Return all tensors that a step on the device writes."""
        return self.state_dict()


class DeviceSession(Session):
    """A session of a DeviceDrafter: the host's part before and after each step."""

    drafter: DeviceDrafter

    def choose(self) -> None:
        """Before a step: set the drafter's `tree` and `source`, and fill what `grow` reads."""

    def settle(self, verification: Verification) -> None:
        """Copy what a step left in tensors that another sequence's step overwrites.

        The user's code, which may decode another one, runs between `settle` and `account`.
        """

    def account(self, verification: Verification) -> None:
        """Learn on the host from what the step accepted."""

    def draft(self, root: int) -> Draft:
        self.choose()
        drafter = self.drafter
        below = torch.tensor([root]).to(drafter.device, non_blocking=True)
        return Draft(drafter.tree, drafter.grow(below), drafter.source)

    def observe(self, verification: Verification) -> None:
        drafter = self.drafter
        if verification.candidates is not None:
            accepted = verification.accepted.to(drafter.device, non_blocking=True)
            drafter.learn(verification.draft.tokens, verification.candidates, accepted)
        if verification.hidden is not None:
            drafter.set_hidden(verification.hidden[verification.node : verification.node + 1])
        self.settle(verification)
        self.account(verification)
