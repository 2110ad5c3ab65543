"""Counted suffixes, from which SuffixDecoding drafts (arXiv 2411.04975): what most often followed a string of tokens.

Its public code is followed in the order of equals, too, as drafts depend on it: siblings by the rules of `_rise` and
`_fall`, a tree's queue as libstdc++'s heap; probabilities are float32, multiplied in the same order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

ONE = np.float32(1)


class Limits(NamedTuple):
    """What a draft may be: at most `nodes` tokens, and factor * m + offset behind a match of m."""

    nodes: int
    factor: np.float32
    offset: np.float32
    min_prob: np.float32  # of a drafted token, by the counts along its path
    branches: bool  # a tree; else a chain


class Drafted(NamedTuple):
    """Tokens in the order in which they were drafted, each one's parent (-1: the root) and estimated probability."""

    tokens: list[int]
    parents: list[int]
    probs: list[np.float32]
    score: np.float32  # the sum of the probabilities


class Node:
    """A string of tokens. One that occurs once has no nodes below it until it occurs again: its text says what follows.

    Attributes:
        count: of its occurrences.
        text: of such a string: the text, else None. Its occurrence ends before the place `end`.
        children: by token.
        ordered: the same, the most frequent first.
    """

    __slots__ = ("children", "count", "depth", "end", "ordered", "text", "token")
    children: dict[int, Node]
    ordered: list[Node]

    def __init__(self, token: int, depth: int, text: list[int] | None, end: int) -> None:
        self.token, self.depth, self.count, self.text, self.end = token, depth, 1, text, end

    def open(self) -> None:
        self.text, self.children, self.ordered = None, {}, []

    def add(self, text: list[int], end: int) -> Node:
        """Add a child that occurs once, behind the others."""
        child = self.children[text[end - 1]] = Node(text[end - 1], self.depth + 1, text, end)
        self.ordered.append(child)
        return child


class GrowingText:
    """A text of a trie. `places` has a node for each of the last D tokens: the deepest one of what begins there."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.places: list[Node] = []


class SuffixTrie:
    """How often each string of at most `depth` tokens occurs in some texts, which may grow in turns."""

    def __init__(self, depth: int) -> None:
        self.depth, self.root = depth, Node(-1, 0, None, 0)
        self.root.open()

    def extend(self, text: GrowingText, tokens: Sequence[int]) -> None:
        """Append tokens: each is one more occurrence of the strings that end in it."""
        places = text.places
        for token in tokens:
            text.tokens.append(token)
            places.append(self.root)
            if len(places) > self.depth:
                del places[0]
            for i, node in enumerate(places):
                if node.text is None:
                    places[i] = self._follow(node, text.tokens, len(text.tokens) - len(places) + i)

    def _follow(self, node: Node, text: list[int], start: int) -> Node:
        """Count the string from place `start` to the text's end; return the deepest node on its way."""
        last = len(text) - start - 1
        while node.text is None:  # nodes may have been made since the last token
            child = node.children.get(text[start + node.depth])
            if node.depth == last:
                if child is None:
                    return node.add(text, len(text))
                self._rise(node, child)
                return child
            assert child is not None
            node = child
        return node

    def _rise(self, node: Node, child: Node) -> None:
        """Count a child once more. The first of its equals becomes the first of its new equals, another one the last.

        From its second occurrence on it has nodes below.
        """
        siblings = node.ordered
        if len(siblings) > 1:
            first = _first(siblings, child.count)
            if siblings[first] is child:
                siblings.insert(_first(siblings, child.count + 1), siblings.pop(first))
            else:
                siblings.insert(first, siblings.pop(siblings.index(child, first)))
        child.count += 1
        text, end = child.text, child.end
        if text is not None:
            child.open()
            if end < len(text) and child.depth < self.depth:
                child.add(text, end + 1)

    def remove(self, text: GrowingText) -> None:
        """Take back every occurrence of a text's strings. It must not grow any more."""
        for start in range(len(text.tokens)):
            node = self.root
            for token in text.tokens[start : start + self.depth]:
                child = node.children[token]
                siblings = node.ordered
                siblings.remove(child)
                child.count -= 1
                if not child.count:
                    del node.children[token]
                    break
                siblings.insert(_first(siblings, child.count), child)  # the first of its new equals
                node = child

    def draft(self, context: list[int], limits: Limits) -> Drafted:
        """Return what follows the context by the length of match, short of all of it, that has the greatest score.

        Of equal ones the longest counts.
        """
        best, best_match = Drafted([], [], [], np.float32(0)), 0
        for bound, match, most, node, end in sorted(self._matches(context, limits), key=lambda m: m[:2], reverse=True):
            if (bound, match) < (float(best.score), best_match):
                break
            drafted = (_tree if limits.branches else _chain)(node, end, self.depth - match, most, limits.min_prob)
            if drafted.score > best.score or (drafted.score == best.score and match > best_match):
                best, best_match = drafted, match
        return best

    def _matches(self, context: list[int], limits: Limits) -> Iterator[tuple[float, int, int, Node, int]]:
        """Yield the lengths of the context's ends that occur and go on, where that is, and what to draft from there.

        A bound of the score, the length, the most tokens, the node and, of a string that occurs once, its end.
        """
        for match in range(1, len(context)):
            node, end = self.root, 0
            for token in context[-match:]:
                if node.text is None:
                    child = node.children.get(token)
                    if child is None:
                        return
                    node, end = child, child.end
                elif end < len(node.text) and node.text[end] == token:
                    end += 1
                else:
                    return
            if not (node.ordered if node.text is None else node.text[end : end + 1]):
                return  # here the texts end, and so they do behind longer matches
            most = max(min(limits.nodes, int(float(limits.factor * np.float32(match) + limits.offset) + 1e-6)), 0)
            # the probabilities of one depth add up to 1, but for what is rounded
            yield min(most, 1.0001 * (self.depth - match)), match, most, node, end


def _first(siblings: list[Node], count: int) -> int:
    """The place of the first one that occurs so often or less."""
    return bisect_left(siblings, -count, key=lambda node: -node.count)


def _chain(node: Node, end: int, left: int, most: int, min_prob: np.float32) -> Drafted:
    """Draft the most frequent child, of this its own, and so on: at most `most` tokens, nor more than `left`."""
    tokens, probs, prob, score = list[int](), list[np.float32](), ONE, np.float32(0)
    for _ in range(min(most, left)):
        if node.text is not None:
            if end == len(node.text):
                break
            token, end = node.text[end], end + 1
        elif node.ordered:
            child = node.ordered[0]
            if child.count != node.count:
                prob = prob * (np.float32(child.count) / np.float32(node.count))
                if prob < min_prob:
                    break
            node, end, token = child, child.end, child.token
        else:
            break
        tokens.append(token)
        probs.append(prob)
        score = score + prob
    return Drafted(tokens, list(range(-1, len(tokens) - 1)), probs, score)


def _tree(node: Node, end: int, left: int, most: int, min_prob: np.float32) -> Drafted:
    """Draft the most probable tokens.

    The queue has strings to go on from. The last token of some is still due: it is drafted when their turn comes.
    """
    tokens, parents, probs, score = list[int](), list[int](), list[np.float32](), np.float32(0)
    queue: list[tuple[Any, ...]] = []
    _push(queue, (ONE, node, end, left, -1, False))
    while len(tokens) < most and queue:
        prob, node, end, left, parent, due = _pop(queue)
        if not due:
            if left == 0 or not (node.ordered if node.text is None else node.text[end : end + 1]):
                continue
            left -= 1
            if node.text is not None:
                end += 1
            elif len(node.ordered) == 1 and node.ordered[0].count == node.count:
                node = node.ordered[0]
                end = node.end
            else:
                for child in node.ordered:
                    part = prob * np.float32(child.count) / np.float32(node.count)
                    if part < min_prob:
                        break
                    _push(queue, (part, child, child.end, left, parent, True))
                continue
        tokens.append(node.token if node.text is None else node.text[end - 1])
        parents.append(parent)
        probs.append(prob)
        score = score + prob
        _push(queue, (prob, node, end, left, len(tokens) - 1, False))
    return Drafted(tokens, parents, probs, score)


def _push(queue: list[tuple[Any, ...]], item: tuple[Any, ...], hole: int = -1) -> None:
    """Put an item at the end, or into this hole, and move it up while what is above has a smaller probability."""
    if hole < 0:
        hole = len(queue)
        queue.append(item)
    while hole and queue[above := (hole - 1) // 2][0] < item[0]:
        queue[hole], hole = queue[above], above
    queue[hole] = item


def _pop(queue: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Take the first item. Its hole sinks to the bottom; there the last item goes in and moves up."""
    first, last, hole = queue[0], queue.pop(), 0
    while (child := 2 * hole + 2) <= len(queue):
        if child == len(queue) or queue[child][0] < queue[child - 1][0]:
            child -= 1  # the right one, if equal
        queue[hole], hole = queue[child], child
    if queue:
        _push(queue, last, hole)
    return first
