"""The runs that are reported together, and what reports need of them, each computed once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import pandas as pd

from ..records.runs import Run, read_runs
from ..records.store import missing_jobs, not_available
from ..statistics.agreement import Audit, audits
from ..statistics.pools import Pool, pools
from ..statistics.published import with_published
from .tables import main_table


class Experiment:
    """Runs in the tables' order.

    Args:
        folder: None for runs from elsewhere, whose sweeps are not known.
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
        return pools(self.runs)

    @cached_property
    def table(self) -> pd.DataFrame:
        """The main table, with published figures."""
        return with_published(main_table(self.pools))

    @cached_property
    def not_available(self) -> list[str]:
        """What its sweeps left out and never measured, with reasons."""
        if self.folder is None:
            return []
        ran = set()
        lines = []
        for pool in self.pools:
            ran.add((pool.block["model"], pool.block["bench"], pool.method))
        for job in not_available(self.folder):
            if (job["model"], job["bench"], job["method"]) not in ran:
                lines.append("not available: {method} of {model} on {bench}: {why}".format(**job))
        return lines

    @cached_property
    def missing(self) -> str:
        """The jobs that its last sweep has not finished; empty if all are done."""
        return missing_jobs(self.folder) if self.folder else ""

    @cached_property
    def audits(self) -> list[Audit]:
        return audits(self.pools)
