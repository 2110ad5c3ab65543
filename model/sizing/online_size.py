"""The size of a draft, found while decoding: `nodes="auto"`.

Step times are learnt from the steps (`step_times`), what a draft of n nodes adds is the method's to say. Drafting never
costs much: each step is booked, what it added and what it took, both in plain steps, and drafting goes on as long as
the balance lasts. It starts with ALLOWED, and RATE is added a step: over 200 tokens no more than 3 % can be lost to
drafts that do not pay. Without a balance steps are plain for a while, then drafting is tried again.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from ..errors import UserError
from .draft_size import SIZES, TILED, StepCosts
from .step_times import PLAIN, StepTimes, doubling

ALLOWED, RATE = 1.25, 0.015  # plain steps that may be lost: at once, and more for each step
SAVED = 6.0  # plain steps won in an answer that it may lose again
REST = (16, 256)  # steps without drafts, at first; twice as many each time that drafting did not pay, up to the second
PROBE = (2, 48)  # steps between two plain ones that measure the scale: at first; then twice as many, up to the second
EXCUSED = 128  # steps between two changes of the machine after which it may lose as much again
STALE, APART = 96, 16  # a neighbour of the best size is measured again after so many steps; so far apart are these
RISK = 0.25  # tokens that measuring it may cost
# A row of the prompt's logits takes a hundredth of a step of SmolLM2 on a CPU; all of them add 0.8 % to MAT
PROMPT_ROWS = 64
MEMORY = 32.0  # steps whose speed is remembered
SLOPES = {"cpu": 0.04, "cuda": 0.004}  # of a node over a plain step, before anything is measured
TRIED = {"cpu": SIZES, "cuda": (0, 3, *TILED)}  # few on CUDA, as steps of each size are captured by themselves
PAID = 4.0  # plain steps won without a rest, after which drafting is said to pay
CREDIT, RECALLED = 2.0, 64.0  # accepted drafts as which a law counts; drafts that are remembered
# The first step of so many rows also makes what all of them use (1 ms by oneDNN): where it takes so much more than it
# should, it says nothing of the others
SLOW = 1.2
UNPAID = 3  # rests in a row after which it is said not to
log = logging.getLogger(__name__)


class OnlineSize(StepCosts):
    """Chooses sizes by step times that it learns, within what may be lost. All seconds here are in plain steps.

    Sequences may take turns; a step is `rests`, unless that is so `best`, and `took`. Times outlive a cold start: they
    are the machine's and say nothing of a text.

    Args:
        budget: at most so many nodes.
        device: of the target; its kind says what is believed before a step is timed.

    Attributes:
        resting: nothing is drafted for now.
        pays: whether drafting paid so far; None: not known yet.
        balance: plain steps that drafts may lose.
    """

    def __init__(self, budget: int, device: torch.device) -> None:
        if budget < 0:
            raise UserError(f"nodes=auto: the budget of {budget} nodes must be at least 0")
        kind = "cuda" if device.type == "cuda" else "cpu"
        sizes = [n for n in TRIED[kind] if n <= budget]
        if budget and len(sizes) == 1:  # a budget below the least that is tried
            sizes.append(budget)
        self.times = StepTimes(doubling(sizes), SLOPES[kind])
        self.resting, self.balance = False, ALLOWED
        self.pays: bool | None = None
        self._left, self._unpaid, self._won = 0, 0, 0.0  # steps to rest; rests in a row; plain steps won since the last
        self._plain, self._said = False, False
        self._probe, self._tried_at, self._excused_at, self._shifts = PROBE[0], 0, -EXCUSED, 0
        self._met = set[int]()  # nodes that steps had
        super().__init__(dict.fromkeys(sizes, 1.0), 1.0, budget)
        self.seconds = self.times.curve(self.sizes)

    def reset(self) -> None:
        super().reset()
        self._lately, self._counted = [1.0, 1.0], (0, 1.0)

    @property
    def largest(self) -> int:
        """The index of the largest size that may be tried now."""
        return 0 if self.resting else bisect_right(self.sizes, self.times.reach) - 1

    @property
    def prompt_rows(self) -> int:
        """All that are worth it where drafting pays; before that is known the root's, which is computed anyway."""
        return 0 if self.resting else PROMPT_ROWS if self.pays else 1

    def opened(self) -> None:
        """A sequence begins: it may lose so much by itself, whatever others won."""
        self.balance = min(self.balance, ALLOWED)
        self._left = min(self._left, REST[0])

    def rests(self) -> bool:
        """Before a step: is it to be plain? To measure the scale, or while resting, where learning costs, too."""
        self._counted = 0, 1.0
        if self.times.shifts > self._shifts:  # what was known of this machine may hold no longer
            self._shifts, self._probe, self._left = self.times.shifts, PROBE[0], min(self._left, PROBE[0])
            if self.times.steps - self._excused_at > EXCUSED:  # and what it lost in between was the machine's fault
                self._excused_at, self.balance, self._unpaid = self.times.steps, max(self.balance, ALLOWED), 0
        if self.resting:
            self._left -= 1
            look = min(self.times.at(0) - 1.0, ALLOWED / 2)  # what the first step costs even without nodes
            if self._left <= 0 and self.balance > look:
                self.resting, self._won = False, 0.0
        if self.resting:
            self._plain = self.times.at(0) > 1.0 + RATE
        else:
            self._plain = self._unsure()
        return self._plain

    def _unsure(self) -> bool:
        """Is the scale to be measured?"""
        since = self.times.steps - self.times.plain_at
        if since < self._probe:
            return False
        added, took = self._lately  # far above plain decoding it matters less
        self._probe = min(2 * self._probe, int(PROBE[1] * min(max(added / took, 1.0) ** 2, 4.0)))
        return True

    def best(self, tokens: Sequence[float]) -> int:
        """The index of the size to draft.

        Args:
            tokens: that a step of each size is expected to add, as far as is known.
        """
        added, took = self._lately
        speed = max(added / took, 1.0)
        worth = [t - speed * s for t, s in zip(tokens[: self.largest + 1], self.seconds, strict=False)]
        at = max(range(len(worth)), key=worth.__getitem__)
        at = self._tried(at, worth, speed)
        self.count(at, tokens[at])
        self._lately = [m + (x - m) / MEMORY for m, x in zip(self._lately, (tokens[at], self.seconds[at]), strict=True)]
        return at

    def _tried(self, at: int, worth: Sequence[float], speed: float) -> int:
        """A neighbour of the best size, where it was not measured for long and may be nearly as good; else the best."""
        times = self.times
        if times.steps - self._tried_at < (APART if times.steps - times.shift_at > STALE else APART // 4):
            return at
        for near in (at + 1, at - 1, at + 2, at - 2):
            if 0 < near < len(worth) and times.unseen(self.sizes[near]) > STALE:
                hoped = worth[near] + speed * self.seconds[near] * times.unsure(self.sizes[near])
                if hoped > worth[at] - RISK:
                    self._tried_at = times.steps
                    return near
        return at

    def count(self, index: int, tokens: float) -> None:
        """The step under way is of the size of that index; it counts when it was timed."""
        self._counted = index, tokens

    def took(self, nodes: int, tokens: int, seconds: float) -> None:
        """A step is over: it teaches what its size takes, and what it won or lost is booked."""
        size, plain_seconds = PLAIN if self._plain else nodes, self.times.plain_seconds
        super().count(*self._counted)
        measured = seconds / (plain_seconds or seconds)
        won = tokens - self._cost(size, measured)
        known = nodes in self._met
        self._met.add(nodes)
        if known or measured < SLOW * self.times.at(size):
            self.times.note(size, seconds)
            self.seconds = self.times.curve(self.sizes)
        self._won += won
        most = max(ALLOWED, min(self.balance + won, SAVED))
        self.balance = max(min(self.balance + won + RATE, most), -ALLOWED)
        if self._won > PAID:
            self.pays, self._unpaid = True, 0
        if self.balance < 0 and not self.resting:
            self._rest()

    def _cost(self, size: int, measured: float) -> float:
        """A step in plain steps: as measured, and once its size is known as foreseen, too, half and half."""
        foreseen = self.times.at(size)
        if size == PLAIN:
            return 1.0
        if not self.times.settled(size):
            return min(measured, 4 * foreseen)
        return (foreseen + min(max(measured, foreseen / 1.5), 1.5 * foreseen)) / 2

    def _rest(self) -> None:
        """Drafts have cost what they may: none for a while."""
        self._unpaid = 1 if self._won > 0 else self._unpaid + 1
        self.resting, self._left = True, min(REST[0] << min(self._unpaid - 1, 8), REST[1])
        if self._unpaid >= UNPAID:
            self.pays = False
            if not self._said:
                self._said = True
                some = min(4, self.sizes[-1])
                log.warning(
                    "nodes=auto: drafting does not pay here (a step of %d nodes takes %.2f plain ones): "
                    "decoding plainly, and trying again from time to time",
                    some,
                    self.times.at(some),
                )

    def promised(self, tokens: Sequence[float], accepted: Sequence[float], **chosen: Any) -> dict[str, Any]:
        scale = self.times.plain_seconds or 1.0
        own = {"step_seconds": [scale * t for t in self.seconds], "plain_seconds": scale}
        return super().promised(tokens, accepted, **chosen) | own | {"resting": self.resting, "pays": self.pays}

    def load(self, used: list[int], predicted: list[float]) -> bool:
        """Go on from saved counts, unless they are of other sizes, as another kind of device or budget has."""
        return len(used) == len(self.sizes) and super().load(used, predicted)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`size_times` as `StepTimes.state` has them; `size_balance`, float64: and whether it rests, and how long."""
        known = [self.balance, self._won, self.resting, self._left, self._unpaid]
        return {"size_times": self.times.state(), "size_balance": torch.tensor(known, dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Starts anew from a state without step times, or with those of another kind of device or budget."""
        if "size_times" not in state or not self.times.load(state["size_times"]):
            return
        self.seconds = self.times.curve(self.sizes)
        self.balance, self._won, resting, left, unpaid = state["size_balance"].tolist()
        self.resting, self._left, self._unpaid = bool(resting), int(left), int(unpaid)


class LawfulSize:
    """Sizes for drafts of a few kinds, of which a law says how likely each node is; how far that holds is learnt.

    Args:
        laws: likelihoods by kind, the likeliest node first.
    """

    def __init__(self, sizing: OnlineSize, laws: Sequence[Sequence[float]]) -> None:
        self.sizing = sizing
        sums = [[0.0, *accumulate(law)] for law in laws]
        self._accepted_by_law = [[own[min(n, len(own) - 1)] for n in sizing.sizes] for own in sums]
        self._believe()

    def reset(self) -> None:
        """Nothing was chosen yet, and the laws are believed."""
        self.sizing.reset()
        self._believe()

    def _believe(self) -> None:
        kinds = len(self._accepted_by_law)
        self._expected, self._accepted = [CREDIT] * kinds, [CREDIT] * kinds
        self._last = 0, 0

    def choose(self, kind: int) -> int:
        """Nodes of a draft of that kind."""
        holds = self._accepted[kind] / self._expected[kind]
        sizes, law = self.sizing.sizes, self._accepted_by_law[kind]
        at = self.sizing.best([1.0 + min(holds * e, n) for e, n in zip(law, sizes, strict=True)])
        self._last = kind, at
        return sizes[at]

    def learn(self, accepted: int) -> None:
        """So many nodes of the last draft were accepted."""
        kind, at = self._last
        if at:
            for counted, new in ((self._expected, self._accepted_by_law[kind][at]), (self._accepted, accepted)):
                counted[kind] += new - counted[kind] / RECALLED

    def describe(self) -> dict[str, Any]:
        """What was learnt, chosen and promised."""
        sizing, used = self.sizing, self.sizing.used
        kinds = range(len(self._expected))
        # of all kinds alike, as no kind is known to be frequent
        law = [sum(self._accepted_by_law[kind][i] for kind in kinds) / len(kinds) for i in range(len(used))]
        most_used = sizing.sizes[used.index(max(used))]
        return sizing.promised([1.0 + e for e in law], law, chosen=most_used, choice="most often")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`law_holds`, float64 (2, kinds): drafts expected and accepted; and what `OnlineSize` has."""
        counts = torch.tensor([self._expected, self._accepted], dtype=torch.float64)
        return {"law_holds": counts} | self.sizing.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Starts anew from a state without it."""
        self._believe()
        counts = state.get("law_holds")
        if counts is not None and counts.shape == (2, len(self._expected)):
            self._expected, self._accepted = counts.tolist()
        self.sizing.load_state_dict(state)


def finds_size(method: Any) -> bool:
    """Whether it is the class of a method that takes `nodes=auto`: these say so by a `sizing` of their own."""
    return "sizing" in vars(method)


def budget_of(nodes: int | str) -> int | None:
    """The most nodes of `nodes=auto` or `auto:N`; None where it is a number.

    Raises:
        UserError: another word.
    """
    if not isinstance(nodes, str):
        return None
    word, _, most = nodes.partition(":")
    if word != "auto" or (most and not most.isdigit()) or nodes.endswith(":"):
        raise UserError(f"nodes={nodes}: must be a number, auto, or auto:N for at most N")
    return int(most) if most else SIZES[-1]
