"""What every method is: a drafter says what to try next. Verification, cache and loop are the engine's.

A method is two objects. The drafter holds what all its sequences share and what is carried from prompt to prompt; a
session holds what belongs to one sequence. And there are two kinds: any drafter at all, whose session drafts as it
likes, and the kind whose step runs on the device, in one of a few trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from ..errors import UserError
from .cache import TreeCache
from .sampling import Choice
from .tree import Draft, Tree
from .verification import Verification

LAST = 1e5  # logits less that much come behind all others


@dataclass(frozen=True, slots=True)
class Needs:
    """What a method needs of the target, besides the tokens that are put out.

    Attributes:
        logits: all of `Verification.logits`; a shared text keeps them, too.
        candidates: so many of the greatest logits after each node: `Verification.candidates`, `learn`.
        bits: and how likely these are: `Verification.bits`.
        choices: of all nodes; else sampling finds those of the accepted nodes, and -1 for others.
        prompt_logits: `Session.observe_prompt` is called, at the price of (P, V) logits.
        hidden: last hidden states, what enters the target's own head: `Verification.hidden`, `take` and
            `observe_prompt_hidden`.
    """

    logits: bool = False
    candidates: int = 0
    bits: bool = False
    choices: bool = False
    prompt_logits: bool = False
    hidden: bool = False


class Sizing(Protocol):
    """What finds the size of drafts while decoding.

    A sequence is `opened`, its first step goes with the prompt, without a draft; every other one is `rests`, the step,
    `took`.
    """

    @property
    def prompt_rows(self) -> int:
        """Of how many of a prompt's last tokens the logits may be computed, for a method that learns from them."""

    def opened(self) -> None:
        """A sequence begins."""

    def rests(self) -> bool:
        """Before a step: is it to be a plain one, that neither drafts nor learns?"""

    def took(self, nodes: int, tokens: int, seconds: float) -> None:
        """After it: nodes below its root, tokens that it added, and its seconds from the draft to what was learnt."""


class Drafter:
    """A method: what its sequences share, and the state that is carried from prompt to prompt.

    `reset` forgets the state, `state_dict` holds all of it, so that a resumed run continues exactly.

    Attributes:
        needs: of the target; the same for as long as the drafter lives.
        stateful: whether anything outlives a prompt. Then cold and hot start differ.
        shares_noise: whether `Session.scores` adds the target's noise.
        max_nodes: of the largest draft it will ever make, root included; the cache keeps room for it.
        sizing: where the size of drafts is found while decoding; None: the method alone decides it.
    """

    needs: Needs = Needs()
    stateful: bool = False
    shares_noise: bool = False
    max_nodes: int = 1
    sizing: Sizing | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises UserError for `needs_...`, which would be read by nobody."""
        super().__init_subclass__(**kwargs)
        if loose := [name for name in vars(cls) if name.startswith("needs_")]:
            raise UserError(f"{cls.__name__}.{loose[0]}: write needs = Needs({loose[0].removeprefix('needs_')}=...)")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._alone = Tree.chain(0).on(device)
        # By cache, kept here by the engine: they live as long as both.
        self.executors: WeakKeyDictionary[TreeCache, Any] = WeakKeyDictionary()

    def session(self) -> Session:
        """What belongs to one sequence, from `begin` to `close`. Several can be open and take steps in turns.

        A step is draft, forward and observe; a draft is good until any session of the method drafts again.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Forget everything that `state_dict` holds: a cold start."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All that is carried from prompt to prompt."""
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a saved state. Raises UserError if it does not fit."""

    def describe(self) -> dict[str, Any]:
        """Figures of its own for the run's summary."""
        return {}

    def root_alone(self, root: int) -> Draft:
        """The draft with nothing in it."""
        return Draft(self._alone, torch.tensor([root], device=self.device))


class Session:
    """One sequence of a method. The engine calls `begin`, then `draft` and `observe` in turn, at the end `close`."""

    def __init__(self, method: Drafter) -> None:
        self.method = method
        self.choice: Choice | None = None  # the target's rule, from the engine, before `begin`

    def scores(self, logits: torch.Tensor, place: int) -> torch.Tensor:
        """What a drafting model's logits (n, V) for a place in the text are worth: greedily these logits.

        Where tokens are drawn, with the noise that the target draws by there: of one distribution two models then draw
        the same token, and of alike ones mostly (Daliri et al., arXiv 2408.07978). What top-k or top-p leaves out comes
        last, in the order of its logits.
        """
        if not self.method.shares_noise or self.choice is None or self.choice.sampling.temperature == 0:
            return logits
        scores = self.choice.scores(logits, torch.full((len(logits),), place, device=logits.device))
        return torch.where(scores.isneginf(), logits.float() - LAST, scores)

    def begin(self, prompt: list[int]) -> Draft | None:
        """Start the sequence.

        Returns:
            The first step's draft, if it is a chain: it goes through one forward with the prompt, whose last token is
            its root. None: the prompt's other tokens go first, then a first step that is like all others.
        """
        return self.method.root_alone(prompt[-1])

    def draft(self, root: int) -> Draft:
        """What to try after `root`, the last known token."""
        raise NotImplementedError

    def observe(self, verification: Verification) -> None:
        """Learn from a step: what was drafted, what the target chose, what was accepted."""

    def passed(self, tokens: list[int]) -> None:
        """The text went on by a plain step's tokens, which was not drafted and is not observed; see `Sizing`."""

    def observe_prompt(self, prompt: list[int], logits: torch.Tensor) -> None:
        """Learn from the logits (m, V) after the prompt's tokens, where `needs.prompt_logits`: all but the last one.

        m is P where the first step goes through one forward with the prompt, else P - 1. With a `sizing` they are the
        last tokens alone, and `passed` was called with what follows them.
        """

    def observe_prompt_hidden(self, prompt: list[int], hidden: torch.Tensor) -> None:
        """Learn from the hidden states (m, H) of the same tokens, where `needs.hidden`. Called before `observe`."""

    def close(self) -> None:
        """The sequence has ended: what it borrowed goes back."""


class DeviceDrafter(Drafter):
    """The kind whose step runs on the device: `grow`, the target's forward, `learn` and `take`, without the host.

    Such a step can be captured once and replayed. So of host values it may depend on nothing but `tree` and `source`,
    as the session's `choose` left them before the step; whatever else `grow`, `learn` and `take` read or write are
    tensors that stay where they are. As it is it drafts nothing: it is plain decoding.
    """

    tree: Tree  # of the next step, one of a few: each is captured by itself
    source: str | None = None  # which of several sources `grow` takes the tokens from; two may fill the same tree

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.tree = self._alone

    def session(self) -> DeviceSession:
        return DeviceSession(self)

    def grow(self, root: torch.Tensor) -> torch.Tensor:
        """The tokens of `tree` below `root` (1,): int64 (n,). On the device: no host value is read.

        Where it learns they are a tensor of their own: `root` is the next one when `learn` is called.
        """
        return root

    def learn(self, tokens: torch.Tensor, candidates: torch.Tensor, accepted: torch.Tensor) -> None:
        """Learn from a step, where `needs.candidates`. On the device, as `grow`.

        Args:
            tokens: int64 (n,).
            candidates: int64 (n, k), the tokens of the k greatest logits after each node, best first.
            accepted: bool (n,), which nodes are what the target picks, all the way from the root.
        """

    def take(self, hidden: torch.Tensor) -> None:
        """The hidden state (1, H) that chose the next root, where `needs.hidden`. On the device, as `grow`."""

    def step_state(self) -> dict[str, torch.Tensor]:
        """What a step on the device writes into; more than `state_dict` where something lives within a sequence."""
        return self.state_dict()


class DeviceSession(Session):
    """A sequence of that kind: what is left to the host before and after each step."""

    method: DeviceDrafter

    def choose(self) -> None:
        """Before a step: set the method's `tree` and `source`, and fill what its `grow` reads."""

    def account(self, verification: Verification) -> None:
        """After a step: what was accepted."""

    def draft(self, root: int) -> Draft:
        self.choose()
        method = self.method
        return Draft(method.tree, method.grow(torch.tensor([root], device=method.device)), method.source)

    def observe(self, verification: Verification) -> None:
        if verification.candidates is not None:
            self.method.learn(verification.draft.tokens, verification.candidates, verification.accepted)
        if verification.hidden is not None:
            self.method.take(verification.hidden[verification.node : verification.node + 1])
        self.account(verification)
