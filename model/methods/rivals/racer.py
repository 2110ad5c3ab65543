"""RACER: retrieved n-grams and recycled candidates in one tree (arXiv 2604.14885).

Its public code (github.com/hkr04/RACER) is followed, in the variant whose recycled part grows
inside the merged tree. Departures: the prefill's token is a step of its own, no step has EOS as its
root, and the tree does not shrink near the context's end.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from ...engine import Device, Draft, Drafter, Needs, Session, State, Tree, Verification, top_k
from ...recycling.matrix import AdjacencyMatrix
from ..limits import MAX_KEPT, check_whole
from .ngram_trie import NgramTrie, hash_order


class Racer(Drafter):
    """Drafts what followed the text's longest matches, then fills the tree from the matrix."""

    stateful = True

    def __init__(
        self,
        vocab_size: int,
        *,
        nodes: int = 63,
        k: int = 8,
        ngram: int = 10,
        trie_nodes: int = 10000,
        min_match: int = 2,
        device: Device = "cpu",
        eos: Collection[int] = (),
    ) -> None:
        check_whole("racer", 1, nodes=nodes)
        check_whole("racer", 2, ngram=ngram)
        check_whole("racer", 1, ngram, min_match=min_match)
        # so that no n-gram evicts its own prefix
        check_whole("racer", ngram + 2, MAX_KEPT, trie_nodes=trie_nodes)
        super().__init__(device, vocab_size)
        self.eos = frozenset(eos)  # tokens accepted after these are not inserted into the trie
        self.max_nodes = 1 + nodes
        self.needs = Needs(candidates=k, prompt_logits=True)
        self._trie_settings = (ngram, trie_nodes, min_match)
        self.matrix = AdjacencyMatrix(vocab_size, k, dtype=torch.int32)
        self.stores = [self.matrix]
        self.trie = NgramTrie(*self._trie_settings)

    def session(self) -> RacerSession:
        return RacerSession(self)

    def reset(self) -> None:
        super().reset()
        self.trie = NgramTrie(*self._trie_settings)

    def state_dict(self) -> State:
        return super().state_dict() | self.trie.state_dict()

    def load_state_dict(self, state: State) -> None:
        trie = NgramTrie(*self._trie_settings)
        trie.load_state_dict(state, len(self.matrix.candidates))
        super().load_state_dict(state)
        self.trie = trie

    def tree(self, root: int, paths: list[tuple[int, ...]]) -> MergedTree:
        """Build the tree of a step from paths below the root, and fill it from the matrix.

        A node of breadth b has its b best candidates as children. The child of rank i has breadth h
        / 2^i, at least 1, where h is b at the root and half of b elsewhere.
        """
        tree = MergedTree(root)
        for path in paths:
            tree.insert(path)

        candidates = self.matrix.candidates.numpy()
        tokens = tree.tokens
        children = tree.children
        queue = [(0, self.matrix.k)]
        queued = {0}
        # grows while it is walked; every node has a child, so it ends with a full tree
        for node, breadth in queue:
            below = breadth if node == 0 else breadth // 2
            for token in candidates[tokens[node]].tolist()[:breadth]:
                child = children[node].get(token)
                if child is None:
                    if len(tokens) == self.max_nodes:
                        return tree
                    child = tree.add(node, token)
                if child not in queued:
                    queued.add(child)
                    queue.append((child, max(1, below)))
                below //= 2

        return tree


class RacerSession(Session):
    drafter: Racer

    def __init__(self, drafter: Racer) -> None:
        super().__init__(drafter)
        self._trie = drafter.trie
        self._node = drafter.trie.current
        self._newest: list[int] = []  # the last n - 1 tokens
        self._next: int | None = None  # the next root, if the answer goes on
        self._drafted = False

    def begin(self, prompt: list[int]) -> Draft:
        """Insert the prompt's n-grams; its tokens are not followed, as in the public code."""
        trie = self._trie = self.drafter.trie
        self._node = trie.current
        for ngram in trie.ngrams(prompt):
            trie.insert(ngram)
        trie.build_fail_links()
        self._newest = prompt[-(trie.length - 1) :]
        return self.drafter.root_alone(prompt[-1])

    def observe_prompt(self, prompt: list[int], start: int, logits: Tensor) -> None:
        matrix = self.drafter.matrix
        tokens = torch.tensor(prompt[start : start + len(logits)])
        matrix.update(tokens, top_k(logits, matrix.k).cpu())  # (m, k)

    def draft(self, root: int) -> Draft:
        self._node, borders = self._trie.step(self._node, root)
        self._next = None
        self._drafted = True
        return self.drafter.tree(
            root, self._trie.continuations(borders, self.drafter.max_nodes)
        ).draft()

    def observe(self, verification: Verification) -> None:
        tokens = verification.draft.tokens
        candidates = verification.candidates
        eos = self.drafter.eos
        assert candidates is not None
        self.drafter.matrix.update(tokens.cpu(), candidates.cpu())
        new = verification.tokens
        goes_on = len(new) == len(verification.path)  # else the answer ends with an accepted draft
        committed = [int(tokens[0]), *(new[:-1] if goes_on else new)]
        ended = next((i for i, token in enumerate(committed) if token in eos), None)
        self._next = new[-1] if goes_on and ended is None else None
        if self._drafted:  # else the root is the prompt's last token
            committed = committed if ended is None else committed[: ended + 1]
            self._read(committed)
            if len(committed) > 1:
                self._node = self._trie.walk(self._node, committed[1:])

    def _read(self, tokens: list[int]) -> None:
        text = self._newest + tokens
        for ngram in reversed(self._trie.ngrams(text)):
            self._trie.insert(ngram)
        self._newest = text[-(self._trie.length - 1) :]

    def close(self) -> None:
        """Follow and insert the last token, in the public code the root of one more draft."""
        if self._next is not None:
            self._node, _ = self._trie.step(self._node, self._next)
            self._read([self._next])
        if self._newest:
            self._trie.current = self._node
        self._newest = []
        self._next = None


class MergedTree:
    def __init__(self, root: int) -> None:
        self.tokens = [root]
        # of each node, by token, in the order in which they came
        self.children: list[dict[int, int]] = [{}]
        self._ranks = [0]  # among siblings

    def add(self, node: int, token: int) -> int:
        siblings = self.children[node]
        self._ranks.append(len(siblings))
        siblings[token] = child = len(self.tokens)
        self.tokens.append(token)
        self.children.append({})
        return child

    def insert(self, path: tuple[int, ...]) -> None:
        node = 0
        for token in path:
            child = self.children[node].get(token)
            node = self.add(node, token) if child is None else child

    def draft(self) -> Draft:
        """Return the draft, breadth-first, siblings in hash order."""
        order = [0]
        parents = [0]
        for index, node in enumerate(order):  # grows while it is walked
            siblings = self.children[node]
            tokens = hash_order(siblings) if len(siblings) > 1 else siblings
            order += [siblings[token] for token in tokens]
            parents += [index] * len(siblings)

        tree = Tree(parents, [self._ranks[node] for node in order])
        return Draft(tree, torch.from_numpy(np.array([self.tokens[node] for node in order])))
