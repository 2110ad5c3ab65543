"""How steps were taken, for the heads of tables: a speedup hangs on the execution of the method and of its baseline."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ..records.runs import GENERATE
from .pools import Pool, closest
from .tables import BASELINES, KIND, alike, baseline


def executions(table: pd.DataFrame) -> list[str]:
    """This engine's, by the rows of the main table; each once."""
    known = table["execution"].dropna() if "execution" in table else pd.Series(dtype=str)
    return [name for name in known.unique() if name not in ("", GENERATE)]


def in_words(table: pd.DataFrame) -> list[str]:
    """For above a table, one line: the execution of all rows, or that they have several and which are compared."""
    own = executions(table)
    if not own:
        return []
    parts = [f"execution: {own[0]}" if len(own) == 1 else "execution: see its column"]
    if len(own) > 1 and _compared(table, "vanilla"):
        parts.append("speedup_vanilla is over vanilla in the row's own execution")
    if (table["method"] == "hf").any():
        over = ", so speedup_hf is over another execution" if _compared(table, "hf") else ""
        parts.append(f"hf is transformers' own generate{over}")
    return ["; ".join(parts)]


def _compared(table: pd.DataFrame, name: str) -> bool:
    column = f"speedup_{name}"
    return column in table and bool(table.loc[table["method"] != name, column].notna().any())


def not_compared(pooled: Sequence[Pool]) -> list[str]:
    """What has no speedup over vanilla, as vanilla ran in another execution only; a line for those of the same."""
    held: dict[tuple[str, str], list[str]] = {}
    for pool in pooled:
        if pool.label in BASELINES or baseline(pool, "vanilla", pooled) is not None:
            continue
        others = [p for p in pooled if p.label == "vanilla" and alike(p, pool, set(KIND) - {"execution"})]
        if other := closest(pool, others):
            held.setdefault((pool.first.execution, other.first.execution), []).append(pool.name)
    return [
        f"no speedup over vanilla, which ran {theirs} while these ran {own}: {'; '.join(names)}"
        for (own, theirs), names in held.items()
    ]
