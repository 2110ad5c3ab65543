"""An experiment: the runs that are reported together, and what every report needs of them, each made once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import pandas as pd

from ..records.runs import Run, read_runs
from ..records.sweeps import missing_jobs, not_available
from .agreement import Audit, audits
from .metrics import grouped
from .pools import Pool, pools
from .published import with_published
from .tables import block_names, main_table, with_unavailable


class Experiment:
    """Runs in the tables' order.

    Args:
        folder: of their experiment; None for runs from anywhere, whose sweeps are not known.
    """

    def __init__(self, runs: Iterable[Run], folder: Path | None = None) -> None:
        self.runs, self.folder = list(runs), folder

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
        """By a block's name its configurations: those of one model, bench, limit and device."""
        names = block_names(tuple(pool.group.values()) for pool in self.pools)
        return grouped(self.pools, lambda pool: names[tuple(pool.group.values())])

    @cached_property
    def named(self) -> dict[str, Pool]:
        """The configurations by the names of tables and figures, with their block's where two have the same."""
        counts = Counter(pool.name for pool in self.pools)
        names = {id(pool): block for block, of_block in self.blocks.items() for pool in of_block}
        return {f"{p.name}, {names[id(p)]}" if counts[p.name] > 1 else p.name: p for p in self.pools}

    @cached_property
    def table(self) -> pd.DataFrame:
        """The main table of what was measured, next to what was published of it."""
        return with_published(main_table(self.pools))

    @cached_property
    def not_available(self) -> list[dict[str, str]]:
        """What its sweeps left out: model, bench, method, `why`."""
        return not_available(self.folder) if self.folder else []

    @cached_property
    def whole_table(self) -> pd.DataFrame:
        """The main table with a row for each method that a sweep left out."""
        return with_unavailable(self.table, self.not_available)

    @cached_property
    def missing(self) -> str:
        """What its last sweep has not finished, in words; empty if all is done."""
        return missing_jobs(self.folder) if self.folder else ""

    @cached_property
    def audits(self) -> list[Audit]:
        """Each configuration's answers next to vanilla's."""
        return audits(self.pools)
