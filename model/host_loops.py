"""The inner loops of drafting on the host, compiled by numba: arrays in, arrays out.

Imported only where `jit.compiled` says so. A loop's docstring names the Python that it replaces, whose results it gives
to the last bit. All are in one file: numba's cache on disk notices changes of a function's own file only.

What is passed around, each a tuple of arrays:

- `text`: a suffix automaton's tokens int32 (n,), states int32 (s, 4), transitions int32 (t, 4), the hash table of its
  transitions int32 (a power of two,), counters int64 (6,); see `copying.compiled_automaton`.
- `rows`: ids int32 (V, k), levels uint8 (V, k) and seen bool (V,) by token, the same by pair of tokens with the pairs'
  keys int64 (p,) and their shift; see `dynamic.rows`. p is 0 where no pairs are kept.
- `draft`: counters int64 (6,), nodes int64 (n, 5), likelihoods float64 (n,), candidates int32 (c, 3), siblings int32
  (2, k, 2), and a heap, float64 (c,) and int64 (c,); see `dynamic.compiled_session`.
- `cells`: the first cell of each source and match, int64 (6, 8), and the steps between cells, int64 (3,).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

ODD = 0x9E3779B97F4A7C15  # as in dynamic.rows
NONE = -1

LINK, LENGTH, END, FIRST = range(4)  # columns of states; FIRST counts transitions from 1, 0 is none
STATE, TOKEN, TARGET, NEXT = range(4)  # of transitions; NEXT as FIRST
TOKENS, STATES, TRANSITIONS, WHOLE, MATCH, MATCH_END = range(6)  # a text's counters
NODE_TOKEN, NODE_PARENT, NODE_STATE, NODE_MATCH, NODE_FIRST = range(5)  # columns of nodes
CANDIDATE, CELL, OF_NODE = range(3)  # of candidates
NODES, PUSHED, CANDIDATES, HEAP, FOLLOWED_LISTED, BESIDE_LISTED = range(6)  # a draft's counters
PAIR, TOKEN_ROW, BACKOFF, SIBLING_CHILD, SIBLING, COPIED = range(6)  # sources, rows of the first cells
COPIED_STEP, SIBLING_CHILD_STEP, BESIDE_STEP = range(3)  # steps between cells


def loop(function: Callable[..., Any]) -> Any:
    """Compile at the first call, or load what an earlier process compiled, where a folder takes that.

    What numba keeps names the module it was compiled in, and this file may be imported as token_recycling, too: the
    name of the package is part of the file's, so that neither loads the other's.
    """
    function.__qualname__ = f"{__package__}.{function.__qualname__}"
    try:
        return numba.njit(cache=True)(function)
    except RuntimeError:
        return numba.njit(function)


@loop
def _hashed(key: Any) -> Any:
    return np.uint64(key) * np.uint64(ODD)


@loop
def _slot(transitions: Any, slots: Any, state: Any, token: Any) -> Any:
    """The place of a transition in the hash table, or the empty place where it belongs."""
    mask = len(slots) - 1
    at = np.int64(_hashed((np.int64(state) << 32) | np.int64(token)) >> np.uint64(32)) & mask
    while slots[at] != 0:
        transition = slots[at] - 1
        if transitions[transition, STATE] == state and transitions[transition, TOKEN] == token:
            break
        at = (at + 1) & mask
    return at


@loop
def _connect(text: Any, state: Any, token: Any, target: Any) -> None:
    """Add a transition that is not there yet."""
    _, states, transitions, slots, counts = text
    new = counts[TRANSITIONS]
    slots[_slot(transitions, slots, state, token)] = new + 1
    transitions[new, STATE] = state
    transitions[new, TOKEN] = token
    transitions[new, TARGET] = target
    transitions[new, NEXT] = states[state, FIRST]
    states[state, FIRST] = new + 1
    counts[TRANSITIONS] = new + 1


@loop
def rehash(text: Any) -> None:
    """Fill an empty hash table with all transitions."""
    _, _, transitions, slots, counts = text
    for transition in range(counts[TRANSITIONS]):
        slots[_slot(transitions, slots, transitions[transition, STATE], transitions[transition, TOKEN])] = (
            transition + 1
        )


@loop
def _split(text: Any, long: Any, state: Any, token: Any) -> Any:
    """SuffixAutomaton._split."""
    _, states, transitions, slots, counts = text
    short = counts[STATES]
    counts[STATES] = short + 1
    states[short, LENGTH] = states[state, LENGTH] + 1
    states[short, END] = states[long, END]
    states[short, LINK] = states[long, LINK]
    states[long, LINK] = short
    next_one = states[long, FIRST]
    while next_one:
        copied = next_one - 1
        _connect(text, short, transitions[copied, TOKEN], transitions[copied, TARGET])
        next_one = transitions[copied, NEXT]
    while state >= 0:
        entry = slots[_slot(transitions, slots, state, token)]
        if entry == 0 or transitions[entry - 1, TARGET] != long:
            break
        transitions[entry - 1, TARGET] = short
        state = np.int64(states[state, LINK])
    return short


@loop
def extend(text: Any, count: Any) -> Any:
    """SuffixAutomaton._append, of the tokens up to the `count`-th, for which there is room.

    Returns:
        The match's state, length and end.
    """
    tokens, states, transitions, slots, counts = text
    for place in range(counts[TOKENS], count):
        token, new = tokens[place], counts[STATES]
        counts[STATES] = new + 1
        states[new, LENGTH] = states[new, END] = place + 1
        state, entry = counts[WHOLE], np.int64(0)
        while state >= 0:
            entry = np.int64(slots[_slot(transitions, slots, state, token)])
            if entry:
                break
            _connect(text, state, token, new)
            state = np.int64(states[state, LINK])
        match = np.int64(0)
        if state >= 0:
            match = np.int64(transitions[entry - 1, TARGET])
            if states[match, LENGTH] > states[state, LENGTH] + 1:
                match = _split(text, match, state, token)
        states[new, LINK] = match
        counts[WHOLE], counts[MATCH], counts[MATCH_END] = new, states[match, LENGTH], states[match, END]
        states[match, END] = place + 1
    counts[TOKENS] = count
    return np.int64(states[counts[WHOLE], LINK]), counts[MATCH], counts[MATCH_END]


@loop
def transfer(text: Any, state: Any, length: Any, token: Any) -> Any:
    """SuffixAutomaton.transfer."""
    _, states, transitions, slots, _ = text
    entry = slots[_slot(transitions, slots, state, token)]
    while state and entry == 0:
        state = np.int64(states[state, LINK])
        length = np.int64(states[state, LENGTH])
        entry = slots[_slot(transitions, slots, state, token)]
    if entry == 0:
        return np.int64(0), np.int64(0)
    return np.int64(transitions[entry - 1, TARGET]), length + 1


@loop
def following(text: Any, state: Any, length: Any) -> Any:
    """SuffixAutomaton.following; NONE and 0 where nothing followed."""
    tokens, states, _, _, counts = text
    end = np.int64(states[state, END])
    if end == counts[TOKENS]:
        end, length = counts[MATCH_END], min(length, counts[MATCH])
    if length == 0:
        return np.int64(NONE), np.int64(0)
    return np.int64(tokens[end]), length


@loop
def _push(worth: Any, listed: Any, size: Any, value: Any, number: Any) -> Any:
    """Put a number into a heap whose top has the greatest worth, of equals the least number; the size then."""
    at = size
    while at:
        above = (at - 1) >> 1
        if worth[above] > value or (worth[above] == value and listed[above] < number):
            break
        worth[at], listed[at] = worth[above], listed[above]
        at = above
    worth[at], listed[at] = value, number
    return size + 1


@loop
def _pop(worth: Any, listed: Any, size: Any) -> Any:
    """Take the top off a heap; the size then."""
    size -= 1
    value, number = worth[size], listed[size]
    at = 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        other = below + 1
        if other < size and (
            worth[other] > worth[below] or (worth[other] == worth[below] and listed[other] < listed[below])
        ):
            below = other
        if value > worth[below] or (value == worth[below] and number < listed[below]):
            break
        worth[at], listed[at] = worth[below], listed[below]
        at = below
    worth[at], listed[at] = value, number
    return size


@loop
def _bucket(match: Any) -> Any:
    """dynamic.weights.bucket."""
    if match < 5:
        return match
    return 5 if match < 8 else 6 if match < 16 else 7


@loop
def _find(children: Any, first: Any, last: Any, token: Any) -> Any:
    """The place of a token among the candidates from `first` to `last` - 1; `last` if it is not there."""
    for at in range(first, last):
        if children[at, CANDIDATE] == token:
            return at
    return last


@loop
def _add(children: Any, at: Any, node: Any, token: Any, cell: Any) -> Any:
    """Add a candidate at the end; the end then."""
    children[at, CANDIDATE], children[at, CELL], children[at, OF_NODE] = token, cell, node
    return at + 1


@loop
def _add_row(children: Any, first: Any, last: Any, node: Any, ids: Any, levels: Any, row: Any, cell: Any) -> Any:
    """Add a row to a node's candidates, which begin at `first`; those that are there get the new cell. Their end."""
    for rank in range(ids.shape[1]):
        at = _find(children, first, last, ids[row, rank])
        if at == last:
            last = _add(children, at, node, ids[row, rank], 0)
        children[at, CELL] = cell + levels[row, rank]
    return last


@loop
def _add_candidates(draft: Any, node: Any, before: Any, copied: Any, match: Any, rows: Any, cells: Any) -> None:
    """DynamicRecycling.candidates."""
    counts, nodes, _, children, _, _, _ = draft
    token_ids, token_levels, token_seen, pair_ids, pair_levels, pair_seen, pair_keys, pair_shift = rows
    first_cells, steps = cells
    token, place, first = nodes[node, NODE_TOKEN], _bucket(match), counts[CANDIDATES]
    last, key, row = first, (before << 32) | token, np.int64(NONE)
    if len(pair_keys):
        row = np.int64(_hashed(key) >> np.uint64(pair_shift))
        if pair_keys[row] != key or not pair_seen[row]:
            row = np.int64(NONE)
    if token_seen[token]:
        source = BACKOFF if row >= 0 else TOKEN_ROW
        last = _add_row(children, first, last, node, token_ids, token_levels, token, first_cells[source, place])
    if row >= 0:
        last = _add_row(children, first, last, node, pair_ids, pair_levels, row, first_cells[PAIR, place])
    if copied >= 0:
        at = _find(children, first, last, copied)
        if at == last:
            last = _add(children, at, node, copied, first_cells[COPIED, place])
        children[at, CELL] += steps[COPIED_STEP]
    counts[CANDIDATES] = last


@loop
def _add_siblings(draft: Any, cells: Any) -> None:
    """DynamicSession._below_root, what is added there."""
    counts, _, _, children, siblings, _, _ = draft
    first_cells, steps = cells
    last = counts[CANDIDATES]
    for which, source in ((0, SIBLING_CHILD), (1, SIBLING)):
        for i in range(counts[FOLLOWED_LISTED + which]):
            token, level = siblings[which, i, 0], siblings[which, i, 1]
            at = _find(children, 0, last, token)
            if at == last:
                last = _add(children, at, 0, token, first_cells[source, 0] + level)
            elif children[at, CELL] // steps[SIBLING_CHILD_STEP] % 3 == 0:
                children[at, CELL] += steps[SIBLING_CHILD_STEP + which]
    counts[CANDIDATES] = last


@loop
def grow(
    limit: Any, root: Any, starts: Any, copies: Any, draft: Any, rows: Any, text: Any, cells: Any, weights: Any
) -> Any:
    """DynamicSession.draft: take the likeliest candidates until there are `limit` nodes below the root.

    Args:
        root: the token before it, its own, its state and its match.
        starts: with the root alone. Else it goes on, to a larger limit.

    Returns:
        The nodes so far, root included, and the likelihood of the next one; -1 if there is none.
    """
    counts, nodes, likelihoods, children, _, worth, listed = draft
    before, nodes[0, NODE_TOKEN], nodes[0, NODE_STATE], nodes[0, NODE_MATCH] = root
    if starts:
        counts[NODES], counts[PUSHED], counts[CANDIDATES], counts[HEAP] = 1, 0, 0, 0
    while True:
        node = counts[PUSHED]
        if node < counts[NODES]:  # the newest node, whose candidates are not listed yet
            first = nodes[node, NODE_FIRST] = counts[CANDIDATES]
            copied, match = np.int64(NONE), np.int64(0)
            if copies:
                copied, match = following(text, nodes[node, NODE_STATE], nodes[node, NODE_MATCH])
            above = nodes[nodes[node, NODE_PARENT], NODE_TOKEN] if node else before
            _add_candidates(draft, node, above, copied, match, rows, cells)
            if node == 0:
                _add_siblings(draft, cells)
            nodes[node + 1, NODE_FIRST] = counts[CANDIDATES]
            for at in range(first, counts[CANDIDATES]):
                counts[HEAP] = _push(worth, listed, counts[HEAP], likelihoods[node] * weights[children[at, CELL]], at)
            counts[PUSHED] = node + 1
        if counts[HEAP] == 0:
            return counts[NODES], -1.0
        if counts[NODES] > limit:
            return counts[NODES], worth[0]
        node, at = counts[NODES], listed[0]
        token, parent = np.int64(children[at, CANDIDATE]), np.int64(children[at, OF_NODE])
        nodes[node, NODE_TOKEN], nodes[node, NODE_PARENT], likelihoods[node] = token, parent, worth[0]
        if copies:
            state, match = transfer(text, nodes[parent, NODE_STATE], nodes[parent, NODE_MATCH], token)
            nodes[node, NODE_STATE], nodes[node, NODE_MATCH] = state, match
        counts[HEAP] = _pop(worth, listed, counts[HEAP])
        counts[NODES] = node + 1


@loop
def arrange(count: Any, nodes: Any, order: Any, parents: Any, tokens: Any, places: Any) -> None:
    """decoding.tree.breadth_first of the first `count` nodes.

    Args:
        order, parents, tokens: int64 (count,), filled: the node at each place, its parent's place, its token.
        places: int64 (2, count), for use here: of each node its first child, and its next sibling.
    """
    child, sibling = places[0], places[1]
    child[:count] = 0
    for node in range(count - 1, 0, -1):
        parent = nodes[node, NODE_PARENT]
        sibling[node], child[parent] = child[parent], node
    order[0] = parents[0] = 0
    end = 1
    for place in range(count):
        tokens[place] = nodes[order[place], NODE_TOKEN]
        below = child[order[place]]
        while below:
            order[end], parents[end] = below, place
            below = sibling[below]
            end += 1


@loop
def _learn_weights(order: Any, choices: Any, draft: Any, weights: Any) -> None:
    """dynamic.weights.Weights.learn, of the candidates of each node and of those among them that the target chose."""
    _, nodes, _, children, _, _, _ = draft
    seen, accepted, now = weights
    for place in range(len(order)):
        node = order[place]
        for at in range(nodes[node, NODE_FIRST], nodes[node + 1, NODE_FIRST]):
            cell = children[at, CELL]
            seen[cell] += 1.0
            if children[at, CANDIDATE] == choices[place]:
                accepted[cell] += 1.0
    for place in range(len(order)):
        node = order[place]
        for at in range(nodes[node, NODE_FIRST], nodes[node + 1, NODE_FIRST]):
            now[children[at, CELL]] = accepted[children[at, CELL]] / seen[children[at, CELL]]


@loop
def _level(bits: Any, levels: Any) -> Any:
    """dynamic.rows.on_host, of one number."""
    if not bits > 0:
        return 0
    return levels - 1 if bits >= levels - 1 else int(bits)


@loop
def _write_rows(
    before: Any, tokens: Any, parents: Any, accepted: Any, candidates: Any, bits: Any, levels: Any, rows: Any
) -> None:
    """DynamicRecycling.keep: rejected nodes' rows first, so that of equal ones those of accepted nodes count."""
    token_ids, token_levels, token_seen, pair_ids, pair_levels, pair_seen, pair_keys, pair_shift = rows
    for turn in (False, True):
        for node in range(len(tokens)):
            if accepted[node] != turn:
                continue
            token = tokens[node]
            for rank in range(candidates.shape[1]):
                token_ids[token, rank] = candidates[node, rank]
                token_levels[token, rank] = _level(bits[node, rank], levels)
            token_seen[token] = True
            if len(pair_keys):
                key = ((tokens[parents[node]] if node else before) << 32) | token
                row = np.int64(_hashed(key) >> np.uint64(pair_shift))
                pair_keys[row], pair_seen[row] = key, True
                pair_ids[row], pair_levels[row] = token_ids[token], token_levels[token]


@loop
def _note_siblings(
    node: Any, root: Any, tokens: Any, parents: Any, candidates: Any, bits: Any, levels: Any, unlisted: Any, draft: Any,
    masses: Any, met: Any,
) -> None:  # fmt: skip
    """DynamicSession._note_siblings.

    Args:
        masses: float64 (V,), all 0 before and after.
        met: int64, room for the candidates of all children of `node`.
    """
    counts, _, _, _, siblings, worth, listed = draft
    k, n_siblings, size, seen, whole = candidates.shape[1], 0, 0, 0, 0.0
    for rank in range(k):
        if candidates[node, rank] != root:
            siblings[1, n_siblings, 0], siblings[1, n_siblings, 1] = (
                candidates[node, rank],
                _level(bits[node, rank], levels),
            )
            n_siblings += 1
    for child in range(1, len(tokens)):
        if parents[child] != node:
            continue
        weight = 0.5**unlisted
        for rank in range(k):
            if candidates[node, rank] == tokens[child]:
                weight = 0.5 ** _level(bits[node, rank], levels)
        whole += weight
        for rank in range(k):
            token = candidates[child, rank]
            if masses[token] == 0.0:
                met[seen] = token
                seen += 1
            masses[token] += weight * 0.5 ** _level(bits[child, rank], levels)
    for i in range(seen):
        size = _push(worth, listed, size, masses[met[i]], i)
    for i in range(min(seen, k)):
        part, level = worth[0], 0
        while level < levels - 1 and 2.0 * part <= whole:  # whole bits that it is short of all
            part, level = 2.0 * part, level + 1
        siblings[0, i, 0], siblings[0, i, 1] = met[listed[0]], level
        size = _pop(worth, listed, size)
    for i in range(seen):
        masses[met[i]] = 0.0
    counts[FOLLOWED_LISTED], counts[BESIDE_LISTED] = min(seen, k), n_siblings


@loop
def learn(
    before: Any, node: Any, arranged: Any, outcome: Any, levels: Any, unlisted: Any, learning: Any, siblings: Any,
    draft: Any, rows: Any, weights: Any, scratch: Any,
) -> None:  # fmt: skip
    """DynamicSession.observe: from what the target says of a draft's n nodes.

    Args:
        before: the token before the root.
        node: the deepest accepted one.
        arranged: order, parents and tokens, as `arrange` fills them.
        outcome: choices int64 (n,), accepted bool (n,), candidates int64 (n, k), bits float32 (n, k).
        levels, unlisted: how many levels there are, and that of siblings that are no candidates.
        learning, siblings: whether weights are learnt, and siblings noted.
        weights: seen, accepted and now, float64 each.
        scratch: see `_note_siblings`.
    """
    order, parents, tokens = arranged
    choices, accepted, candidates, bits = outcome
    if learning:
        _learn_weights(order, choices, draft, weights)
    _write_rows(before, tokens, parents, accepted, candidates, bits, levels, rows)
    if siblings:
        masses, met = scratch
        _note_siblings(node, choices[node], tokens, parents, candidates, bits, levels, unlisted, draft, masses, met)
