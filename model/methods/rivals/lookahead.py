"""Lookahead decoding: Jacobi iterations next to the text produce n-grams (arXiv 2402.02057).

The window fills and moves as in the authors' github.com/hao-ai-lab/LookaheadDecoding. Token (l, i)
of level l and column i of the window sees the root (0, 0), the level-0 tokens up to column i, and
its own column above it. With N = 3 levels and W = 3 columns:

    root -- (0,1) -- (0,2)          a guess of the verification branch:
      |       |        |
    (1,0)   (1,1)    (1,2)          root -- g1 -- g2
"""

from __future__ import annotations

import random
import sys
from itertools import chain

from ...engine import Device, DeviceSession, Draft, Needs, RankPath, Verification
from ..limits import check_whole
from .layouts import Layout, LayoutDrafter
from .ngram_table import NgramTable


class Lookahead(LayoutDrafter):
    """Drafts the window's tokens and the pool's n-grams of the root, both the prompt's own."""

    needs = Needs(choices=True, tree=True)  # the window moves by all nodes' choices

    def __init__(
        self, *, level: int = 5, window: int = 7, guess: int = 7, device: Device = "cpu"
    ) -> None:
        check_whole("lookahead", 3, level=level)
        check_whole("lookahead", 1, window=window, guess=guess)
        check_whole(
            "lookahead", 1, **{"(window + guess) * (level - 1)": (window + guess) * (level - 1)}
        )
        super().__init__(device)
        self.level = level  # N
        self.window = window  # W
        # While levels are missing, the window is wider by one column for each: a step takes a
        # column of every level.
        self.layouts = {
            (f, 0): self._layout(f, window + level - 2 - f, 0) for f in range(level - 2)
        }
        self.layouts |= {
            (level - 2, g): self._layout(level - 2, window, g) for g in range(guess + 1)
        }
        self.max_nodes = max(len(layout.tree) for layout in self.layouts.values())
        self.guess = guess

    def session(self) -> LookaheadSession:
        return LookaheadSession(self)

    def _layout(self, deepest: int, width: int, guesses: int) -> Layout:
        # level 0; the root is its column 0
        paths: list[RankPath] = [(0,) * i for i in range(width)]
        for below in range(deepest):
            paths += [(0,) * i + (1,) + (0,) * below for i in range(width)]
        for g in range(guesses):
            paths += [(2 + g,) + (0,) * i for i in range(self.level - 1)]
        return Layout(paths, self.device)


class LookaheadSession(DeviceSession):
    drafter: Lookahead

    def begin(self, prompt: list[int]) -> Draft | None:
        drafter = self.drafter
        self.pool = NgramTable(1, drafter.level - 1, capacity=sys.maxsize, followers=drafter.guess)
        draw = random.Random(0)  # from the prompt alone, so that no answer depends on earlier ones
        first = [draw.choice(prompt) for _ in range(drafter.window + drafter.level - 3)]
        # level 0 without its column 0, which is the root; the others whole
        self._levels = [first]
        self._tail = prompt[1 - drafter.level :]  # the text's last N - 1 tokens
        # as in the authors' code, the first step has the window and the root's n-grams already
        return None

    def choose(self) -> None:
        guesses = self.pool.followers_of((self._tail[-1],))[::-1] if self._filled else []
        self._layout = self.drafter.layouts[len(self._levels) - 1, len(guesses)]
        self.drafter.lay_out(
            self._layout, [self._tail[-1], *chain(*self._levels), *chain(*guesses)]
        )

    def settle(self, verification: Verification) -> None:
        self._choices = verification.choices.tolist()

    def account(self, verification: Verification) -> None:
        """Collect the n-grams that this step completes, and move the window (3.2, algorithm 2)."""
        choices = self._choices
        levels = self._levels
        # choices after the last level, by column; the root is level 0's column 0, which is not in
        # the list
        end = sum(map(len, levels)) + 1
        width = len(levels[-1]) + (len(levels) == 1)
        new = [choices[self._layout.node_at[index]] for index in range(end - width, end)]
        if self._filled:
            keys = [self._tail[-1], *levels[0]]
            for key, *tail in zip(keys, *levels[1:], new, strict=True):
                self.pool.add((key,), tuple(tail))
            levels[:] = [levels[1][1:], *levels[2:], new]
        else:  # every level loses its column 0
            levels[:] = [row[1:] for row in levels] + [new[1:]]

        self._tail = [*self._tail, *verification.tokens][1 - self.drafter.level :]

    @property
    def _filled(self) -> bool:
        return len(self._levels) == self.drafter.level - 1
