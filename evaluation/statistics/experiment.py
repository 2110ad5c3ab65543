"""An experiment: the runs that are reported together.

It has the results that reports need, each computed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import pandas as pd

from ..records.runs import Run, read_runs
from ..records.store import missing_jobs, not_available
from .agreement import Audit, audits
from .metrics import grouped
from .pools import Pool, pools
from .published import with_published
from .tables import block_names, main_table, with_unavailable


class Experiment:
    """Runs in the tables' order.

    Args:
        folder: the experiment's; None for runs from elsewhere, whose sweeps are not known.
    """

    def __init__(self, runs: Iterable[Run], folder: Path | None = None) -> None:
        self.runs = list(runs)
        self.folder = folder

    @classmethod
    def read(cls, folder: Path) -> Experiment:
        """Read a folder's runs, or its compact records. Raises UserError if there are none."""
        return cls(read_runs(folder), folder)

    @cached_property
    def pools(self) -> list[Pool]:
        """The configurations."""
        return pools(self.runs)

    @cached_property
    def blocks(self) -> dict[str, list[Pool]]:
        """The configurations of each block, by its name.

        A block is of one model, bench, limit and device.
        """
        names = block_names(tuple(pool.group.values()) for pool in self.pools)
        return grouped(self.pools, lambda pool: names[tuple(pool.group.values())])

    @cached_property
    def named(self) -> dict[str, Pool]:
        """The configurations by their names in tables and figures.

        Names that are not unique include the block.
        """
        counts = Counter(pool.name for pool in self.pools)
        named = {}
        for block, pooled in self.blocks.items():
            for pool in pooled:
                named[pool] = f"{pool.name}, {block}" if counts[pool.name] > 1 else pool.name

        return {named[pool]: pool for pool in self.pools}

    @cached_property
    def table(self) -> pd.DataFrame:
        """The main table: measured figures, with published ones next to them."""
        return with_published(main_table(self.pools))

    @cached_property
    def not_available(self) -> list[dict[str, str]]:
        """Model, bench and method of the jobs that its sweeps left out, and `why`."""
        return not_available(self.folder) if self.folder else []

    @cached_property
    def whole_table(self) -> pd.DataFrame:
        """The main table with a row for each method that a sweep left out."""
        return with_unavailable(self.table, self.not_available)

    @cached_property
    def missing(self) -> str:
        """The jobs that its last sweep has not finished, in words; empty if all are done."""
        return missing_jobs(self.folder) if self.folder else ""

    @cached_property
    def audits(self) -> list[Audit]:
        """Each configuration's answers, compared with vanilla's."""
        return audits(self.pools)
