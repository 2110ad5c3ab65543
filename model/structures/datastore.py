"""A datastore of token ids that is searched by exact match: the tokens of a corpus and their suffix array, in one file.

The file is mapped into memory, so that opening it costs the same at any size and only the pages that a search touches
are read. Tokens are stored big-endian: the order of their bytes is then the order of the tokens, and a comparison of
two suffixes is one comparison of bytes.

| bytes | what |
|---|---|
| 64 | header: magic, version, vocabulary, width of a token, number of tokens n, SHA-256 of this and of four samples |
| n * width | tokens, unsigned, big-endian, 2 bytes each (4 where the vocabulary is larger than 65,536) |
| 0 or 2 | padding to a multiple of 4 |
| n * 4 | suffix array, unsigned, little-endian: where each suffix begins, in lexicographic order |
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..files import located, replaced
from . import PADDING


def suffix_array(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where the suffixes of `tokens` (n,) begin, in lexicographic order: int64 (n,). A prefix comes first."""
    n, span = len(tokens), 1
    rank = np.unique(tokens, return_inverse=True)[1]  # by a suffix's first `span` tokens; ties share a rank
    while True:
        following = np.append(rank[span:] + 1, np.zeros(min(span, n), dtype=np.int64))  # 0 is the end
        keys = rank * (n + 1) + following
        order = np.argsort(keys)
        sorted_keys = keys[order]
        rank[order] = np.append(0, np.cumsum(sorted_keys[1:] != sorted_keys[:-1]))
        if rank[order[-1]] == n - 1:
            return order
        span *= 2


MAGIC, VERSION = b"TOKENSFX", 1
HEADER = struct.Struct("<8sIIQQ32s")  # magic, version, vocabulary, width, tokens, digest
SAMPLE = 4096  # bytes of each end of the tokens and of the suffix array that the digest covers
MAX_TOKENS = 2**32 - 1  # tokens: what four bytes can number


class Datastore:
    """An opened file. Raises UserError if it is no datastore, was changed, or is of another vocabulary."""

    def __init__(self, path: str | Path, *, vocab_size: int) -> None:
        file = located(path)
        self.name = str(path)
        try:
            with file.open("rb") as stream:
                width, count = _check(stream, self.name, vocab_size)
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            reason = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise UserError(f"datastore {path}: {reason}; build one with `python -m tools.datastore`") from None
        self.vocab_size, self._width, self._count = vocab_size, width, count
        start, at = HEADER.size, _suffixes_at(width, count)
        self._bytes = memoryview(self._map)[start : start + width * count]
        self._order = memoryview(self._map)[at:].cast("I")  # (n,); reading one number of it costs 40 ns, numpy's 100
        self._tokens = np.frombuffer(self._bytes, dtype=f">u{width}")  # (n,)
        self._suffixes = np.frombuffer(self._map, dtype="<u4", offset=at)  # (n,)

    def __len__(self) -> int:
        return self._count

    def longest(self, context: Sequence[int], *, min_n: int, max_n: int) -> tuple[int, int, int]:
        """Find the longest n-gram at the end of `context` that the datastore holds, with `min_n` <= n <= `max_n`.

        Every suffix of a stored n-gram is stored, too; so the longest is found by bisection over n.

        Returns:
            n, first, last: rows first ... last - 1 of the suffix array begin with it; (0, 0, 0) if there is none.
        """
        context = context[-max_n:]
        key = struct.pack(f">{len(context)}{'H' if self._width == 2 else 'I'}", *context)
        low, high = min_n, min(max_n, len(context))
        best = (0, 0, 0)
        while low <= high:
            n = (low + high) // 2
            first, last = self._find(key[len(key) - n * self._width :])
            if first < last:
                best, low = (n, first, last), n + 1
            else:
                high = n - 1
        return best

    def continuations(self, first: int, last: int, *, skip: int, length: int, limit: int) -> NDArray[np.int64]:
        """Return the tokens after the first `skip` of each suffix in rows first ... last - 1, in lexicographic order.

        Of more than `limit` suffixes, `limit` evenly spread ones are read. Raises UserError if the file is corrupt.

        Returns:
            int64 (min(limit, last - first), length); -1 beyond the datastore's end.
        """
        count, rows_read = last - first, min(limit, last - first)
        rows = first + np.arange(rows_read) * count // rows_read
        suffixes = self._suffixes[rows].astype(np.int64)
        positions = suffixes[:, None] + np.arange(skip, skip + length)  # (s, length)
        beyond = positions >= self._count
        tokens: NDArray[np.int64] = self._tokens[np.minimum(positions, self._count - 1)].astype(np.int64)
        if suffixes.max() >= self._count or tokens.max() >= self.vocab_size:
            raise UserError(f"datastore {self.name}: corrupt; build it again with `python -m tools.datastore`")
        tokens[beyond] = -1
        return tokens

    def _find(self, key: bytes) -> tuple[int, int]:
        data, width, size = self._bytes, self._width, len(key)

        def prefix(position: int) -> bytes:
            at = position * width
            return bytes(data[at : at + size])

        first = bisect_left(self._order, key, key=prefix)
        if first == self._count or prefix(self._order[first]) != key:
            return first, first
        return first, bisect_right(self._order, key, lo=first, key=prefix)


def write_datastore(path: Path, tokens: NDArray[np.int64], vocab_size: int) -> None:
    """Build the suffix array of `tokens` (n,) and write the file.

    Raises UserError if a token is outside the vocabulary, there are none or too many, or the file cannot be written.
    """
    if not 1 <= len(tokens) <= MAX_TOKENS:
        raise UserError(f"datastore {path}: {len(tokens)} tokens; there must be 1 to {MAX_TOKENS}")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UserError(
            f"datastore {path}: tokens {tokens.min()} to {tokens.max()}, but the vocabulary is {vocab_size}"
        )
    width = 2 if vocab_size <= 2**16 else 4
    with replaced(path) as partial, partial.open("w+b") as stream:
        stream.write(bytes(HEADER.size))
        stream.write(tokens.astype(f">u{width}").data)
        stream.write(bytes(_suffixes_at(width, len(tokens)) - stream.tell()))
        stream.write(suffix_array(tokens).astype("<u4").data)
        digest = _digest(stream, vocab_size, width, len(tokens))
        stream.seek(0)
        stream.write(HEADER.pack(MAGIC, VERSION, vocab_size, width, len(tokens), digest))


def _suffixes_at(width: int, count: int) -> int:
    return -(-(HEADER.size + width * count) // 4) * 4


def _digest(stream: BinaryIO, vocab_size: int, width: int, count: int) -> bytes:
    """SHA-256 of the header's numbers and of both ends of the tokens and of the suffix array."""
    digest = hashlib.sha256(struct.pack("<QQQQ", VERSION, vocab_size, width, count))
    at = _suffixes_at(width, count)
    for begin, end in ((HEADER.size, HEADER.size + width * count), (at, at + 4 * count)):
        for offset in (begin, max(begin, end - SAMPLE)):
            stream.seek(offset)
            digest.update(stream.read(min(SAMPLE, end - offset)))
    return digest.digest()


def _check(stream: BinaryIO, name: str, vocab_size: int) -> tuple[int, int]:
    """Raise UserError unless this is a complete datastore of the vocabulary; return the tokens' width and number."""
    head = stream.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise UserError(f"datastore {name}: not a datastore; build one with `python -m tools.datastore`")
    _, version, vocabulary, width, count, digest = HEADER.unpack(head)
    is_whole = width in (2, 4) and count > 0 and stream.seek(0, 2) == _suffixes_at(width, count) + 4 * count
    if version != VERSION or not is_whole or _digest(stream, vocabulary, width, count) != digest:
        raise UserError(
            f"datastore {name}: cut short, changed, or of another version than {VERSION} ({version}); build it again "
            "with `python -m tools.datastore`"
        )
    if abs(vocabulary - vocab_size) >= PADDING or vocab_size > 256**width:
        raise UserError(
            f"datastore {name}: its vocabulary has {vocabulary} tokens, the model's {vocab_size}; "
            "build one with this model's tokenizer (`python -m tools.datastore`)"
        )
    return width, count
