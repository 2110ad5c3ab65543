"""REST: drafts what followed the same n-gram in a corpus (arXiv 2311.08252).

The settings are the official code's (github.com/FasterDecoding/REST). Departures:

- Of too many occurrences, evenly spread ones are read; there, the first in lexicographic order.
- Ties in frequency go to the shallower node, then to the first in lexicographic order; there, a
  hash map's order decides.
- Nothing is drafted from an answer's end on.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from ...engine import Device, Draft, Drafter, Session, Verification
from ...engine.rule.tree import arranged
from ..limits import MAX_KEPT, check_whole
from .datastore import Datastore


class Rest(Drafter):
    """Drafts a tree from a datastore; a continuation stops before EOS."""

    def __init__(
        self,
        *,
        datastore_path: str,
        vocab_size: int,
        max_ngram: int = 16,
        min_ngram: int = 2,
        nodes: int = 64,
        depth: int = 10,
        places: int = 5000,
        eos: Collection[int] = (),
        device: Device = "cpu",
    ) -> None:
        check_whole("rest", 1, nodes=nodes, depth=depth, max_ngram=max_ngram)
        check_whole("rest", 1, MAX_KEPT, places=places)
        check_whole("rest", 1, max_ngram, min_ngram=min_ngram)
        super().__init__(device, vocab_size)
        self.datastore = Datastore(datastore_path, vocab_size=vocab_size)
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.nodes = nodes
        self.depth = depth
        self.places = places
        self.max_nodes = 1 + nodes
        self.eos = np.array(sorted(eos), dtype=np.int64)

    def session(self) -> RestSession:
        return RestSession(self)


class RestSession(Session):
    drafter: Rest

    def begin(self, prompt: list[int]) -> Draft:
        self._context = prompt[-self.drafter.max_ngram :]
        # as in the official code, the prefill verifies nothing
        return self.drafter.root_alone(prompt[-1])

    def draft(self, root: int) -> Draft:
        drafter = self.drafter
        n, first, last = drafter.datastore.longest(
            self._context, min_n=drafter.min_ngram, max_n=drafter.max_ngram
        )
        if not n:
            return drafter.root_alone(root)

        continuations = drafter.datastore.continuations(
            first, last, skip=n, length=drafter.depth, limit=drafter.places
        )
        if len(drafter.eos):
            continuations[
                np.logical_or.accumulate(np.isin(continuations, drafter.eos), axis=1)
            ] = -1

        parents, tokens = most_frequent(continuations, drafter.nodes)
        draft, _ = arranged([root, *tokens], parents)
        return draft

    def observe(self, verification: Verification) -> None:
        self._context = (self._context + verification.tokens)[-self.drafter.max_ngram :]


def most_frequent(continuations: NDArray[np.int64], nodes: int) -> tuple[list[int], list[int]]:
    """Return parents (1 + m,) and tokens (m,) of a trie's most frequent nodes, the root first.

    A node is a run of rows, its frequency the run's length. Ties go to the shallower node, so the
    nodes are a tree.

    Args:
        continuations: int64 (s, length) in lexicographic order; a row ends at its first -1.
    """
    s, length = continuations.shape
    # [i, d]: row i begins another node of depth d + 1 than row i - 1
    differs = np.ones((s, length), dtype=bool)
    np.logical_or.accumulate(continuations[1:] != continuations[:-1], axis=1, out=differs[1:])
    index = np.flatnonzero(differs.T)  # of every node: s * depth + the first row of its run
    depth, first = np.divmod(index, s)
    last = np.append(first[1:], 0)
    last[last == 0] = s  # a depth's last run ends with the rows; the next depth begins with row 0
    token = continuations[first, depth]
    count = last - first
    real = np.flatnonzero(token >= 0)
    best = real[np.lexsort((first[real], depth[real], -count[real]))[:nodes]]
    # the parent of each; -1: the root
    above = np.searchsorted(index, index[best] - s, side="right") - 1
    number = {node: i for i, node in enumerate([-1, *best.tolist()])}
    return [0, *(number[node] for node in above.tolist())], token[best].tolist()
