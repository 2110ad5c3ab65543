"""RACER: retrieved n-grams and recycled candidates in one tree of fixed capacity (arXiv 2604.14885).

Its public code (github.com/hkr04/RACER) has had three states, and all are here:

- `april`: the first release.
- `paper`: the recycled part grows by the paper's equation 3.
- `refill`: the recycled part grows inside the merged tree, so that no node is wasted.

They are followed step by step; where this project departs on purpose is listed in docs/design.md.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from ..decoding import Draft, Drafter, Needs, Session, Tree, Verification
from ..decoding.sampling import top_k
from ..errors import UserError
from ..recycling.matrix import AdjacencyMatrix
from .ngram_trie import NgramTrie, hash_order

MAX_NODES = 4096
MAX_TRIE = 1 << 24
# The depth at which a node's first child gets all of its breadth; elsewhere it gets half.
FULL_BREADTH_DEPTH = {"april": 1, "paper": 0, "refill": 0}


class Racer(Drafter):
    """Drafts what followed the text's longest matches, and fills the budget from the matrix of candidates.

    Everything is kept between prompts, as in the public code: the matrix, the trie of n-grams of prompts and answers,
    and the place in it where the last answer ended.

    Rank paths in step records: siblings are ranked as they came into the tree, retrieved ones first.

    Args:
        vocab_size: V.
        nodes: of every draft, the root not counted; the public code's capacity of 64 counts it.
        version: the state of the public code: april | paper | refill.
        k: candidates kept a token, and children of the root.
        ngram: n, the tokens of a stored n-gram.
        trie_nodes: of the trie, its root included.
        min_match: the least number of matched tokens, the root of the draft included, that is retrieved from.
        eos: ids that end an answer; what is accepted behind them is not inserted into the trie.

    Raises:
        UserError: a setting out of range.
    """

    stateful = True

    def __init__(
        self,
        vocab_size: int,
        *,
        nodes: int = 63,
        version: Literal["april", "paper", "refill"] = "refill",
        k: int = 8,
        ngram: int = 10,
        trie_nodes: int = 10000,
        min_match: int = 2,
        device: torch.device | str = "cpu",
        eos: Collection[int] = (),
    ) -> None:
        if version not in FULL_BREADTH_DEPTH:
            raise UserError(f"racer: version={version} must be one of {', '.join(FULL_BREADTH_DEPTH)}")
        for name, value, least, most in (
            ("nodes", nodes, 1, MAX_NODES),
            ("ngram", ngram, 2, MAX_NODES),
            ("min_match", min_match, 1, ngram),
            ("trie_nodes", trie_nodes, ngram + 2, MAX_TRIE),  # so that no n-gram evicts its own prefix
        ):
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise UserError(f"racer: {name}={value} must be from {least} to {most}")
        super().__init__(torch.device(device))
        self.version, self.capacity, self.eos = version, 1 + nodes, frozenset(eos)
        self.max_nodes, self.needs = 1 + nodes, Needs(candidates=k, prompt_logits=True)
        self._trie_settings = (ngram, trie_nodes, min_match)
        self.matrix = AdjacencyMatrix(vocab_size, k, dtype=torch.int32)
        self.trie = NgramTrie(*self._trie_settings)

    def session(self) -> RacerSession:
        return RacerSession(self)

    def reset(self) -> None:
        self.matrix.reset()
        self.trie = NgramTrie(*self._trie_settings)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.matrix.state_dict() | self.trie.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        trie = NgramTrie(*self._trie_settings)
        trie.load_state_dict(state, len(self.matrix.candidates))
        self.matrix.load_state_dict({"candidates": state.get("candidates", torch.zeros(0))})
        self.trie = trie

    def tree(self, root: int, retrieved: int, paths: list[list[int]]) -> MergedTree:
        """Build the tree of a step: the retrieved paths below the root, and the matrix' candidates.

        Args:
            retrieved: nodes that retrieval selected, which are taken off the budget of the matrix but for `refill`.
            paths: tokens below the root.
        """
        tree = MergedTree(root)
        for path in paths:
            tree.insert(path)
        if self.version == "refill":
            self._refill(tree)
        else:
            self._add_growth(tree, self.capacity - retrieved)
        return tree

    def _add_growth(self, tree: MergedTree, budget: int) -> None:
        """Grow a tree of `budget` nodes, the root included, by the matrix alone, and merge it into this one."""
        candidates = self.matrix.candidates.numpy()
        rows: dict[int, list[int]] = {}
        nodes = [0]
        for parent, rank in growth(budget, self.matrix.k, FULL_BREADTH_DEPTH[self.version]):
            token = tree.tokens[nodes[parent]]
            if token not in rows:
                rows[token] = candidates[token].tolist()
            nodes.append(tree.child(nodes[parent], rows[token][rank]))

    def _refill(self, tree: MergedTree) -> None:
        """Add candidates breadth-first below the nodes of this tree, found or new, until it is full."""
        candidates, tokens, children = self.matrix.candidates.numpy(), tree.tokens, tree.children
        queue, queued = [(0, self.matrix.k)], {0}
        for node, breadth in queue:  # grows while it is walked; every node has a child, so it ends with a full tree
            below = breadth if node == 0 else breadth // 2
            for token in candidates[tokens[node]].tolist()[:breadth]:
                child = children[node].get(token)
                if child is None:
                    if len(tokens) == self.capacity:
                        return
                    child = tree.add(node, token)
                if child not in queued:
                    queued.add(child)
                    queue.append((child, max(1, below)))
                below //= 2


class RacerSession(Session):
    """A sequence's place in the trie, and its newest tokens."""

    method: Racer

    def __init__(self, method: Racer) -> None:
        super().__init__(method)
        self._trie, self._place = method.trie, method.trie.place
        self._newest: list[int] = []  # n - 1 of them
        self._next: int | None = None  # the next root, if the answer goes on
        self._drafted = False

    def begin(self, prompt: list[int]) -> Draft:
        """Insert the prompt's n-grams; do not follow its tokens: the place is where the last answer ended.

        The first step is the prefill's own, as in the public code.
        """
        trie = self._trie = self.method.trie
        self._place = trie.place
        trie.insert_text(prompt)
        trie.build_fail_links()
        self._newest = prompt[-(trie.length - 1) :]
        return self.method.root_alone(prompt[-1])

    def observe_prompt(self, prompt: list[int], logits: torch.Tensor) -> None:
        matrix = self.method.matrix
        matrix.update(torch.tensor(prompt), top_k(logits, matrix.k).cpu())  # (m, k)

    def draft(self, root: int) -> Draft:
        self._place, borders = self._trie.step(self._place, root)
        self._next, self._drafted = None, True
        retrieved, paths = self._trie.continuations(borders, self.method.capacity) if borders else (0, [])
        return self.method.tree(root, retrieved, paths).draft()

    def observe(self, verification: Verification) -> None:
        tokens, candidates, eos = verification.draft.tokens, verification.candidates, self.method.eos
        assert candidates is not None
        self.method.matrix.update(tokens.cpu(), candidates.cpu())
        new = verification.tokens
        goes_on = len(new) == len(verification.path)  # else the answer ends with an accepted draft
        committed = [int(tokens[0]), *(new[:-1] if goes_on else new)]
        ended = next((i for i, token in enumerate(committed) if token in eos), None)
        self._next = new[-1] if goes_on and ended is None else None
        if self._drafted:  # else the root is the prompt's last token
            committed = committed if ended is None else committed[: ended + 1]
            self._read(committed)
            if len(committed) > 1:
                self._place = self._trie.walk(self._place, committed[1:])

    def _read(self, tokens: list[int]) -> None:
        """Append to the text and insert the n-grams that end in the new tokens."""
        text = self._newest + tokens
        self._trie.insert_newest(text, len(tokens))
        self._newest = text[-(self._trie.length - 1) :]

    def close(self) -> None:
        """Follow and insert the last token, which in the public code is the root of one more draft."""
        if self._next is not None:
            self._place, _ = self._trie.step(self._place, self._next)
            self._read([self._next])
        if self._newest:
            self._trie.place = self._place
        self._newest, self._next = [], None


class MergedTree:
    """A tree of tokens in which equal paths are merged. Node 0 is the root.

    Attributes:
        tokens: of each node.
        children: of each node, by token, in the order in which they came.
    """

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.children: list[dict[int, int]] = [{}]
        self._ranks = [0]  # among siblings

    def child(self, node: int, token: int) -> int:
        """Return the child of a node with this token; add it if it is missing."""
        child = self.children[node].get(token)
        return self.add(node, token) if child is None else child

    def add(self, node: int, token: int) -> int:
        """Add a child to a node and return it."""
        siblings = self.children[node]
        self._ranks.append(len(siblings))
        siblings[token] = child = len(self.tokens)
        self.tokens.append(token)
        self.children.append({})
        return child

    def insert(self, path: list[int]) -> None:
        """Insert a path below the root."""
        node = 0
        for token in path:
            node = self.child(node, token)

    def draft(self) -> Draft:
        """List nodes breadth-first, siblings in hash order: of equal tokens the last node's candidates count."""
        order, parents = [0], [0]
        for place, node in enumerate(order):  # grows while it is walked
            siblings = self.children[node]
            if len(siblings) > 1:
                order += [siblings[token] for token in hash_order(siblings)]
                parents += [place] * len(siblings)
            elif siblings:
                order += siblings.values()
                parents.append(place)
        tree = Tree(parents, [self._ranks[node] for node in order], once=True)
        return Draft(tree, torch.from_numpy(np.array([self.tokens[node] for node in order])))


@lru_cache(maxsize=1024)
def growth(budget: int, k: int, full_depth: int) -> list[tuple[int, int]]:
    """The shape of a tree of `budget` nodes by the matrix alone: parent and rank of each but the root.

    Breadth-first, a node of breadth b has the children of rank 0 to b - 1 while there are slots. The child of rank i
    has breadth h / 2^i, rounded down and at least 1, where h is b at depth `full_depth` and half of b elsewhere; the
    root's is k. Numbered from the root, 0, by first occurrence on the paths to the leaves, leaves breadth-first.
    """
    parents, ranks, breadths, depths = [0], [0], [k], [0]
    node = 0
    while len(parents) < budget:
        breadth, depth = breadths[node], depths[node]
        for rank in range(min(breadth, budget - len(parents))):
            parents.append(node)
            ranks.append(rank)
            breadths.append(max(1, (breadth if depth == full_depth else breadth // 2) >> rank))
            depths.append(depth + 1)
        node += 1
    number = {0: 0}
    shape: list[tuple[int, int]] = []
    for leaf in range(node, len(parents)):
        path = []
        while leaf not in number:
            path.append(leaf)
            leaf = parents[leaf]
        for node_on_path in reversed(path):
            number[node_on_path] = len(number)
            shape.append((number[parents[node_on_path]], ranks[node_on_path]))
    return shape
