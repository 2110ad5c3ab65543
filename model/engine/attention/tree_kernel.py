"""The attention of `Sight` in Triton: split over the cache, then merged (Flash-Decoding).

Rows, lengths and ancestors are read on the device, so one captured step serves every length of text
and every mix of drafts. With TRITON_INTERPRET=1 it runs on a CPU, for tests.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sight import BASE, COUNT, FIRST, LENGTH, WORDS

LOG2_E = 1.4426950408889634
BLOCKS = 2  # programs for each multiprocessor; more parts of a cache than that gain nothing
LEAST_COLUMNS = 64  # of a part; smaller parts cost more to merge than they gain
MOST_PARTS = 32
# Constants that the kernel may read
_FIRST, _COUNT, _BASE, _LENGTH, _WORDS = map(tl.constexpr, (FIRST, COUNT, BASE, LENGTH, WORDS))


@triton.jit
def _sequence_of(
    table,
    table_row,
    tile,
    GROUP: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return a tile's sequence, SEQUENCES if there is none, and the tile's number in it."""
    sequence = 0
    if SEQUENCES > 1:
        each = tl.arange(0, PADDED)
        rows_of = tl.load(table + each * table_row + _COUNT, mask=each < SEQUENCES, other=0)
        tiles_of = tl.cdiv(rows_of * GROUP, ROWS)
        up_to = tl.sum(tl.where(each[None, :] <= each[:, None], tiles_of[None, :], 0), 1)
        is_before = (up_to <= tile) & (each < SEQUENCES)
        sequence = tl.sum(is_before.to(tl.int32), 0)
        tile -= tl.sum(tl.where(is_before, tiles_of, 0), 0).to(tl.int32)
    return sequence, tile


@triton.jit
def _is_seen(words, drafted, exists, inside):
    """Return which columns each row sees, (ROWS, COLUMNS); `drafted` is 0 at the first row."""
    is_drafted = (drafted >= 0) & inside
    bits = tl.load(
        words[:, None] + (drafted // 64)[None, :],
        mask=exists[:, None] & is_drafted[None, :],
        other=0,
    )
    # % would be negative for committed columns, and shifts by that undefined
    is_ancestor = ((bits >> (drafted & 63)[None, :].to(tl.int64)) & 1) != 0
    return (drafted < 0)[None, :] | (is_ancestor & is_drafted[None, :])


# a forward's table is anywhere in its input, so it would be compiled twice
@triton.jit(
    do_not_specialize=["outputs", "parts", "table_row"], do_not_specialize_on_alignment=["table"]
)
def _attend(
    query,
    key,
    value,
    table,
    partial,
    log_sums,
    scale,
    outputs,
    parts,
    table_row,
    query_head,
    query_row,
    key_head,
    key_column,
    value_head,
    value_column,
    GROUP: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_2: tl.constexpr,
    VALUES: tl.constexpr,
    VALUES_2: tl.constexpr,
) -> None:
    """Attend from a tile of a sequence's rows, for one head of keys, to a part of its columns.

    A tile's rows are node * GROUP + the head's number in its group; `outputs` is n * H.
    """
    head = tl.program_id(0)
    part = tl.program_id(2)
    sequence, tile = _sequence_of(
        table, table_row, tl.program_id(1), GROUP, SEQUENCES, PADDED, ROWS
    )
    if sequence >= SEQUENCES:
        return
    first = tl.load(table + sequence * table_row + _FIRST)
    count = tl.load(table + sequence * table_row + _COUNT).to(tl.int32)
    base = tl.load(table + first * table_row + _BASE)
    length = tl.load(table + first * table_row + _LENGTH).to(tl.int32)
    if tile * ROWS >= count * GROUP:
        return

    end = length + count
    size = tl.cdiv(tl.cdiv(end, parts), COLUMNS) * COLUMNS
    start = part * size
    end = tl.minimum(start + size, end)
    row = tile * ROWS + tl.arange(0, ROWS)
    node = first + row // GROUP
    member = head * GROUP + row % GROUP
    exists = row < count * GROUP
    at = tl.arange(0, WIDTH_2)
    at_value = tl.arange(0, VALUES_2)
    rows = tl.load(
        query + member[:, None] * query_head + node[:, None] * query_row + at[None, :],
        mask=exists[:, None] & (at < WIDTH)[None, :],
        other=0.0,
    )

    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, VALUES_2], tl.float32)
    for column in range(start, end, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        inside = columns < end
        keys = tl.load(
            key + head * key_head + (base + columns)[None, :] * key_column + at[:, None],
            mask=inside[None, :] & (at < WIDTH)[:, None],
            other=0.0,
        )
        scores = tl.dot(rows, keys, input_precision="ieee") * scale  # of float32; no TF32
        if column + COLUMNS > length:  # the rows' own columns, or columns of nobody
            seen = _is_seen(table + node * table_row + _WORDS, columns - length, exists, inside)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - shift[:, None])  # `scale` includes log2(e)
        shrunk = tl.exp2(most - shift)
        total = total * shrunk + tl.sum(weights, 1)
        values = tl.load(
            value
            + head * value_head
            + (base + columns)[:, None] * value_column
            + at_value[None, :],
            mask=inside[:, None] & (at_value < VALUES)[None, :],
            other=0.0,
        )
        attended = attended * shrunk[:, None]
        attended += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        most = higher

    output = node * (tl.num_programs(0) * GROUP) + member  # of (n, H)
    attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    to = (part * outputs + output)[:, None] * VALUES + at_value[None, :]
    is_output = exists[:, None] & (at_value < VALUES)[None, :]
    tl.store(partial + to, attended.to(partial.dtype.element_ty), mask=is_output)
    if SPLIT:
        log_sum = tl.where(
            total == 0.0, float("-inf"), most + tl.log2(tl.where(total == 0.0, 1.0, total))
        )
        tl.store(log_sums + part * outputs + output, log_sum, mask=exists)


@triton.jit(do_not_specialize=["outputs"])
def _merge(
    partial,
    log_sums,
    merged,
    outputs,
    PARTS: tl.constexpr,
    VALUES: tl.constexpr,
    VALUES_2: tl.constexpr,
) -> None:
    """Merge an output's parts, weighted by their sums of exponentials."""
    output = tl.program_id(0)
    part = tl.arange(0, PARTS)
    at = tl.arange(0, VALUES_2)
    log_sum = tl.load(log_sums + part * outputs + output)
    weight = tl.exp2(log_sum - tl.max(log_sum, 0))
    weight = weight / tl.sum(weight, 0)
    to = (part * outputs + output)[:, None] * VALUES + at[None, :]
    parts = tl.load(partial + to, mask=(at < VALUES)[None, :], other=0.0)
    every = tl.sum(parts * weight[:, None], 0)
    tl.store(merged + output * VALUES + at, every.to(merged.dtype.element_ty), mask=at < VALUES)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    sequences: int,
    scaling: float,
    parts: int = 0,
) -> Tensor:
    """Attend as a `Sight` says: (1, n, H, Dv).

    Args:
        query: (1, H, n, D).
        key, value: (1, Hkv, C, D) and (1, Hkv, C, Dv), the whole cache.
        parts: of a sequence's columns, a power of two; 0: as many as occupy the device.
    """
    _, heads, n, width = query.shape
    shared, columns = key.shape[1:3]
    values = value.shape[3]
    group = heads // shared
    query, key, value = (
        tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (query, key, value)
    )
    tile = tile_of(-(-n // sequences) * group, max(width, values), query.element_size())
    rows = tile["ROWS"]
    tiles = -(-n * group // rows) + sequences - 1
    parts = parts or _parts(shared * tiles, columns, _processors(query.device))
    merged = query.new_empty(1, n, heads, values)
    split = parts > 1
    partial = query.new_empty(parts, n, heads, values, dtype=torch.float32) if split else merged
    log_sums = query.new_empty(parts, n, heads, dtype=torch.float32) if split else merged
    _attend[shared, tiles, parts](
        query,
        key,
        value,
        table,
        partial,
        log_sums,
        scaling * LOG2_E,
        n * heads,
        parts,
        table.stride(0),
        query.stride(1),
        query.stride(2),
        key.stride(1),
        key.stride(2),
        value.stride(1),
        value.stride(2),
        GROUP=group,
        SEQUENCES=sequences,
        PADDED=triton.next_power_of_2(sequences),
        SPLIT=split,
        WIDTH=width,
        WIDTH_2=triton.next_power_of_2(width),
        VALUES=values,
        VALUES_2=triton.next_power_of_2(values),
        **tile,
    )
    if split:
        _merge[(n * heads,)](
            partial,
            log_sums,
            merged,
            n * heads,
            PARTS=parts,
            VALUES=values,
            VALUES_2=triton.next_power_of_2(values),
            num_warps=2,
        )
    return merged


def tile_of(rows: int, width: int, itemsize: int) -> dict[str, int]:
    """Return how `_attend` cuts a sequence's rows (nodes times heads of a group) and columns.

    Measured on an H100 for 1, 25 and 81 rows of width 128 and 16 bits. Larger tiles may spill
    registers.
    """
    small = width * itemsize <= 256
    most = 64 if small and itemsize < 4 else 32 if width * itemsize <= 512 else 16
    height = min(max(16, triton.next_power_of_2(rows)), most)
    return {
        "ROWS": height,
        "COLUMNS": 64 if small else 32,
        "num_warps": 8 if itemsize == 4 else 4,
        "num_stages": 3 if small and height < 64 else 2,
    }


def _parts(blocks: int, columns: int, processors: int) -> int:
    """Return the number of parts of a cache; 1 if the tiles alone occupy the device."""
    parts = 1
    while (
        parts < MOST_PARTS
        and 2 * parts * blocks <= BLOCKS * processors
        and columns >= 2 * parts * LEAST_COLUMNS
    ):
        parts *= 2
    return parts


@cache
def _processors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 132  # an H100's, for tests
    )
