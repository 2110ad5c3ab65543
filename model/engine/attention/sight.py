"""Who sees whom in a forward over a cache.

Each sequence has a stretch of the cache: its committed columns, then one for each of its rows. A
row sees its sequence's committed columns, itself and its ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD = 64  # bits of an int64, in which ancestors are packed
# Columns of a table: of sequence s in row s its first row and number of rows; of each row its
# sequence's first column and number of committed columns, and from WORDS on the row's ancestors
# among its sequence's rows
FIRST, COUNT, BASE, LENGTH, WORDS = range(5)
# numbers: CUDA's kernels take rows that begin at a multiple of this, and copy all others first
ALIGNED = 16


class Sight(NamedTuple):
    """The table of who sees whom, on the device.

    Attributes:
        table: int64 (n, 4 + ceil(n / 64)), columns as above. Each row is of one sequence.
        sequences: S, at most n; those of no rows have zeros.
    """

    table: Tensor
    sequences: int

    @staticmethod
    def width(rows: int) -> int:
        return WORDS - (-rows // WORD)

    @property
    def as_mask(self) -> Tensor:
        """The table as a mask that layers get unread: int64 (1, S, n, columns)."""
        return self.table.expand(1, self.sequences, -1, -1)

    def seen(self, columns: int) -> tuple[Tensor, Tensor]:
        """Return what each row sees of a cache's first columns. Reads no host value.

        Returns:
            bool (n, columns), True where it sees; int64 (n, columns), the index in the row's
                stretch.
        """
        table = self.table
        index = torch.arange(columns, device=table.device) - table[:, BASE, None]
        drafted = index - table[:, LENGTH, None]  # which of the sequence's rows, if not negative
        bits = drafted.clamp(0, WORD * (table.shape[1] - WORDS) - 1)
        is_ancestor = (table[:, WORDS:].gather(1, bits // WORD) >> bits % WORD & 1).bool() & (
            drafted == bits
        )
        return (index >= 0) & ((drafted < 0) | is_ancestor), index


def fill_table(
    table: NDArray[np.int64],
    ancestors: Sequence[NDArray[np.bool_]],
    stretches: Sequence[tuple[int, int]],
) -> None:
    """Fill a table of n rows on the host.

    Args:
        ancestors: of each sequence, bool (m, m). Further rows are the last sequence's and see no
            other.
        stretches: of each sequence, its first column and number of committed ones.
    """
    n = len(table)
    table[:] = 0
    seen = np.zeros((n, (table.shape[1] - WORDS) * WORD), dtype=bool)
    first = 0
    for sequence, (of_rows, stretch) in enumerate(zip(ancestors, stretches, strict=True)):
        drafted = len(of_rows)
        count = drafted if sequence < len(ancestors) - 1 else n - first
        rows = slice(first, first + count)
        table[sequence, FIRST] = first
        table[sequence, COUNT] = count
        table[rows, BASE : LENGTH + 1] = stretch
        seen[first : first + drafted, :drafted] = of_rows
        padding = np.arange(drafted, count)
        seen[first + padding, padding] = True
        first += count
    table[:, WORDS:] = np.packbits(seen, axis=1, bitorder="little").view(np.int64)


def additive(visible: Tensor, dtype: torch.dtype, past: int = 0) -> Tensor:
    """Return the additive mask (n, past + m) of `past` visible columns and `visible`, bool (n, m).

    `eager` attention silently misreads a bool mask.
    """
    columns = past + visible.shape[1]
    aligned = -(-columns // ALIGNED) * ALIGNED
    mask = torch.zeros(len(visible), aligned, dtype=dtype, device=visible.device)[:, :columns]
    mask[:, past:].masked_fill_(~visible, torch.finfo(dtype).min)
    return mask
