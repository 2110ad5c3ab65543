"""Goose: a copied chain with recycled candidates as its branches (arXiv 2604.02047).

The rules are those of the public code at its default settings,
github.com/2kinto/GOOSE_Speculative_Decoding at c5c8bb3. The prefill, which commits one token there,
is the first step here. `nodes=N` and `start=hot` are this project's.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ...engine import Device, Draft, Drafter, Needs, Session, State, Verification, checked, top_k
from ...engine.rule.tree import arranged
from ..copying.suffix_automaton import SuffixAutomaton
from ..limits import MAX_KEPT, MAX_NODES, check_whole

# The public code's settings. Its sizes count the root.
# nodes of a tree at confidence 0 and 1
BASE = 60
LARGEST = 100
DEPTH = 6  # maximum depth of branches of branches
ROW_CANDIDATES = 10
MIN_SCORE = 0.01  # least score of a drafted candidate
SPINE_SHARE = 0.5  # share of the branches that hang on the spine
NGRAMS = (3, 5)  # tokens of the shortest and the longest n-gram
MAX_COPY = 20  # maximum tokens of one look-up
LONG_COPY = 8  # tokens of a continuation that counts as long
EXTEND_ABOVE = 0.6  # confidence above which the copy is extended
# weights in the moving average of the spine's acceptance; its start
NEWEST = 0.3
OLDER = 0.7
FIRST_AVERAGE = 0.5
# the spine's share of the budget, for averages below each limit
SHARES = (
    (0.2, 0.15),
    (0.4, 0.30),
    (math.inf, 0.50),
)
NONE = -1  # instead of the token before another one
ScoredRow = tuple[list[int], list[float]]  # candidates, best first, and their scores
HARMONIC = [0.0, *accumulate(1 / i for i in range(1, MAX_NODES + 1))]


class Goose(Drafter):
    """Drafts a copied chain, the spine, with candidates of rows by token and pair as branches."""

    stateful = True

    def __init__(
        self,
        vocab_size: int,
        *,
        nodes: int | None = None,
        history_pairs: int = 65536,
        device: Device = "cpu",
    ) -> None:
        if nodes is not None:
            check_whole("goose", 1, nodes=nodes)

        check_whole("goose", 0, MAX_KEPT, history_pairs=history_pairs)
        super().__init__(device, vocab_size)
        # a tree's size at confidence 0, root included, and the nodes that confidence 1 adds
        self.base = BASE if nodes is None else nodes + 1
        self.growth = LARGEST - BASE if nodes is None else 0
        self.limit = nodes or LARGEST  # nodes below the root
        self.max_nodes = 1 + self.limit
        self.k = min(ROW_CANDIDATES, vocab_size)
        self.needs = Needs(logits=True, candidates=self.k, prompt_logits=True, tree=True)
        self.history_pairs = history_pairs
        self.rows = Rows(vocab_size, self.k)
        self.stores = [self.rows]

    def session(self) -> GooseSession:
        return GooseSession(self)


class Rows:
    """The target's newest top candidates after a token and after a pair.

    A score is the softmax over the row's candidates alone. Rows by token keep it as float16.
    """

    def __init__(self, vocab_size: int, k: int) -> None:
        self.vocab_size = vocab_size
        self.k = k
        self.reset()

    def reset(self) -> None:
        # by pair of tokens, the newest last, or by NONE and a token
        self.rows: dict[tuple[int, int], ScoredRow] = {}

    def find(self, before: int, token: int) -> ScoredRow | None:
        return self.rows.get((before, token)) or self.rows.get((NONE, token))

    # rows (m, k) for m tokens, in order; `before` NONE: no row by pair
    def write(self, before: list[int], tokens: list[int], ids: Tensor, scores: Tensor) -> None:
        exact_scores = scores.cpu().numpy()
        columns = ids.tolist(), exact_scores.tolist(), exact_scores.astype(np.float16).tolist()
        for first, token, row, exact, rounded in zip(before, tokens, *columns, strict=True):
            self.rows[NONE, token] = row, rounded
            if first != NONE:
                self.rows.pop((first, token), None)
                self.rows[first, token] = row, exact

    def forget_pairs(self, limit: int) -> None:
        pairs = [key for key in self.rows if key[0] != NONE]
        for pair in pairs[: max(len(pairs) - limit, 0)]:
            del self.rows[pair]

    def state_dict(self) -> State:
        ids = [row[0] for row in self.rows.values()]
        scores = [row[1] for row in self.rows.values()]
        return {
            "row_keys": torch.tensor(list(self.rows), dtype=torch.int64).view(-1, 2),
            "row_ids": torch.tensor(ids, dtype=torch.int32).view(-1, self.k),
            "row_scores": torch.tensor(scores, dtype=torch.float32).view(-1, self.k),
        }

    def read(self, state: State) -> dict[tuple[int, int], ScoredRow]:
        last = self.vocab_size - 1  # token id
        keys = checked(state, "row_keys", (-1, 2), NONE, last)
        shape = len(keys), self.k
        ids = checked(state, "row_ids", shape, 0, last).tolist()
        scores = checked(state, "row_scores", shape, 0, 1, real=True).tolist()
        return dict(zip(map(tuple, keys.tolist()), zip(ids, scores, strict=True), strict=True))

    def load(self, rows: dict[tuple[int, int], ScoredRow]) -> None:
        self.rows.update(rows)


class Branching:
    """A tree that grows: its spine's nodes come right after the root, then branches."""

    def __init__(self, rows: Rows, before: int, root: int, spine: list[int]) -> None:
        self.rows = rows
        self.before = before  # the token before the root
        self.tokens = [root, *spine]
        self.parents = [0, *range(len(spine))]
        self.branches: list[tuple[int, int, float]] = []  # to extend: node, depth, score

    def attach(
        self, node: int, depth: int, limit: int, on_spine: int | None, width: int = ROW_CANDIDATES
    ) -> None:
        """Add the best `width` candidates but `on_spine` below a node, at most `limit`."""
        before = self.tokens[self.parents[node]] if node else self.before
        ids, scores = self.rows.find(before, self.tokens[node]) or ([], [])
        children = [
            (token, score)
            for token, score in zip(ids[:width], scores, strict=False)
            if token != on_spine and score >= MIN_SCORE
        ]
        for token, score in children[: max(limit, 0)]:
            if depth < DEPTH:
                self.branches.append((len(self.tokens), depth, score))
            self.tokens.append(token)
            self.parents.append(node)


class GooseSession(Session):
    drafter: Goose

    def begin(self, prompt: list[int]) -> Draft | None:
        self.drafter.rows.forget_pairs(self.drafter.history_pairs)
        self._text = SuffixAutomaton(prompt)
        self._acceptance = FIRST_AVERAGE
        self._before = NONE  # the token before the next root
        self._drafted = False  # False in the first step: no draft, and its rows are the prompt's
        return super().begin(prompt)

    def observe_prompt(self, prompt: list[int], start: int, logits: Tensor) -> None:
        ids = top_k(logits, self.drafter.k)
        end = start + len(logits)
        before = [NONE, *prompt][start:end]
        self.drafter.rows.write(before, prompt[start:end], ids, scores_of(logits, ids))

    def draft(self, root: int) -> Draft:
        drafter = self.drafter
        chain, unanimous = self._copied([])
        pair_written = True  # whether the root's row by pair is written: not after a tree
        self._spine = 0  # the acceptance of a bare chain is not counted
        if drafter.rows.find(self._before, root) is None:
            tree = Branching(drafter.rows, self._before, root, chain[: drafter.limit])
        else:
            conf = confidence(len(chain), unanimous)
            self._extend(chain, conf)
            tree = self._grow(root, chain, conf)
            pair_written = len(tree.tokens) == 1

        before = [tree.tokens[parent] for parent in tree.parents]
        before[0] = self._before if pair_written else NONE
        self._built = (before, tree.tokens)
        self._drafted = True
        draft, self._order = arranged(tree.tokens, tree.parents)
        return draft

    def _copied(self, chain: list[int]) -> tuple[list[int], bool]:
        """Return what first followed the end of text and `chain`; True if nothing else ever did."""
        text = self._text.tokens
        start, unanimous = self._text.find(text[-NGRAMS[1] :] + chain, *NGRAMS)
        return text[start : start + MAX_COPY] if start else [], unanimous

    def _extend(self, chain: list[int], conf: float) -> None:
        if conf <= EXTEND_ABOVE:
            return
        limit = int(self.drafter.limit * conf)
        while len(chain) < limit:
            more, unanimous = self._copied(chain)
            chain += more
            if not more or (conf == 1.0 and not unanimous):
                break

    def _grow(self, root: int, chain: list[int], conf: float) -> Branching:
        drafter = self.drafter
        budget = drafter.base + int(conf * drafter.growth)
        share = next(share for below, share in SHARES if self._acceptance < below)
        spine = min(len(chain), int(budget * (share + conf * (1 - share))), drafter.limit)
        self._spine = spine
        tree = Branching(drafter.rows, self._before, root, chain[:spine])

        left = budget - 1 - spine
        on_spine = max(1, int(left * SPINE_SHARE)) if spine and left > 0 else 0
        limits = [left - on_spine, *shares(on_spine, spine)]
        for node, (limit, next_on_spine) in enumerate(
            zip(limits, [*chain[:spine], None], strict=False)
        ):
            tree.attach(node, node + 1, limit, next_on_spine)

        for node, depth, score in tree.branches:  # grows while it is walked
            left = budget - len(tree.tokens)
            if left <= 0:
                break
            width = min(max(1, math.ceil(left * score)), max(1, ROW_CANDIDATES // depth))
            tree.attach(node, depth + 1, left, None, width)
        return tree

    def observe(self, verification: Verification) -> None:
        draft = verification.draft
        node = verification.node
        if self._drafted:
            before, tokens = self._built
            ids = verification.candidates
            logits = verification.logits
            assert ids is not None and logits is not None
            order = torch.from_numpy(np.argsort(self._order)).to(ids.device)
            # only ids may be on the host
            scores = scores_of(logits, ids.to(logits.device)).to(ids.device)
            self.drafter.rows.write(before, tokens, ids[order], scores[order])
            if self._spine:
                path = [self._order[i] for i in draft.tree.chain_of[node]]
                accepted = bisect_right(path, self._spine) - 1
                self._acceptance = NEWEST * accepted / self._spine + OLDER * self._acceptance

        self._before = int(draft.tokens[node])
        self._text.extend(verification.tokens)


def confidence(length: int, unanimous: bool) -> float:
    if unanimous:
        return 1.0
    if length >= LONG_COPY:
        return min(0.9, 0.7 + 0.2 * (length - LONG_COPY) / 12.0)
    return 0.6 * length / LONG_COPY


def shares(branches: int, spine: int) -> list[int]:
    counts = list[int]()
    left = branches
    for depth in range(1, spine + 1):
        if left <= 0:
            break
        counts.append(min(max(1, int(branches * (1 / depth) / HARMONIC[spine])), left))
        left -= counts[-1]
    return counts


def scores_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the softmax over candidates (n, k) alone, float32; zero where logits are NaN."""
    return torch.softmax(logits.gather(1, ids), -1).float().nan_to_num(0.0)
