"""n-grams in order of last use: leader -> followers (arXiv 2511.21699)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from ...engine import State, checked

Gram = tuple[int, ...]


@dataclass
class NgramTable:
    """Leaders of `leader` tokens, each with followers of `follower` tokens."""

    leader: int
    follower: int
    capacity: int  # maximum leaders kept
    followers: int  # maximum followers kept for each leader
    vocab_size: int = 0  # the ids of a saved table must be below it

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        # oldest first; followers latest first
        self._rows: OrderedDict[Gram, list[Gram]] = OrderedDict()

    def followers_of(self, leader: Gram) -> list[Gram]:
        return self._rows.get(leader) or []  # a look-up does not count as use

    def add(self, leader: Gram, follower: Gram) -> None:
        row = self._rows.get(leader)
        if row is None:
            if len(self._rows) == self.capacity:
                self._rows.popitem(last=False)
            self._rows[leader] = [follower]
            return

        self._rows.move_to_end(leader)
        if follower in row:
            row.remove(follower)
        elif len(row) == self.followers:
            row.pop()

        row.insert(0, follower)

    def add_text(self, text: list[int]) -> None:
        both = self.leader + self.follower
        for start in range(len(text) - both + 1):
            middle = start + self.leader
            self.add(tuple(text[start:middle]), tuple(text[middle : start + both]))

    def state_dict(self) -> State:
        """`ngrams`, int32 (n, leader + follower), as `add` is to be called anew."""
        ngrams = [
            leader + follower for leader, row in self._rows.items() for follower in reversed(row)
        ]
        both = self.leader + self.follower
        return {"ngrams": torch.tensor(ngrams, dtype=torch.int32).view(-1, both)}

    def read(self, state: State) -> Tensor:
        both = self.leader + self.follower
        return checked(state, "ngrams", (-1, both), 0, self.vocab_size - 1)

    def load(self, ngrams: Tensor) -> None:
        for ngram in ngrams.tolist():
            self.add(tuple(ngram[: self.leader]), tuple(ngram[self.leader :]))
