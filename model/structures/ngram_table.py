"""A table of n-grams in order of last use: leader -> followers, both bounded (arXiv 2511.21699)."""

from __future__ import annotations

from collections import OrderedDict

import torch

from ..errors import UserError

Gram = tuple[int, ...]
_NAMES = ("leaders", "counts", "followers")


class NgramTable:
    """Leaders of `leader` tokens, each with followers of `follower` tokens; the least recently seen goes first.

    Args:
        leader, follower: tokens in each.
        capacity: leaders kept, at most.
        followers: kept for each leader, at most.

    Raises:
        UserError: one of them is less than 1.
    """

    def __init__(self, leader: int, follower: int, *, capacity: int, followers: int) -> None:
        sizes = {"leader": leader, "follower": follower, "capacity": capacity, "followers": followers}
        for name, size in sizes.items():
            if size < 1:
                raise UserError(f"ngram_cache: {name}={size} must be at least 1")
        self.leader, self.follower, self.capacity, self.followers = leader, follower, capacity, followers
        self._rows: OrderedDict[Gram, list[Gram]] = OrderedDict()  # oldest first; followers latest first

    def __len__(self) -> int:
        return len(self._rows)

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
        lead, both = self.leader, self.leader + self.follower
        for start in range(len(text) - both + 1):
            self.add(tuple(text[start : start + lead]), tuple(text[start + lead : start + both]))

    def clear(self) -> None:
        """Forget all."""
        self._rows.clear()

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """The table, its order included: int32 leaders (R, leader), counts (R,), followers (sum of counts, follower).

        Leaders are listed oldest first, the followers of each latest first.
        """
        rows = self._rows
        grams = [gram for row in rows.values() for gram in row]
        return {
            "leaders": torch.tensor(list(rows), dtype=torch.int32).view(-1, self.leader),
            "counts": torch.tensor([len(row) for row in rows.values()], dtype=torch.int32),
            "followers": torch.tensor(grams, dtype=torch.int32).view(-1, self.follower),
        }

    def load_tensors(self, tensors: dict[str, torch.Tensor], vocab_size: int) -> None:
        """Load a table made by `to_tensors`.

        Raises:
            UserError: it is no such table, of other n-grams, of another vocabulary, or larger than this one may be.
        """
        if set(tensors) != set(_NAMES) or any(t.dtype != torch.int32 for t in tensors.values()):
            raise UserError(f"start: an n-gram table holds {', '.join(_NAMES)} (int32), this one {sorted(tensors)}")
        leaders, counts, followers = (tensors[name].cpu() for name in _NAMES)
        if (*leaders.shape[1:], *followers.shape[1:]) != (self.leader, self.follower) or counts.dim() != 1:
            shapes = f"{list(leaders.shape)} and {list(followers.shape)}"
            expected = f"leader={self.leader} and follower={self.follower}"
            raise UserError(f"start: leaders and followers are {shapes}, which is not {expected}")
        ids = torch.cat((leaders.flatten(), followers.flatten()))
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise UserError(f"start: holds token ids outside the vocabulary of {vocab_size}: made for another model")
        sizes = counts.tolist()
        if len(sizes) != len(leaders) or sum(sizes) != len(followers) or min(sizes, default=1) < 1:
            raise UserError(f"start: its counts do not fit its {len(leaders)} leaders and {len(followers)} followers")
        if len(sizes) > self.capacity or max(sizes, default=0) > self.followers:
            raise UserError(
                f"start: {len(sizes)} leaders with up to {max(sizes)} followers, more than capacity={self.capacity} "
                f"and followers={self.followers} allow"
            )
        grams = iter(map(tuple, followers.tolist()))
        rows = OrderedDict(
            (tuple(row), [next(grams) for _ in range(n)]) for row, n in zip(leaders.tolist(), sizes, strict=True)
        )
        if len(rows) != len(sizes):
            raise UserError("start: the same leader is listed twice")
        self._rows = rows
