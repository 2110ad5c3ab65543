"""Rank paths as the page prints them."""

from __future__ import annotations

from itertools import groupby

from model.decoding.tree import RankPath

MOST_EQUAL = 3  # ranks in a row that are spelled out


def spelled(path: RankPath) -> str:
    """The ranks from the root down: 0·0·1; of a deep path 0×36 is the same rank 36 times. Empty for the root."""
    runs = [(str(rank), len(list(same))) for rank, same in groupby(path)]
    return "·".join(f"{rank}×{n}" if n > MOST_EQUAL else "·".join([rank] * n) for rank, n in runs)
