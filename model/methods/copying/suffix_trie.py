"""A trie that counts suffixes, for SuffixDecoding (arXiv 2411.04975).

Ties are ordered as in its public code: siblings by the rules of `_rise` and `remove`, a tree's
queue as libstdc++'s heap, whose steps are those of `heapq`. Probabilities are float32, multiplied
in the same order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ...errors import UserError

ONE = np.float32(1)


class Limits(NamedTuple):
    nodes: int
    factor: np.float32
    offset: np.float32
    min_prob: np.float32  # least probability of a drafted token, by the counts along its path
    branches: bool  # True: drafts are trees; False: chains


class Drafted(NamedTuple):
    """Tokens in the order in which they were drafted, with parents (-1: the root)."""

    tokens: list[int]
    parents: list[int]
    probs: list[np.float32]
    score: np.float32  # the sum of the probabilities


class Queued(NamedTuple):
    prob: np.float32
    node: Node
    at: int  # the next token's index in the node's text
    left: int  # tokens left to the trie's depth
    parent: int  # the index of the last drafted token; -1: the root
    due: bool  # True: the string's last token is not drafted yet

    def __lt__(self, other: Any) -> bool:
        return bool(self.prob > other.prob)


@dataclass(slots=True, eq=False)
class Node:
    """A string of tokens; those between it and its parent occur as often as it does.

    A leaf's string has the trie's full depth and grows with its text.

    Attributes:
        token: the first token after the parent's string.
        depth: tokens of the string.
        text, end: an occurrence of it ends before index `end` of this text, or will.
        ordered: its children, the most frequent first.
    """

    parent: Node | None
    token: int
    depth: int
    text: list[int]
    end: int
    count: int = 1  # its number of occurrences; unused for the root
    ordered: list[Node] = field(default_factory=lambda: NONE)
    by_token: dict[int, Node] = field(default_factory=lambda: NONE_BY_TOKEN)

    def add(self, child: Node) -> None:
        if self.ordered is NONE:
            self.ordered = []
            self.by_token = {}
        self.ordered.append(child)
        self.by_token[child.token] = child

    def remove(self, child: Node) -> None:
        del self.ordered[self.index_of(child)]
        del self.by_token[child.token]

    def replace(self, child: Node, other: Node) -> None:
        self.ordered[self.index_of(child)] = other
        self.by_token[child.token] = other
        other.parent = self

    def index_of(self, child: Node) -> int:
        return self.ordered.index(child, _first(self.ordered, child.count))

    def start(self, above: int) -> int:
        return self.end - self.depth + above

    @property
    def known(self) -> int:
        """The index in the text where the known part of the string ends."""
        return min(self.end, len(self.text))


# the children of all leaves
NONE: list[Node] = []
NONE_BY_TOKEN: dict[int, Node] = {}


@dataclass(eq=False)
class GrowingText:
    """A text; `suffixes` are the nodes of the text from each of its last D tokens on."""

    tokens: list[int] = field(default_factory=list)
    suffixes: list[Node] = field(default_factory=list)


class SuffixTrie:
    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.root = Node(None, -1, 0, [], 0, 0)

    def extend(self, text: GrowingText, tokens: Sequence[int]) -> None:
        suffixes = text.suffixes
        for token in tokens:
            text.tokens.append(token)
            suffixes.append(self.root)
            if len(suffixes) > self.depth:
                del suffixes[0]
            for i, node in enumerate(suffixes):
                if node.depth < self.depth:  # else a leaf, whose string has the token already
                    suffixes[i] = self._follow(node, text.tokens)

    def _follow(self, node: Node, text: list[int]) -> Node:
        token = text[-1]
        end = len(text)
        child = node.by_token.get(token)
        if child is None:
            child = Node(node, token, self.depth, text, end - 1 - node.depth + self.depth)
            node.add(child)
        else:
            if child.known > child.start(node.depth) + 1:  # the string ends on the way to the child
                upper = Node(node, token, node.depth + 1, text, end, child.count)
                node.replace(child, upper)
                child.token = child.text[child.start(upper.depth)]
                upper.add(child)
                child.parent = upper
                child = upper
            child.depth = node.depth + 1
            child.text = text
            child.end = end
            self._rise(node, child)

        self._join(node)
        return child

    def _rise(self, node: Node, child: Node) -> None:
        """Count a child once more.

        The first of the siblings of its count becomes the first of the new count, others the last.
        """
        siblings = node.ordered
        if len(siblings) > 1:
            first = _first(siblings, child.count)
            if siblings[first] is child:
                siblings.insert(_first(siblings, child.count + 1), siblings.pop(first))
            else:
                siblings.insert(first, siblings.pop(siblings.index(child, first)))
        child.count += 1

    def _join(self, node: Node) -> None:
        if (
            node.parent is not None
            and len(node.ordered) == 1
            and node.ordered[0].count == node.count
        ):
            child = node.ordered[0]
            child.token = node.token
            node.parent.replace(node, child)

    def remove(self, text: GrowingText) -> None:
        for start in range(len(text.tokens)):
            node = self.root
            end = min(start + self.depth, len(text.tokens))
            while start + node.depth < end:
                child = node.by_token.get(text.tokens[start + node.depth])
                assert child is not None
                if child.count == 1:
                    node.remove(child)
                    break
                del node.ordered[node.index_of(child)]
                child.count -= 1
                # the first of its new equals
                node.ordered.insert(_first(node.ordered, child.count), child)
                if child.text is text.tokens:  # other occurrences need the string
                    child.text = child.text[child.end - child.depth : child.end]
                    child.end = child.depth
                node = child

            self._join(node)

    def orders(self) -> list[int]:
        tokens = list[int]()
        waiting = [self.root]
        while waiting:
            children = waiting.pop().ordered
            if len(children) > 1:
                tokens += [child.token for child in children]
            waiting += children
        return tokens

    def reorder(self, orders: list[int]) -> None:
        tokens = iter(orders)
        fits = True
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            if len(node.ordered) > 1:
                counts = [child.count for child in node.ordered]
                saved = [*islice(tokens, len(counts))]
                fits = fits and {*saved} == node.by_token.keys()
                node.ordered = [node.by_token.get(token, node) for token in saved]
                fits = fits and counts == [child.count for child in node.ordered]
            waiting += node.ordered if fits else ()
        if not fits or next(tokens, None) is not None:
            raise UserError("start: the saved orders are not those of the saved answers")

    def draft(self, context: list[int], limits: Limits) -> Drafted:
        """Return the draft with the greatest score over all lengths of match; ties: the longest."""
        best = Drafted([], [], [], np.float32(0))
        best_match = 0
        draft = _tree if limits.branches else _chain
        matches = sorted(self._matches(context, limits), key=lambda m: m[:2], reverse=True)
        for bound, match, limit, node, at in matches:
            if (bound, match) < (float(best.score), best_match):
                break
            drafted = draft(node, at, self.depth - match, limit, limits.min_prob)
            if drafted.score > best.score or (drafted.score == best.score and match > best_match):
                best = drafted
                best_match = match

        return best

    def _matches(
        self, context: list[int], limits: Limits
    ) -> Iterator[tuple[float, int, int, Node, int]]:
        """Yield the continued suffixes of the context that the trie holds, shortest first.

        Each has a bound of its score, its length, a limit of tokens, its node, and the next token's
        index.
        """
        for match in range(1, len(context)):
            node = self.root
            text = self.root.text
            at = 0
            known = 0
            for token in context[-match:]:
                if at < known:
                    if text[at] != token:
                        return
                    at += 1
                else:
                    child = node.by_token.get(token)
                    if child is None:
                        return
                    text = child.text
                    at = child.start(node.depth) + 1
                    known = child.known
                    node = child

            if at == known and not node.ordered:
                return  # the texts end here, and so they do after longer matches
            by_match = int(float(limits.factor * np.float32(match) + limits.offset) + 1e-6)
            limit = max(min(limits.nodes, by_match), 0)
            # the probabilities of one depth add up to 1, except for rounding
            yield min(limit, 1.0001 * (self.depth - match)), match, limit, node, at


def _first(siblings: list[Node], count: int) -> int:
    return bisect_left(siblings, -count, key=lambda node: -node.count)


def _chain(node: Node, at: int, left: int, limit: int, min_prob: np.float32) -> Drafted:
    tokens = list[int]()
    probs = list[np.float32]()
    prob = ONE
    score = np.float32(0)

    for _ in range(min(limit, left)):
        if at == node.known:
            if not node.ordered:
                break
            child = node.ordered[0]
            if child.count != node.count:
                prob = prob * (np.float32(child.count) / np.float32(node.count))
                if prob < min_prob:
                    break
            at = child.start(node.depth)
            node = child

        tokens.append(node.text[at])
        at += 1
        probs.append(prob)
        score = score + prob

    return Drafted(tokens, list(range(-1, len(tokens) - 1)), probs, score)


def _tree(node: Node, at: int, left: int, limit: int, min_prob: np.float32) -> Drafted:
    tokens = list[int]()
    parents = list[int]()
    probs = list[np.float32]()
    score = np.float32(0)
    queue = [Queued(ONE, node, at, left, -1, False)]

    while len(tokens) < limit and queue:
        prob, node, at, left, parent, due = heappop(queue)
        if not due:
            if left == 0 or (at == node.known and not node.ordered):
                continue
            left -= 1
            if at < node.known:
                at += 1
            elif len(node.ordered) == 1 and node.ordered[0].count == node.count:
                child = node.ordered[0]
                at = child.start(node.depth) + 1
                node = child
            else:
                for child in node.ordered:
                    part = prob * np.float32(child.count) / np.float32(node.count)
                    if part < min_prob:
                        break
                    start = child.start(node.depth) + 1
                    heappush(queue, Queued(part, child, start, left, parent, True))
                continue

        tokens.append(node.text[at - 1])
        parents.append(parent)
        probs.append(prob)
        score = score + prob
        heappush(queue, Queued(prob, node, at, left, len(tokens) - 1, False))

    return Drafted(tokens, parents, probs, score)
