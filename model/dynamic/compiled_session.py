"""Dynamic recycling's sessions by compiled loops. Imported only where `jit.compiled` says so."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from .. import host_loops as loops
from ..copying.compiled_automaton import CompiledAutomaton
from ..decoding import Draft, Tree, Verification
from ..sizing import Sizing
from .dynamic_recycling import UNLISTED, Candidate, DynamicSession
from .rows import LEVELS, PairRows, TokenRows, on_host
from .weights import (
    AND_SIBLING,
    AND_SIBLING_CHILD,
    BACKOFF,
    COPIED,
    FIRST_CELL,
    PAIR,
    SIBLING,
    SIBLING_CHILD,
    TOKEN,
    Weights,
    cell,
)

CELL_OFFSETS = (
    np.array([FIRST_CELL[source] for source in (PAIR, TOKEN, BACKOFF, SIBLING_CHILD, SIBLING, COPIED)]),
    np.array([LEVELS, cell(PAIR, AND_SIBLING_CHILD, 0, False), cell(PAIR, AND_SIBLING, 0, False)]),
)


class CompiledSession(DynamicSession):
    """A DynamicSession with the same drafts, node by node, and the same learning, bit by bit."""

    def begin(self, prompt: list[int]) -> Draft | None:
        method = self.method
        self._growth = Growth(method.nodes, method.k, method.rows, method.pairs)
        return super().begin(prompt)

    def draft(self, root: int) -> Draft:
        method, text = self.method, self.text
        assert isinstance(text, CompiledAutomaton)
        match = text.match if method.copy else None
        parents, tokens = self._growth.draft(self._before, root, match, text, method.weights, method.sizing)
        return Draft(Tree(parents, once=True), torch.from_numpy(tokens))

    def observe(self, verification: Verification) -> None:
        method, draft, node = self.method, verification.draft, verification.node
        tokens, accepted = draft.tokens.numpy(), verification.accepted.numpy()
        choices = np.ascontiguousarray(verification.choices.numpy())
        outcome = choices, accepted, *_on_host(verification)
        self._growth.learn(self._before, node, outcome, method.weights, siblings=method.siblings)
        self._before = int(tokens[node])
        self.read(verification.tokens)

    def passed(self, tokens: list[int]) -> None:
        super().passed(tokens)
        self._growth.siblings = [], []

    def _note_siblings(self, ids: Any, levels: Any, node: int, rejected: list[tuple[int, int]], root: int) -> None:
        """Copy the siblings of the first root, noted by the prompt, into the arrays."""
        super()._note_siblings(ids, levels, node, rejected, root)
        if self.method.siblings:
            self._growth.siblings = self._sibling_children, self._siblings


class Growth:
    """A draft as it grows, in the arrays that `host_loops` calls a draft; it is good until the next one.

    Attributes:
        rows: the drafter's, as `host_loops` has them; written where the drafter's method are.
    """

    def __init__(self, nodes: int, k: int, rows: TokenRows, pairs: PairRows | None) -> None:
        most = (1 + nodes) * (2 * k + 1) + 2 * k  # candidates
        self.nodes = nodes
        self._counts, self._nodes = np.zeros(6, dtype=np.int64), np.zeros((2 + nodes, 5), dtype=np.int64)
        self._likelihoods, self._candidates = np.ones(1 + nodes), np.empty((most, 3), dtype=np.int32)
        self._siblings = np.empty((2, k, 2), dtype=np.int32)
        heap = np.empty(most), np.empty(most, dtype=np.int64)
        self._draft = (self._counts, self._nodes, self._likelihoods, self._candidates, self._siblings, *heap)
        self._scratch = np.zeros(len(rows.ids)), np.empty(nodes * k, dtype=np.int64)
        self._places = np.empty((2, 1 + nodes), dtype=np.int64)
        by_pair = PairRows(2, k) if pairs is None else pairs
        keys = by_pair.keys[: 0 if pairs is None else None]
        arrays = rows.ids, rows.levels, rows.seen, by_pair.ids, by_pair.levels, by_pair.seen
        self.rows = (*arrays, keys, by_pair.shift)

    def draft(
        self,
        before: int,
        root: int,
        match: tuple[int, int] | None,
        text: CompiledAutomaton,
        weights: Weights,
        size: Sizing | None,
    ) -> tuple[list[int], Any]:
        """The draft below a root, parents and tokens breadth-first; see DynamicSession.draft.

        Args:
            match: of the text's end; None: nothing is copied.
            size: None: as many nodes as allowed.
        """
        place = before, root, *(match or (0, 0))
        shared_args = match is not None, self._draft, self.rows, text.arrays, CELL_OFFSETS, weights.probs
        if size is None:
            count, _ = loops.grow(self.nodes, place, True, *shared_args)
        else:
            for limit in size.sizes:
                count, following = loops.grow(limit, place, limit == 0, *shared_args)
                if following < 0 or size.enough(self._likelihoods[:count], following):
                    break
            count = 1 + size.choose(self._likelihoods[:count])
        order, parents, tokens = self._order = tuple(np.empty((3, count), dtype=np.int64))
        loops.arrange(count, self._nodes, order, parents, tokens, self._places)
        return parents.tolist(), tokens

    def learn(self, before: int, node: int, outcome: tuple[Any, ...], weights: Weights, *, siblings: bool) -> None:
        """Learn from the last draft; see DynamicSession.observe.

        Args:
            outcome: of each node the target's choice, True if accepted, candidates and bits.
            siblings: True: note the siblings of the next root.
        """
        settings = LEVELS, UNLISTED, weights.learning, siblings
        tables = weights.seen, weights.accepted, weights.probs
        loops.learn(before, node, self._order, outcome, *settings, self._draft, self.rows, tables, self._scratch)

    @property
    def siblings(self) -> tuple[list[Candidate], list[Candidate]]:
        """From the last step: what followed the next root's rejected siblings, and these siblings."""
        counts = self._counts[loops.FOLLOWED_LISTED :].tolist()
        followed, rejected = (
            [(token, level) for token, level in rows[:count].tolist()]
            for rows, count in zip(self._siblings, counts, strict=True)
        )
        return followed, rejected

    @siblings.setter
    def siblings(self, listed: tuple[list[Candidate], list[Candidate]]) -> None:
        for which, rows in enumerate(listed):
            self._counts[loops.FOLLOWED_LISTED + which] = len(rows)
            if rows:
                self._siblings[which, : len(rows)] = rows


def _on_host(verification: Verification) -> tuple[Any, Any]:
    """Candidates and bits, (n, k) each, int64 and float32; on a device the bits are rounded down."""
    best, bits = verification.candidates, verification.bits
    assert best is not None and bits is not None
    if best.device.type != "cpu":
        ids, levels = on_host(best, bits)
        return ids.astype(np.int64), levels.astype(np.float32)
    bits = bits if bits.dtype == torch.float32 else bits.float()
    return np.ascontiguousarray(best.numpy()), np.ascontiguousarray(bits.numpy())


@cache
def compile_loops() -> None:
    """Compile all loops for the types they are called with, or load them."""
    text, rows, weights = CompiledAutomaton([0, 1, 0]), TokenRows(2, 1), Weights()
    growth = Growth(1, 1, rows, PairRows(2, 1))
    growth.siblings = [(0, 0)], []
    _, tokens = growth.draft(0, 0, text.match, text, weights, None)
    shape = len(tokens), 1
    outcome = (
        tokens,
        np.ones(len(tokens), dtype=bool),
        np.zeros(shape, dtype=np.int64),
        np.zeros(shape, dtype=np.float32),
    )
    growth.learn(0, 0, outcome, weights, siblings=True)
