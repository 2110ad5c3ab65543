"""The bounded Aho-Corasick trie of n-grams from which RACER retrieves (arXiv 2604.14885).

Three details of its public code are reproduced, as accepted lengths depend on them:

- A full trie reuses the least recently touched node, even one with children.
- Fail links are built once a prompt; a node made later links to the root.
- Siblings come in the order of libstdc++'s hash map.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from itertools import chain

import torch
from torch import Tensor

from ...engine import State, checked
from ...engine.contract.saved import MAX_COUNT
from ...errors import UserError

# libstdc++'s
HASH_BUCKETS = (
    13,
    29,
    59,
    127,
    257,
    541,
    1109,
    2357,
    5087,
    10273,
    20753,
    42043,
    85229,
    172933,
    351061,
)
_NUMBERS = ("token", "freq", "depth", "buckets")
_LINKS = ("parent", "fail")


@dataclass(slots=True, eq=False)
class TrieNode:
    number: int  # in the order in which nodes are made
    parent: TrieNode | None = None
    fail: TrieNode | None = None  # None of the root alone
    token: int = 0
    freq: int = 0
    depth: int = 0
    buckets: int = 1  # of its hash map; a node that is reused keeps them
    # by token, in hash order from depth `shortest` on, where order counts
    children: dict[int, TrieNode] = field(default_factory=dict)


class NgramTrie:
    """n-grams with a count of each prefix, and the automaton that follows a text through them.

    Attributes:
        current: the node where the last sequence ended, from which the next one goes on.
        shortest: the least depth of a node that is retrieved from.
    """

    def __init__(self, length: int, max_nodes: int, shortest: int) -> None:
        self.length = length
        self.max_nodes = max_nodes
        self.shortest = shortest
        self.root = TrieNode(0)
        self.current = self.root
        # all nodes, the least recently touched first
        self.recency: OrderedDict[TrieNode, None] = OrderedDict({self.root: None})

    def insert(self, ngram: Iterable[int]) -> None:
        touch = self.recency.move_to_end
        node = self.root
        for token in ngram:
            touch(node)
            node = node.children.get(token) or self._make(node, token)
            node.freq += 1

        touch(node)

    def ngrams(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        return [tokens[end - self.length : end] for end in range(self.length, len(tokens) + 1)]

    def _make(self, parent: TrieNode, token: int) -> TrieNode:
        if len(self.recency) < self.max_nodes:
            node = TrieNode(len(self.recency))
        else:
            node, _ = self.recency.popitem(last=False)
            assert node.parent is not None  # the root is never the least recently touched
            if node.parent.children.get(node.token) is node:
                del node.parent.children[node.token]

        node.children = {}
        node.parent = parent
        node.token = token
        node.depth = parent.depth + 1
        node.fail = self.root
        node.freq = 0
        self.recency[node] = None
        self._list(parent, node)
        return node

    def _list(self, parent: TrieNode, node: TrieNode) -> None:
        siblings = parent.children
        order = [*siblings]
        siblings[node.token] = node
        if not order or parent.depth < self.shortest:
            if len(siblings) > parent.buckets or parent.buckets == 1:
                parent.buckets = more_buckets(parent.buckets)
        else:
            parent.buckets = add_in_hash_order(order, node.token, parent.buckets)
            parent.children = {token: siblings[token] for token in order}

    def build_fail_links(self) -> None:
        """Link each node to the longest proper suffix of its path that is a path."""
        queue = [*self.root.children.values()]
        for node in queue:
            node.fail = self.root

        for parent in queue:  # grows while it is walked, breadth-first
            for token, node in parent.children.items():
                suffix = parent.fail
                while suffix is not None and token not in suffix.children:
                    suffix = suffix.fail
                node.fail = self.root if suffix is None else suffix.children[token]
                if node.children:
                    queue.append(node)

    def step(self, node: TrieNode, token: int) -> tuple[TrieNode, list[TrieNode]]:
        """Follow the token from `node` and from the suffixes that its fail links lead to.

        Returns the node of the longest match, or `node`; and all matches from depth `shortest` on,
        longest first, whose prefixes are touched.
        """
        matches: list[TrieNode] = []
        suffix: TrieNode | None = node
        while suffix is not None:
            if token in suffix.children:
                matches.append(suffix.children[token])
            suffix = suffix.fail

        borders = [match for match in matches if match.depth >= self.shortest]
        for border in borders:
            self._touch_prefix(border)
        return (matches[0] if matches else node), borders

    def walk(self, node: TrieNode, tokens: Iterable[int]) -> TrieNode:
        """Return the node of the longest match after these tokens; the root if there is none."""
        touch = self.recency.move_to_end
        for token in tokens:
            touch(node)
            if token not in node.children:
                while node.fail is not None and token not in node.children:
                    node = node.fail
                self._touch_prefix(node)
            node = node.children.get(token, node)

        touch(node)
        return node

    def _touch_prefix(self, node: TrieNode) -> None:
        touch = self.recency.move_to_end
        while node.parent is not None:
            touch(node)
            node.fail = self.root
            node = node.parent
        touch(node)

    def continuations(self, borders: Sequence[TrieNode], limit: int) -> list[tuple[int, ...]]:
        """Select the most frequent nodes in the subtrees of some borders, the borders included.

        A node in two of the subtrees counts twice. A selected node gives way to a more frequent
        one: the least frequent, then the deepest, then the one of the lowest number. Returns the
        paths to selected nodes without a selected child, the tokens below the border, the highest
        node numbers first.
        """
        # a heap: freq, -depth, numbers of node and border, tokens below the border
        selected: list[tuple[int, int, int, int, tuple[int, ...]]] = []
        layer: list[tuple[TrieNode, int, tuple[int, ...]]] = [
            (border, border.number, ()) for border in borders
        ]

        while layer:
            entered = []
            for node, border, path in layer:
                entry = (node.freq, -node.depth, node.number, border, path)
                if len(selected) < limit:
                    heappush(selected, entry)
                elif node.freq > selected[0][0]:
                    heapreplace(selected, entry)
                else:
                    continue
                entered.append((node, border, path))

            # children of a node that was not selected are no more frequent: they would not be
            # selected either
            layer = []
            for node, border, path in entered:
                for token, child in node.children.items():
                    layer.append((child, border, (*path, token)))

        inner = {(border, path[:-1]) for *_, border, path in selected if path}
        # by node and border
        ends = sorted(entry[2:] for entry in selected if entry[3:] not in inner)
        return [path for *_, path in reversed(ends)]

    def state_dict(self) -> State:
        nodes = sorted(self.recency, key=lambda node: node.number)
        numbers = {name: [getattr(node, name) for node in nodes] for name in _NUMBERS}
        for name in _LINKS:
            numbers[name] = [(getattr(node, name) or self.root).number for node in nodes]
        numbers["children"] = [child.number for node in nodes for child in node.children.values()]
        numbers["counts"] = [len(node.children) for node in nodes]
        numbers["recency"] = [node.number for node in self.recency]
        numbers["current"] = [self.current.number]
        return {
            f"trie_{name}": torch.tensor(values, dtype=torch.int64)
            for name, values in numbers.items()
        }

    def load_state_dict(self, state: State, vocab_size: int) -> None:
        count = len(checked(state, "trie_parent", (-1,), 0, self.max_nodes - 1))
        last = count - 1
        limits = {
            **dict.fromkeys(_LINKS, last),
            "token": vocab_size - 1,
            "freq": MAX_COUNT,
            "depth": self.length,
            "buckets": MAX_COUNT,
        }
        columns = {
            name: checked(state, f"trie_{name}", (count,), int(name == "buckets"), limit)
            for name, limit in limits.items()
        }
        children = checked(state, "trie_children", (-1,), 1, last)
        counts = checked(state, "trie_counts", (count,), 0, last)
        recency = checked(state, "trie_recency", (count,), 0, last)
        current = checked(state, "trie_current", (1,), 0, last)

        nodes = torch.arange(count)
        listed_by = nodes.repeat_interleave(counts)
        depth = columns["depth"]
        freq = columns["freq"]
        pairs = {*zip(listed_by.tolist(), columns["token"][children].tolist(), strict=False)}
        is_trie = (
            0 < count <= self.max_nodes
            and len(listed_by) == len(children) == len(pairs)
            and torch.equal(columns["parent"][children], listed_by)
            and torch.equal(depth[children], depth[listed_by] + 1)
            and int(depth[0]) == 0
            and not ((freq[children] > freq[listed_by]) & (listed_by > 0)).any()
            and torch.equal(recency.sort().values, nodes)
            and _lead_to_root(columns["parent"])
            and _lead_to_root(columns["fail"])
        )
        if not is_trie:
            raise UserError("start: the saved trie is damaged")

        trie = [self.root, *map(TrieNode, range(1, count))]
        for name in _NUMBERS:
            for node, value in zip(trie, columns[name].tolist(), strict=True):
                setattr(node, name, value)
        for name in _LINKS:
            for node, number in zip(trie[1:], columns[name].tolist()[1:], strict=True):
                setattr(node, name, trie[number])
        for parent, child in zip(listed_by.tolist(), children.tolist(), strict=True):
            trie[parent].children[trie[child].token] = trie[child]
        self.recency = OrderedDict.fromkeys(trie[number] for number in recency.tolist())
        self.current = trie[int(current)]


def _lead_to_root(links: Tensor) -> bool:
    for _ in range(len(links).bit_length()):
        links = links[links]  # twice as many links at once
    return not links.any()


def more_buckets(buckets: int) -> int:
    return next((more for more in HASH_BUCKETS if more > buckets), 2 * buckets + 1)


def add_in_hash_order(order: list[int], token: int, buckets: int) -> int:
    """Add a token where libstdc++'s unordered_map<int> lists it; return its new buckets."""
    if len(order) >= buckets or buckets == 1:
        buckets = more_buckets(buckets)
        order[:] = _placed(order, buckets)
    bucket = token % buckets
    # before the first token of its bucket; if the bucket was empty, before all others
    order.insert(next((i for i, other in enumerate(order) if other % buckets == bucket), 0), token)
    return buckets


def hash_order(tokens: Collection[int]) -> list[int]:
    waiting = [*tokens]
    order = list[int]()
    buckets = 1
    while waiting:
        buckets = more_buckets(buckets)
        free = buckets - len(order)
        order = _placed(order + waiting[:free], buckets)
        waiting = waiting[free:]

    return order


def _placed(tokens: Iterable[int], buckets: int) -> list[int]:
    filled: dict[int, list[int]] = {}
    for token in tokens:
        filled.setdefault(token % buckets, []).append(token)
    return [*chain.from_iterable(filled.values())][::-1]
