"""Cacheback: drafts what recently followed the last tokens (arXiv 2511.21699).

A leader (the last few tokens) has followers (the few tokens after it). A draft is one of a few
fixed trees of followers; a slot that no follower fills repeats its parent's last token. The paper's
second table, frozen from a corpus, is left out. Lengths and capacities are this project's reading
of the paper.
"""

from __future__ import annotations

from itertools import chain, islice

import torch

from ...engine import Device, DeviceSession, Draft, RankPath, Verification
from ...recycling.templates import best_first
from ..limits import MAX_KEPT, check_whole
from .layouts import Layout, LayoutDrafter
from .ngram_table import Gram, NgramTable

# a follower's rank path: (2, 0) is the latest follower at the end of the root's third latest one
Slot = RankPath


class NgramCache(LayoutDrafter):
    """Drafts the followers of the last tokens."""

    stateful = True

    def __init__(
        self,
        vocab_size: int,
        *,
        leader: int = 1,
        follower: int = 3,
        capacity: int = 32768,
        followers: int = 8,
        nodes: int = 24,
        device: Device = "cpu",
    ) -> None:
        check_whole("ngram_cache", 1, MAX_KEPT, capacity=capacity)
        check_whole("ngram_cache", 1, 64, leader=leader, follower=follower, followers=followers)
        check_whole("ngram_cache", follower, nodes=nodes)
        super().__init__(device, vocab_size)
        self.leader = leader
        self.follower = follower
        self.table = NgramTable(
            leader, follower, capacity=capacity, followers=followers, vocab_size=vocab_size
        )
        self.stores = [self.table]
        self.shapes = [
            _Shape(best_slots(nodes // follower, due, followers), follower, self.device)
            for due in range(followers + 1)
        ]
        self.max_nodes = max(len(shape.tree) for shape in self.shapes)

    def session(self) -> NgramCacheSession:
        return NgramCacheSession(self)


class NgramCacheSession(DeviceSession):
    drafter: NgramCache

    def begin(self, prompt: list[int]) -> Draft:
        self._recent: list[int] = []
        self._extend(prompt)  # earlier turns again, too, so that they count as last used
        return self.drafter.root_alone(prompt[-1])

    def choose(self) -> None:
        drafter = self.drafter
        table = drafter.table
        start = tuple(self._recent[-drafter.leader :])
        shape = drafter.shapes[len(table.followers_of(start))]
        ends: list[Gram] = [start]  # the leader at the end of the root, and of each slot
        tokens = [self._recent[-1]]
        for parent, rank in shape.slots:
            leader = ends[parent]
            followers = table.followers_of(leader)
            gram = followers[rank] if rank < len(followers) else leader[-1:] * drafter.follower
            tokens += gram
            ends.append((leader + gram)[-drafter.leader :])

        drafter.lay_out(shape, tokens)

    def account(self, verification: Verification) -> None:
        self._extend(verification.tokens)

    def _extend(self, tokens: list[int]) -> None:
        text = self._recent + tokens
        self.drafter.table.add_text(text)
        self._recent = text[-(self.drafter.leader + self.drafter.follower - 1) :]


class _Shape(Layout):
    """One chain of `follower` nodes for each slot; `slots` are parent slot (0: root) and rank."""

    def __init__(self, slots: list[Slot], follower: int, device: torch.device) -> None:
        index = {slot: i for i, slot in enumerate([(), *slots])}
        self.slots = [(index[slot[:-1]], slot[-1]) for slot in slots]
        nodes: list[RankPath] = [()]
        for slot in slots:
            # A slot's first node has the slot's rank below the parent slot's last node; its other
            # nodes have rank 0.
            path = tuple(chain.from_iterable((rank, *[0] * (follower - 1)) for rank in slot))
            nodes += [path[: len(path) - follower + 1 + i] for i in range(follower)]
        super().__init__(nodes, device)


def best_slots(count: int, due: int, followers: int) -> list[Slot]:
    """List the best slots if the root has `due` followers, by the product of 0.25 / (rank + 1)."""
    shares = [0.25 / (rank + 1) for rank in range(followers)]
    slots = best_first(lambda slot: shares[: followers if slot else due])
    return [slot for _, slot in islice(slots, count)]
