"""Dynamic recycling's loops: they grow a draft best first, arrange it, and learn from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...compiled import NONE, hashed, loop, record
from ..copying.suffix_automaton import Text, following, transfer

# levels of estimated probability: level l is 2^-(l + 1) to 2^-l, the last level is all below
LEVELS = 16
UNLISTED = 8  # the level of a sibling that has left its parent's candidates

# A candidate's acceptance rate depends on its kind: its indices in an array of rates.
# Source. PAIR: the row of its parent's pair. TOKEN: the row of its parent's token, if the pair has
# no row. BACKOFF: the row of the token, if the pair's row lacks the candidate. SIBLING_CHILD: what
# followed the root's rejected siblings. SIBLING: these siblings themselves. COPIED: only the copied
# text.
PAIR, TOKEN, BACKOFF, SIBLING_CHILD, SIBLING, COPIED = np.arange(6, dtype=np.uint8)
# The sibling source that suggests the candidate as well, if any.
ALONE, AND_SIBLING_CHILD, AND_SIBLING = np.arange(3, dtype=np.uint8)
# classes of the copied match's length: 0 (none), 1, 2, 3, 4, 5 to 7, 8 to 15, 16 and more tokens
MATCHES = 8
KINDS = (6, 3, MATCHES, 2, LEVELS)  # source, sibling source, match, copied or not, level

NODE = record(
    token="i8",
    parent="i8",
    likelihood="f8",  # the product of the rates along its path
    state="i8",  # the automaton's state at the longest match of text and path
    match="i8",  # the length of this match
    first="i8",  # its first candidate; its candidates end where the next node's begin
    child="i8",  # while nodes are arranged: its first child, and its next sibling
    sibling="i8",
)
CANDIDATE = record(
    token="i4", parent="i4", source="u1", suggested="u1", match="u1", copied="u1", level="u1"
)
LISTED = record(worth="f8", number="i8")  # an element of a heap
GUESS = record(token="i4", level="i4")  # a sibling of the next root, or a token that followed one


class Growth(NamedTuple):
    """A growing draft of at most n nodes; the next draft overwrites it."""

    nodes: Any  # NODE (2 + n,), in the order in which they were drafted, the root first
    candidates: Any  # CANDIDATE, grouped by node
    heap: Any  # LISTED: candidates that are not drafted, the most likely one first
    # GUESS (k + 1,): tokens that followed the root's rejected siblings; ends at token NONE
    sibling_children: Any
    siblings: Any  # GUESS (k + 1,): these siblings; ends at token NONE
    mass: Any  # float64 (V,), all 0 between calls
    met: Any  # int64 (n k,), the tokens that have a mass


class Rows(NamedTuple):
    """Candidates, best first: V rows by token, then p rows by pair of tokens."""

    ids: Any  # int32 (V + p, k)
    levels: Any  # uint8 (V + p, k)
    # int64 (V + p,): the token, or the pair's first token times 2^32 plus its second; NONE: empty
    keys: Any
    shift: Any  # a pair's hash shifted right by this is its row behind those by token
    ends: Any  # bool (V,): tokens that end an answer, below which nothing is drafted


@loop
def pair_row(rows: Rows, key: Any) -> Any:
    if len(rows.keys) == len(rows.ends):
        return np.int64(NONE)
    return len(rows.ends) + np.int64(hashed(key) >> np.uint64(rows.shift))


@loop
def grow(
    count: int,
    limit: int,
    before: int,
    root: int,
    copies: bool,
    growth: Any,
    rows: Any,
    text: Any,
    rates: Any,
) -> Any:
    """Draft the most likely candidates until there are `limit` nodes below the root.

    Args:
        count: 0 begins a draft; a draft's number of nodes continues it, to a larger limit.
        before: the token before the root.
        rates: the acceptance rate of each kind of candidates, float64 KINDS.

    Returns the number of nodes and the likelihood of the next one; -1 if there is none.
    """
    draft = Growth(*growth)
    tables = Rows(*rows)
    automaton = Text(*text)
    nodes = draft.nodes
    heap = draft.heap
    if count == 0:
        node = nodes[0]
        node.token = root
        node.likelihood = 1.0
        node.first = 0
        count = 1
        if copies:
            counts = automaton.counts[0]
            node.state = automaton.states[counts.whole].link
            node.match = counts.match
        _list_candidates(0, before, copies, draft, tables, automaton, rates)

    while True:
        waiting = nodes[count].first - (count - 1)  # candidates that are listed and not drafted
        if waiting == 0:
            return count, -1.0
        if count > limit:
            return count, heap[0].worth
        node = nodes[count]
        best = draft.candidates[heap[0].number]
        parent = nodes[best.parent]
        node.token = best.token
        node.parent = best.parent
        node.likelihood = heap[0].worth
        if copies:
            node.state, node.match = transfer(automaton, parent.state, parent.match, node.token)
        _pop(heap, waiting)
        _list_candidates(count, parent.token, copies, draft, tables, automaton, rates)
        count += 1


@loop
def _list_candidates(
    number: int, before: int, copies: bool, draft: Growth, rows: Rows, text: Text, rates: Any
) -> None:
    nodes = draft.nodes
    candidates = draft.candidates
    node = nodes[number]
    first = node.first
    token = node.token
    if number and rows.ends[token]:
        nodes[number + 1].first = first
        return

    copied = np.int64(NONE)
    match = np.int64(0)
    if copies:
        copied, match = following(text, node.state, node.match)
    match_class = _match_class(match)

    key = (before << 32) | token
    pair = pair_row(rows, key)
    has_pair = pair >= 0 and rows.keys[pair] == key
    end = first
    if rows.keys[token] >= 0:
        source = BACKOFF if has_pair else TOKEN
        end = _add_row(candidates, first, end, number, source, match_class, rows, token)
    if has_pair:
        end = _add_row(candidates, first, end, number, PAIR, match_class, rows, pair)
    if copied >= 0:
        at = _find(candidates, first, end, copied)
        if at == end:
            end = _add(candidates, end, number, copied, COPIED, match_class, 0)
        candidates[at].copied = 1
    if number == 0:
        end = _add_guesses(
            candidates, end, draft.sibling_children, SIBLING_CHILD, AND_SIBLING_CHILD
        )
        end = _add_guesses(candidates, end, draft.siblings, SIBLING, AND_SIBLING)

    nodes[number + 1].first = end
    for at in range(first, end):
        _push(draft.heap, at - number, node.likelihood * rates[_kind(candidates[at])], at)


@loop
def _match_class(length: Any) -> Any:
    if length < 5:
        return length
    if length < 8:
        return 5
    return 6 if length < 16 else 7


@loop
def _kind(candidate: Any) -> Any:
    return candidate.source, candidate.suggested, candidate.match, candidate.copied, candidate.level


@loop
def _find(candidates: Any, first: int, end: int, token: int) -> Any:
    for at in range(first, end):
        if candidates[at].token == token:
            return at
    return end


@loop
def _add(
    candidates: Any, end: int, parent: int, token: int, source: int, match: int, level: int
) -> Any:
    new = candidates[end]
    new.token = token
    new.parent = parent
    new.source = source
    new.suggested = ALONE
    new.match = match
    new.copied = 0
    new.level = level
    return end + 1


@loop
def _add_row(
    candidates: Any,
    first: int,
    end: int,
    parent: int,
    source: int,
    match: int,
    rows: Rows,
    row: int,
) -> Any:
    for rank in range(rows.ids.shape[1]):
        token = rows.ids[row, rank]
        level = rows.levels[row, rank]
        at = _find(candidates, first, end, token)
        if at == end:
            end = _add(candidates, end, parent, token, source, match, level)
        else:
            candidates[at].source = source
            candidates[at].level = level
    return end


@loop
def _add_guesses(candidates: Any, end: int, guesses: Any, source: int, suggested: int) -> Any:
    for guess in guesses:
        if guess.token == NONE:
            break
        at = _find(candidates, 0, end, guess.token)
        if at == end:
            end = _add(candidates, end, 0, guess.token, source, 0, guess.level)
        elif candidates[at].suggested == ALONE:
            candidates[at].suggested = suggested
    return end


@loop
def _is_first(worth: float, number: int, other_worth: float, other_number: int) -> Any:
    return worth > other_worth or (worth == other_worth and number < other_number)


@loop
def _push(heap: Any, size: int, worth: float, number: int) -> None:
    at = size
    while at:  # the greatest worth is first; ties go to the least number
        above = (at - 1) >> 1
        if _is_first(heap[above].worth, heap[above].number, worth, number):
            break
        heap[at] = heap[above]
        at = above

    heap[at].worth = worth
    heap[at].number = number


@loop
def _pop(heap: Any, size: int) -> None:
    size -= 1
    worth = heap[size].worth
    number = heap[size].number
    at = 0

    while True:
        below = 2 * at + 1
        if below >= size:
            break
        other = below + 1
        if other < size and _is_first(
            heap[other].worth, heap[other].number, heap[below].worth, heap[below].number
        ):
            below = other
        if _is_first(worth, number, heap[below].worth, heap[below].number):
            break
        heap[at] = heap[below]
        at = below

    heap[at].worth = worth
    heap[at].number = number


@loop
def arrange(nodes: Any, arranged: Any) -> None:
    """Sort the first n nodes breadth-first, siblings in the order in which they were drafted.

    Args:
        arranged: int64 (3, n), to fill: for each index the node, its parent's index and its token.
    """
    order, parents, tokens = arranged
    count = len(order)
    for node in nodes[:count]:
        node.child = 0

    for number in range(count - 1, 0, -1):
        node = nodes[number]
        parent = nodes[node.parent]
        node.sibling = parent.child
        parent.child = number

    order[0] = parents[0] = 0
    end = 1
    for index in range(count):
        node = nodes[order[index]]
        tokens[index] = node.token
        below = node.child
        while below:
            order[end] = below
            parents[end] = index
            below = nodes[below].sibling
            end += 1


@loop
def learn(
    before: int,
    node: int,
    learning: bool,
    guessing: bool,
    arranged: Any,
    outcome: Any,
    growth: Any,
    rows: Any,
    rates: Any,
) -> None:
    """Learn from the target's outputs after a draft's n nodes.

    Args:
        before: the token before the root.
        node: the deepest accepted node.
        arranged: as `arrange` fills it.
        outcome: choices int64 (n,), NONE where unknown; accepted bool (n,); candidates int64 (n, k)
            and their log-probs float32 (n, k).
    """
    order, parents, tokens = arranged
    choices, accepted, candidates, log_probs = outcome
    draft = Growth(*growth)
    tables = Rows(*rows)
    if learning:
        _learn_rates(order, choices, draft, *rates)

    for turn in (False, True):  # accepted nodes are written last, so they win
        for i in range(len(tokens)):
            if accepted[i] == turn:
                _write_row(
                    tokens[parents[i]] if i else before, tokens[i], candidates, log_probs, i, tables
                )

    if guessing:
        _guess(node, choices[node], tokens, parents, candidates, log_probs, draft)


@loop
def learn_prompt(
    before: int,
    root: int,
    guessing: bool,
    tokens: Any,
    candidates: Any,
    log_probs: Any,
    growth: Any,
    rows: Any,
) -> None:
    """Learn from a prompt's m tokens before the root; candidates and log-probs are (m, k)."""
    tables = Rows(*rows)
    for i in range(len(tokens)):
        _write_row(before, tokens[i], candidates, log_probs, i, tables)
        before = tokens[i]
    if guessing:
        nothing = tokens[:0]
        _guess(len(tokens) - 1, root, nothing, nothing, candidates, log_probs, Growth(*growth))


@loop
def _learn_rates(order: Any, choices: Any, draft: Growth, counts: Any, rates: Any) -> None:
    nodes = draft.nodes
    candidates = draft.candidates
    seen = counts[0]
    accepted = counts[1]
    for index in range(len(order)):
        if choices[index] == NONE:
            continue
        for at in range(nodes[order[index]].first, nodes[order[index] + 1].first):
            kind = _kind(candidates[at])
            seen[kind] += 1.0
            if candidates[at].token == choices[index]:
                accepted[kind] += 1.0
            rates[kind] = accepted[kind] / seen[kind]


@loop
def level_of(log_prob: Any) -> Any:
    if not log_prob < 0:
        return 0
    return LEVELS - 1 if log_prob <= 1 - LEVELS else int(-log_prob)


@loop
def _write_row(
    before: int, token: int, candidates: Any, log_probs: Any, node: int, rows: Rows
) -> None:
    _store(rows, token, token, candidates[node], log_probs[node])
    key = (before << 32) | token
    row = pair_row(rows, key)
    if row >= 0:
        _store(rows, row, key, candidates[node], log_probs[node])


@loop
def _store(rows: Rows, row: int, key: int, candidates: Any, log_probs: Any) -> None:
    rows.keys[row] = key
    for rank in range(len(candidates)):
        rows.ids[row, rank] = candidates[rank]
        rows.levels[row, rank] = level_of(log_probs[rank])


@loop
def _guess(
    node: int, root: int, tokens: Any, parents: Any, candidates: Any, log_probs: Any, draft: Growth
) -> None:
    """Note the next root's siblings below `node`, and what followed the drafted ones."""
    siblings = draft.siblings
    sibling_children = draft.sibling_children
    heap = draft.heap
    mass = draft.mass
    met = draft.met
    k = candidates.shape[1]
    listed = 0

    for rank in range(k):
        if candidates[node, rank] != root:
            siblings[listed].token = candidates[node, rank]
            siblings[listed].level = level_of(log_probs[node, rank])
            listed += 1

    siblings[listed].token = NONE

    tokens_met = 0
    total = 0.0

    for child in range(1, len(tokens)):
        if parents[child] != node:
            continue
        weight = 0.5**UNLISTED
        for rank in range(k):
            if candidates[node, rank] == tokens[child]:
                weight = 0.5 ** level_of(log_probs[node, rank])
        total += weight
        for rank in range(k):
            token = candidates[child, rank]
            if mass[token] == 0.0:
                met[tokens_met] = token
                tokens_met += 1
            mass[token] += weight * 0.5 ** level_of(log_probs[child, rank])

    for i in range(tokens_met):
        _push(heap, i, mass[met[i]], i)

    best = min(tokens_met, k)
    for i in range(best):
        sibling_children[i].token = met[heap[0].number]
        sibling_children[i].level = level_of(np.log2(heap[0].worth / total))
        _pop(heap, tokens_met - i)

    sibling_children[best].token = NONE
    for i in range(tokens_met):
        mass[met[i]] = 0.0
