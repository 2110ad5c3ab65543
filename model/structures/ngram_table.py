"""A table of n-grams in order of last use: leader -> followers, both bounded (arXiv 2511.21699)."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, islice

import torch

from ..engine.drafter import check_ids
from ..errors import UserError

Gram = tuple[int, ...]


class NgramTable:
    """Leaders of `leader` tokens, each with followers of `follower` tokens.

    The least recently seen is dropped first.

    Args:
        leader, follower: tokens in each.
        capacity: maximum leaders kept.
        followers: maximum followers kept for each leader.
        vocab_size: the ids of a saved table must be below it.
    """

    def __init__(
        self, leader: int, follower: int, *, capacity: int, followers: int, vocab_size: int = 0
    ) -> None:
        self.leader = leader
        self.follower = follower
        self.capacity = capacity
        self.followers = followers
        self.vocab_size = vocab_size
        self.reset()

    def reset(self) -> None:
        # oldest first; followers latest first
        self._rows: OrderedDict[Gram, list[Gram]] = OrderedDict()

    def followers_of(self, leader: Gram) -> list[Gram]:
        """Return the followers seen, latest first; a look-up does not count as use."""
        return self._rows.get(leader) or []

    def add(self, leader: Gram, follower: Gram) -> None:
        """Add a follower of a leader as the latest."""
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
        """Add every n-gram of a text, from its beginning on."""
        both = self.leader + self.follower
        for start in range(len(text) - both + 1):
            middle = start + self.leader
            self.add(tuple(text[start:middle]), tuple(text[middle : start + both]))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The table, its order included.

        Int32 leaders (R, leader), counts (R,), followers (sum of counts, follower).

        Leaders are listed oldest first, the followers of each latest first.
        """
        rows = self._rows
        grams = [*chain.from_iterable(rows.values())]
        return {
            "leaders": torch.tensor(list(rows), dtype=torch.int32).view(-1, self.leader),
            "counts": torch.tensor([len(row) for row in rows.values()], dtype=torch.int32),
            "followers": torch.tensor(grams, dtype=torch.int32).view(-1, self.follower),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load a table.

        Raises UserError if it is missing, too large, or of other n-grams or another vocabulary.
        """
        leaders, counts, followers = (
            state.get(name, torch.zeros(0)) for name in ("leaders", "counts", "followers")
        )
        sizes = counts.flatten().tolist()
        of_leaders = leaders.shape == (len(sizes), self.leader)
        of_followers = followers.shape == (sum(sizes), self.follower)
        few = len(sizes) <= self.capacity and all(1 <= size <= self.followers for size in sizes)
        if not (of_leaders and of_followers and few):
            raise UserError(
                f"start: the saved n-gram table is not one of at most {self.capacity} leaders of"
                f" {self.leader} tokens with 1 to {self.followers} followers of {self.follower}"
            )

        ids = torch.cat((leaders.flatten(), followers.flatten()))
        check_ids("n-gram table", ids, self.vocab_size)
        grams = iter(map(tuple, followers.tolist()))
        self.reset()

        for leader, size in zip(leaders.tolist(), sizes, strict=True):
            self._rows[tuple(leader)] = [*islice(grams, size)]
