"""A whole forward of a model of Llama's kind on a CPU, as one compiled loop that threads share.

Each thread computes its part of every product's outputs, straight from the model's own weights.
Buffers have more rows than the n that are computed, as products write up to seven more.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ...compiled import loop
from .intrinsics import add_to, array_at, prefetch, rest, wide

# Loops become vectors if sums may be taken in any order, and a division by zero raises nothing.
# NaNs keep their meaning.
arithmetic = partial(loop, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy", nogil=True)
exact = partial(loop, fastmath={"contract"}, error_model="numpy", nogil=True)

BLOCK = 4  # columns that attention reads at once
ROWS = 8  # that one pass over a weight serves
SPINS = 2000  # looks at a meeting before the processor is offered to others
LINE = 64  # bytes of a cache line
# a team's numbers, on cache lines of their own: how often threads came to meetings; 1 if one left
MEETING = 0
LEFT = 16

# Columns of a table of addresses, a row a layer: weights (out, in); biases (out,) or 0; norms'
# weights (.,) or 0
Q, K, V, OUT, GATE, UP, DOWN = range(7)
BIAS = 7
NORM, NORM_AFTER, NORM_Q, NORM_K = range(14, 18)
TABLE = 18


@arithmetic
def meet(numbers, goal):
    """Wait for `goal` arrivals since the forward began. Return True if a thread left the team."""
    add_to(numbers, MEETING, 1)
    looks = 0
    while add_to(numbers, MEETING, 0) < goal and add_to(numbers, LEFT, 0) == 0:
        looks += 1
        if looks > SPINS:
            rest()
    return add_to(numbers, LEFT, 0) != 0


@arithmetic
def _one(weight, x, i, out, j, at):
    """Write the product of row j of a weight (out, in) and row i of x (., in) to out[i, at]."""
    total = np.float32(0)
    for k in range(weight.shape[1]):
        total += wide(weight[j, k]) * x[i, k]
    out[i, at] = total


@arithmetic
def _four(weight, x, i, out, j, at):
    """As `_one`, of rows i to i + 3."""
    a = np.float32(0)
    b = np.float32(0)
    c = np.float32(0)
    d = np.float32(0)
    for k in range(weight.shape[1]):
        factor = wide(weight[j, k])
        a += factor * x[i, k]
        b += factor * x[i + 1, k]
        c += factor * x[i + 2, k]
        d += factor * x[i + 3, k]
    out[i, at] = a
    out[i + 1, at] = b
    out[i + 2, at] = c
    out[i + 3, at] = d


@arithmetic
def _eight(weight, x, i, out, j, at):
    """As `_one`, of rows i to i + 7: two passes of four took 1.3 times as long."""
    a = np.float32(0)
    b = np.float32(0)
    c = np.float32(0)
    d = np.float32(0)
    e = np.float32(0)
    f = np.float32(0)
    g = np.float32(0)
    h = np.float32(0)
    for k in range(weight.shape[1]):
        factor = wide(weight[j, k])
        a += factor * x[i, k]
        b += factor * x[i + 1, k]
        c += factor * x[i + 2, k]
        d += factor * x[i + 3, k]
        e += factor * x[i + 4, k]
        f += factor * x[i + 5, k]
        g += factor * x[i + 6, k]
        h += factor * x[i + 7, k]
    out[i, at] = a
    out[i + 1, at] = b
    out[i + 2, at] = c
    out[i + 3, at] = d
    out[i + 4, at] = e
    out[i + 5, at] = f
    out[i + 6, at] = g
    out[i + 7, at] = h


@arithmetic
def multiply(weight, bias, x, n, first, last, out, at):
    """Write outputs first to last of n rows times weight (out, in) to out, from column `at` on.

    Args:
        bias: (out,), or empty.
    """
    size = weight.shape[1] * weight.itemsize
    address = np.intp(weight.ctypes.data)
    for j in range(first, last):
        for byte in range(0, size, LINE):
            prefetch(address + (j + 1) * size + byte)
        column = at + j - first
        i = 0
        while i < n:
            left = n - i
            if left > 6:
                _eight(weight, x, i, out, j, column)
                i += 8
            elif left > 2:
                _four(weight, x, i, out, j, column)
                i += 4
            else:
                _one(weight, x, i, out, j, column)
                i += 1
        if len(bias):
            for i in range(n):
                out[i, column] += bias[j]


@arithmetic
def norm(n, x, weight, eps, out):
    """Write the RMS norm of n rows of x (., H), times weight (H,), to out (., H)."""
    width = len(weight)
    for i in range(n):
        row = x[i]
        normed = out[i]
        squares = np.float32(0)
        for j in range(width):
            squares += row[j] * row[j]
        scale = np.float32(1) / np.sqrt(squares / np.float32(width) + eps)
        for j in range(width):
            normed[j] = weight[j] * (row[j] * scale)


@arithmetic
def copy(n, x, out):
    for i in range(n):
        for j in range(x.shape[1]):
            out[i, j] = x[i, j]


@arithmetic
def add(n, x, added):
    for i in range(n):
        for j in range(x.shape[1]):
            x[i, j] += added[i, j]


@arithmetic
def rotate(row, weight, eps, cos, sin):
    """Norm a head's row (D,), unless weight (D,) is empty; rotate it by angles (R,), R <= D."""
    dim = len(row)
    if len(weight):
        squares = np.float32(0)
        for j in range(dim):
            squares += row[j] * row[j]
        scale = np.float32(1) / np.sqrt(squares / np.float32(dim) + eps)
        for j in range(dim):
            row[j] = weight[j] * (row[j] * scale)
    half = len(cos) // 2
    for j in range(half):
        low = row[j]
        high = row[half + j]
        row[j] = low * cos[j] - high * sin[j]
        row[half + j] = high * cos[half + j] + low * sin[half + j]


@arithmetic
def store(row, out):
    """Copy a row to the cache, NaN and infinity as 0, as `TreeCacheLayer.update` does."""
    for j in range(len(row)):
        out[j] = row[j] if np.isfinite(row[j]) else np.float32(0)


@exact
def _exp(x):
    """Return exp(x) by Cephes' polynomial, which becomes vectors: exp(-87) to exp(88), or inf."""
    is_large = x > np.float32(88.0)
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if is_large else x
    bits = np.int32(x * np.float32(1.44269504) + np.float32(127.5))  # the exponent's, in float32
    power = np.float32(bits) - np.float32(127)
    rest = x - power * np.float32(0.693359375) + power * np.float32(2.12194440e-4)
    y = np.float32(1.98756915e-4)
    y = y * rest + np.float32(1.39819995e-3)
    y = y * rest + np.float32(8.33345191e-3)
    y = y * rest + np.float32(4.16657959e-2)
    y = y * rest + np.float32(1.66666655e-1)
    y = y * rest + np.float32(0.5)
    y = y * rest * rest + rest + np.float32(1.0)
    scale = np.int32(bits << np.int32(23)).view(np.float32)
    return np.float32(np.inf) if is_large else y * scale


@exact
def silu_times(n, gate, up, first, last):
    """Write silu(gate) times up to gate (., I), of n rows, columns first to last."""
    for i in range(n):
        gates = gate[i, first:last]
        ups = up[i, first:last]
        for j in range(last - first):
            value = gates[j]
            gates[j] = value / (np.float32(1) + _exp(-value)) * ups[j]


@arithmetic
def attend(query, keys, values, seen, count, scaling, scores, out):
    """Write a row's attention (D,) over keys and values (capacity, D) to out.

    Args:
        seen: int64 (.,), the `count` columns that the row sees, then others up to a multiple of
            BLOCK.
        scores: a buffer (.,).
    """
    dim = len(query)
    for index in range(0, count, BLOCK):
        key_a = keys[seen[index]]
        key_b = keys[seen[index + 1]]
        key_c = keys[seen[index + 2]]
        key_d = keys[seen[index + 3]]
        a = np.float32(0)
        b = np.float32(0)
        c = np.float32(0)
        d = np.float32(0)
        for j in range(dim):
            a += query[j] * key_a[j]
            b += query[j] * key_b[j]
            c += query[j] * key_c[j]
            d += query[j] * key_d[j]
        scores[index] = a * scaling
        scores[index + 1] = b * scaling
        scores[index + 2] = c * scaling
        scores[index + 3] = d * scaling
    top = np.float32(-np.inf)
    for index in range(count):
        top = max(top, scores[index])
    total = np.float32(0)
    for index in range(count):
        scores[index] = _exp(scores[index] - top)
        total += scores[index]
    scores[count : count + BLOCK] = np.float32(0)
    for j in range(dim):
        out[j] = np.float32(0)
    for index in range(0, count, BLOCK):
        value_a = values[seen[index]]
        value_b = values[seen[index + 1]]
        value_c = values[seen[index + 2]]
        value_d = values[seen[index + 3]]
        a = scores[index] / total
        b = scores[index + 1] / total
        c = scores[index + 2] / total
        d = scores[index + 3] / total
        for j in range(dim):
            out[j] += a * value_a[j] + b * value_b[j] + c * value_c[j] + d * value_d[j]


@arithmetic
def look(mask, before, seen, counts):
    """List the columns that each of n rows sees.

    Args:
        mask: additive (n, columns), 0 where a row sees; (0, .): it sees `before` columns and
            itself.
        seen, counts: int64 (n, columns + BLOCK) and (n,), to write to.
    """
    for row in range(len(counts)):
        count = 0
        seen[row, 0] = 0
        for at in range(mask.shape[1] if len(mask) else before + row + 1):
            if not len(mask) or mask[row, at] == 0:
                seen[row, count] = at
                count += 1
        counts[row] = count
        seen[row, count : count + BLOCK] = seen[row, 0]


@arithmetic
def _share(me, team, row, part, like, empty, x, n, out):
    outputs = out.shape[1]
    weight = array_at(row[part], (outputs, x.shape[1]), like)
    bias = array_at(row[BIAS + part], (outputs if row[BIAS + part] else 0,), empty)
    first = outputs * me // team
    multiply(weight, bias, x, n, first, outputs * (me + 1) // team, out, first)


@arithmetic
def _inputs(
    unit, sizes, row, of_cache, like, empty, eps, angles,
    columns, x, projected, rotates,
):  # fmt: skip
    """Compute one head of queries, keys or values, into `projected` or the cache."""
    n, heads, shared, dim, capacity = sizes
    part = Q
    head = unit
    outputs = heads * dim
    if unit >= heads:
        part = K + (unit - heads) // shared
        head = (unit - heads) % shared
        outputs = shared * dim
    weight = array_at(row[part], (outputs, x.shape[1]), like)
    bias = array_at(row[BIAS + part], (outputs if row[BIAS + part] else 0,), empty)
    first = head * dim
    multiply(weight, bias, x, n, first, first + dim, projected, unit * dim)
    for i in range(n):
        of_head = projected[i, unit * dim : (unit + 1) * dim]
        if part != V:
            weights = array_at(row[NORM_Q + part], (dim if row[NORM_Q + part] else 0,), empty)
            until = angles.shape[2] if rotates else 0
            rotate(of_head, weights, eps[2 + part], angles[0, i, :until], angles[1, i, :until])
        if part != Q:
            shape = (shared, capacity, dim)
            cached = array_at(of_cache[part - K], shape, empty)
            store(of_head, cached[head, columns[i]])


@arithmetic
def forward(
    me, team, numbers, sizes, like, table, cache, eps,
    scaling, angles, columns, seen, counts, types, buffers,
    embedded, kept, states, logits,
):  # fmt: skip
    """Forward n rows through all layers, the last norm and the head, as thread `me` of a team.

    Args:
        numbers: int64, of the team; zeros as a forward begins.
        sizes: n, heads, heads of keys and values, D, and the cache's capacity.
        like: an empty array of the weights' type; see `wide`.
        table: int64 (layers + 1, TABLE), addresses; the last row's are of norm and head.
        cache: int64 (layers, 2), addresses of keys and values (shared heads, capacity, D).
        eps, scaling: float32 (layers + 1, 4), of norms; (layers,).
        angles: cos and sin (2, n, R).
        columns: int64 (n,), where keys and values are written.
        seen, counts, types: as `look` writes them, by type of layer; each layer's type, and whether
            it rotates (layers, 2).
        buffers: each thread's states, norms (team, ., H) and scores (team, .); queries, keys and
            values, attended, gates, factors, output (rows, .).
        kept, states: which state each layer's input is, int64 (layers + 1,), or -1; (., n, H).
    """
    xs, normeds, scores, projected, attended, gates, ups, output = buffers
    n, heads, shared, dim, capacity = sizes
    x = xs[me]
    normed = normeds[me]
    empty = scores[0, :0]
    width = x.shape[1]
    inner = gates.shape[1]
    copy(n, embedded, x)
    goal = 0
    for layer in range(len(cache)):
        row = table[layer]
        if me == 0 and kept[layer] >= 0:
            copy(n, x, states[kept[layer]])
        norm(n, x, array_at(row[NORM], (width,), empty), eps[layer, 0], normed)
        units = heads + 2 * shared
        for unit in range(units * me // team, units * (me + 1) // team):
            _inputs(
                unit, sizes, row, cache[layer], like, empty, eps[layer], angles, columns, normed,
                projected, types[layer, 1],
            )  # fmt: skip
        goal += team
        if meet(numbers, goal):
            return
        shape = (shared, capacity, dim)
        keys = array_at(cache[layer, 0], shape, empty)
        values = array_at(cache[layer, 1], shape, empty)
        kind = types[layer, 0]
        for item in range(n * heads * me // team, n * heads * (me + 1) // team):
            i = item // heads
            head = item % heads
            of_head = head // (heads // shared)
            at = slice(head * dim, (head + 1) * dim)
            attend(
                projected[i, at], keys[of_head], values[of_head], seen[kind, i], counts[kind, i],
                scaling[layer], scores[me], attended[i, at],
            )  # fmt: skip
        goal += team
        if meet(numbers, goal):
            return
        _share(me, team, row, OUT, like, empty, attended, n, output)
        goal += team
        if meet(numbers, goal):
            return
        add(n, x, output)
        norm(n, x, array_at(row[NORM_AFTER], (width,), empty), eps[layer, 1], normed)
        _share(me, team, row, GATE, like, empty, normed, n, gates)
        _share(me, team, row, UP, like, empty, normed, n, ups)
        silu_times(n, gates, ups, inner * me // team, inner * (me + 1) // team)
        goal += team
        if meet(numbers, goal):
            return
        _share(me, team, row, DOWN, like, empty, gates, n, output)
        goal += team
        if meet(numbers, goal):
            return
        add(n, x, output)
    row = table[-1]
    norm(n, x, array_at(row[NORM], (width,), empty), eps[-1, 0], normed)
    if me == 0 and kept[-1] >= 0:
        copy(n, normed, states[kept[-1]])
    _share(me, team, row, OUT, like, empty, normed, n, logits)
    meet(numbers, goal + team)
