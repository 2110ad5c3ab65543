"""The bounded Aho-Corasick trie of n-grams from which RACER retrieves (arXiv 2604.14885).

Three details of its public code are reproduced, as accepted lengths depend on them:

- A full trie reuses the least recently touched node, even one with children.
- Fail links are built once a prompt; a node made later links to the root.
- Siblings come in the order of libstdc++'s hash map.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from heapq import heappush, heapreplace
from itertools import chain, islice

import torch

from ..engine.saved import MAX_COUNT, State, checked
from ..errors import UserError

ROOT_NODE = 0
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
_FIELDS = ("parent", "fail", "token", "freq", "depth", "buckets")


class NgramTrie:
    """n-grams with a count of each prefix, and the automaton that follows a text through them.

    Nodes are numbered as they are made. A node that is reused keeps its number, and older
    references then mean the new node.

    Attributes:
        current: the node where the last sequence ended, from which the next one goes on.

    Args:
        shortest: the least depth of a node that is retrieved from.
    """

    def __init__(self, length: int, max_nodes: int, shortest: int) -> None:
        self.length = length
        self.max_nodes = max_nodes
        self.shortest = shortest
        self.current = ROOT_NODE
        # in hash order from depth `shortest` on, where order counts
        self.children: list[dict[int, int]] = [{}]
        self.parent = [ROOT_NODE]
        self.fail = [ROOT_NODE]
        self.token = [0]
        self.freq = [0]
        self.depth = [0]
        self.buckets = [1]  # of each node's hash map; a reused node keeps them
        # least recently touched first
        self.recency: OrderedDict[int, None] = OrderedDict({ROOT_NODE: None})

    def insert(self, ngram: Iterable[int]) -> None:
        touch = self.recency.move_to_end
        node = ROOT_NODE
        for token in ngram:
            touch(node)
            child = self.children[node].get(token)
            if child is None:
                child = self._make(node, token)
            self.freq[child] += 1
            node = child

        touch(node)

    def ngrams(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        return [tokens[end - self.length : end] for end in range(self.length, len(tokens) + 1)]

    def _make(self, parent: int, token: int) -> int:
        """Return a new child; with `max_nodes`, it is the least recently touched node."""
        if len(self.parent) < self.max_nodes:
            node = len(self.parent)
            self.children.append({})
            self.buckets.append(1)
            for column in (self.parent, self.token, self.depth, self.fail, self.freq):
                column.append(0)
        else:
            node, _ = self.recency.popitem(last=False)
            siblings = self.children[self.parent[node]]
            if siblings.get(self.token[node]) == node:
                del siblings[self.token[node]]

        self.children[node] = {}
        self.parent[node] = parent
        self.token[node] = token
        self.depth[node] = self.depth[parent] + 1
        self.fail[node] = ROOT_NODE
        self.freq[node] = 0
        self.recency[node] = None
        self._list(parent, token, node)
        return node

    def _list(self, parent: int, token: int, node: int) -> None:
        listed = self.children[parent]
        buckets = self.buckets[parent]
        listed[token] = node
        if len(listed) == 1 or self.depth[parent] < self.shortest:
            if len(listed) > buckets or buckets == 1:
                self.buckets[parent] = more_buckets(buckets)
        else:
            order = [*listed][:-1]
            self.buckets[parent] = add_in_hash_order(order, token, buckets)
            self.children[parent] = {other: listed[other] for other in order}

    def build_fail_links(self) -> None:
        """Link each node to the longest proper suffix of its path that is a path."""
        children = self.children
        fail = self.fail
        for node in children[ROOT_NODE].values():
            fail[node] = ROOT_NODE

        queue = [*children[ROOT_NODE].values()]
        for parent in queue:  # grows while it is walked, breadth-first
            suffix_children = children[fail[parent]]
            for token, node in children[parent].items():
                link = suffix_children.get(token)
                at = fail[parent]
                while link is None and at:
                    at = fail[at]
                    link = children[at].get(token)
                fail[node] = link or ROOT_NODE
                if children[node]:
                    queue.append(node)

    def step(self, node: int, token: int) -> tuple[int, list[int]]:
        """Follow the token from `node` and from the suffixes that its fail links lead to.

        Returns the node of the longest match, or `node`; and all matches from depth `shortest` on,
        longest first, whose prefixes are touched, and link to the root from now on.
        """
        matches: list[int] = []
        at = node
        while True:
            child = self.children[at].get(token)
            if child is not None:
                matches.append(child)
            if at == ROOT_NODE:
                break
            at = self.fail[at]

        borders = [node for node in matches if self.depth[node] >= self.shortest]
        for border in borders:
            self._touch_prefix(border)
        return (matches[0] if matches else node), borders

    def walk(self, node: int, tokens: Iterable[int]) -> int:
        """Return the node of the longest match after these tokens; the root if there is none."""
        children = self.children
        touch = self.recency.move_to_end
        for token in tokens:
            touch(node)
            if token not in children[node]:
                while node and token not in children[node]:
                    node = self.fail[node]
                self._touch_prefix(node)
            node = children[node].get(token, node)

        touch(node)
        return node

    def _touch_prefix(self, node: int) -> None:
        touch = self.recency.move_to_end
        while node:
            touch(node)
            self.fail[node] = ROOT_NODE
            node = self.parent[node]
        touch(ROOT_NODE)

    def continuations(self, borders: Sequence[int], limit: int) -> list[tuple[int, ...]]:
        """Select the most frequent nodes in the subtrees of some borders, the borders included.

        A node in two of the subtrees counts twice. A node is selected if there are fewer than
        `limit`, or if it is more frequent than the least frequent selected one, which then leaves;
        of several the deepest, of these the one with the lowest number. Returns the paths to
        selected nodes without a selected child, the tokens below the border, the highest node
        numbers first.
        """
        # a heap: freq, -depth, node, border, tokens below the border
        selected: list[tuple[int, int, int, int, tuple[int, ...]]] = []
        layer: list[tuple[int, int, tuple[int, ...]]] = [(border, border, ()) for border in borders]

        while layer:
            entered = []
            for node, border, path in layer:
                count = self.freq[node]
                if len(selected) < limit:
                    heappush(selected, (count, -self.depth[node], node, border, path))
                elif count > selected[0][0]:
                    heapreplace(selected, (count, -self.depth[node], node, border, path))
                else:
                    continue
                entered.append((node, border, path))

            # children of a node that was not selected are no more frequent: they would not be
            # selected either
            layer = []
            for node, border, path in entered:
                for token, child in self.children[node].items():
                    layer.append((child, border, (*path, token)))

        inner = {(border, path[:-1]) for *_, border, path in selected if path}
        # by node and border
        ends = sorted(entry[2:] for entry in selected if entry[3:] not in inner)
        return [path for *_, path in reversed(ends)]

    def state_dict(self) -> State:
        numbers = {name: getattr(self, name) for name in _FIELDS}
        numbers["children"] = [node for below in self.children for node in below.values()]
        numbers["counts"] = [len(below) for below in self.children]
        numbers["recency"] = list(self.recency)
        numbers["current"] = [self.current]
        return {
            f"trie_{name}": torch.tensor(values, dtype=torch.int64)
            for name, values in numbers.items()
        }

    def load_state_dict(self, state: State, vocab_size: int) -> None:
        count = len(checked(state, "trie_parent", (-1,), 0, self.max_nodes - 1))
        last = count - 1
        limits = dict.fromkeys(_FIELDS, last) | {
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

        for name, column in columns.items():
            setattr(self, name, column.tolist())
        below = iter(children.tolist())
        self.children = [
            {self.token[child]: child for child in islice(below, size)} for size in counts.tolist()
        ]
        self.recency = OrderedDict.fromkeys(recency.tolist())
        self.current = int(current)


def _lead_to_root(links: torch.Tensor) -> bool:
    for _ in range(len(links).bit_length()):
        links = links[links]  # twice as many links at once
    return not links.any()


def more_buckets(buckets: int) -> int:
    return next((more for more in HASH_BUCKETS if more > buckets), 2 * buckets + 1)


def add_in_hash_order(order: list[int], token: int, buckets: int) -> int:
    """Add a token where libstdc++'s unordered_map<int> lists it; return its new buckets.

    It comes before the first token of its bucket; if the bucket was empty, before all others.
    """
    if len(order) >= buckets or buckets == 1:
        buckets = more_buckets(buckets)
        order[:] = _placed(order, buckets)
    bucket = token % buckets
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
