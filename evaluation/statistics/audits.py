"""Is the output still the model's own? Each method against vanilla, turn by turn, from the records alone."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from model.files import write_text

from ..records.rows import Row, common_turns, diverge
from ..records.runs import Run, row_key
from .pools import Pool, pools
from .rendering import markdown, shown, write_csv
from .tables import baseline, identity

GAPS = "audit_gaps.json"
RULE = (
    "Verification accepts a draft token only if the target itself picks it (model/decoding/verification.py). "
    "This audit compares the recorded answers with vanilla's."
)
HF = "hf"  # transformers' own decoding
Gaps = dict[tuple[str, ...], float]


@dataclass(frozen=True)
class Turn:
    """A turn that a run and the baseline answered from the same prompt.

    Attributes:
        tokens: how long the baseline's answer is.
        parts: the first new token, from 0, in which the run's leaves it; None: in none.
    """

    run: Run
    question_id: Any
    choice: int
    turn: int
    tokens: int
    parts: int | None

    @property
    def key(self) -> tuple[str, ...]:
        """Where the two part, as the file of gaps has it."""
        return self.run.folder.name, *map(str, (self.question_id, self.choice, self.turn, self.parts))


@dataclass
class Audit:
    """A configuration, all its repeats, against its baseline.

    Attributes:
        left_out: turns behind one that differed: their prompts differ, so they say nothing.
    """

    pool: Pool
    base: Pool
    turns: list[Turn] = field(default_factory=list)
    left_out: int = 0

    @property
    def partings(self) -> list[Turn]:
        """The turns that differ."""
        return [turn for turn in self.turns if turn.parts is not None]

    @property
    def identical(self) -> int:
        return len(self.turns) - len(self.partings)

    @property
    def tokens(self) -> int:
        """The baseline's, in all turns."""
        return sum(turn.tokens for turn in self.turns)


def audits(pooled: Sequence[Pool], bases: Sequence[str] = ("vanilla",)) -> list[Audit]:
    """Audit every configuration against the first of these baselines that it has; the last of them is audited by none.

    An answer is compared with the same repeat's, where the baseline has the question there, else with any repeat's.
    Where tokens are drawn, transformers' own noise is another one: its answers are compared with none.
    """
    audited = []
    for pool in pooled:
        others = (baseline(pool, name, pooled) for name in bases if name != pool.label)
        base = next((base for base in others if base is not None), None)
        if base is not None and pool.label != bases[-1] and not (HF in (pool.label, base.label) and _drawn(pool)):
            audit = Audit(pool, base)
            for repeat, shards in pool.repeats.items():
                theirs = base.answers_to_compare(repeat)
                for run in shards:
                    for row in run.answers:
                        if row_key(row) in theirs:
                            _compare(audit, run, row, theirs[row_key(row)])
            audited.append(audit)
    return audited


def _drawn(pool: Pool) -> bool:
    return bool(pool.first.facets.get("temperature"))


def _compare(audit: Audit, run: Run, row: Row, theirs: Row) -> None:
    turns, left_out = common_turns(row, theirs)
    audit.left_out += left_out
    for index, turn, mine, base in turns:
        parts = None if mine == base else diverge(mine, base)
        audit.turns.append(Turn(run, row["question_id"], index, turn, len(base), parts))


def audit_table(runs: Sequence[Run], gaps: Gaps) -> pd.DataFrame:
    """Build one row a configuration, with the first difference and the largest gap at one, where gaps are known."""
    rows = []
    for audit in audits(pools(runs)):
        partings = audit.partings
        known = [gaps[turn.key] for turn in partings if turn.key in gaps]
        first = partings[0] if partings else None
        rows.append(
            identity(audit.pool)
            | {
                "turns": len(audit.turns),
                "identical_turns": audit.identical,
                "identical_share": audit.identical / len(audit.turns) if audit.turns else math.nan,
                "tokens": audit.tokens,
                "turns_left_out": audit.left_out,
                "first_difference_question": first.question_id if first else None,
                "first_difference_turn": first.turn if first else None,
                "first_difference_token": first.parts if first else None,
                "gaps_known": len(known),
                "largest_logit_gap": max(known, default=math.nan),
            }
        )
    return pd.DataFrame(rows)


def wording(table: pd.DataFrame, folder: Path) -> list[str]:
    """Say for each type how many turns equal vanilla's; float32 first, where every difference is a defect."""
    lines = []
    for dtype in ["float32", *sorted(set(table["dtype"]) - {"float32"})]:
        rows = table[table["dtype"] == dtype]
        turns, same = int(rows["turns"].sum()), int(rows["identical_turns"].sum())
        if not turns:
            if dtype == "float32":
                lines.append("Nothing was compared in float32.")
            continue
        configurations = f"{len(rows)} configuration{'s' if len(rows) > 1 else ''}"
        about = f"{configurations}, {int(rows['tokens'].sum()):,} tokens"
        if same == turns:
            lines.append(f"Lossless in {dtype}: all {turns:,} turns equal vanilla's, token for token ({about}).")
            continue
        known, apart = int(rows["gaps_known"].sum()), turns - same
        share = 100 * same / turns
        text = f"Not identical in {dtype}: {same:,} of {turns:,} turns ({share:.2f} %) equal vanilla's ({about})"
        if known == apart:
            gap = rows["largest_logit_gap"].max()
            text += f"; where a difference starts, the two largest logits are at most {gap:.3g} apart."
        else:
            text += (
                f"; this measures the logit gap at {apart - known} of {apart} differences: python -m evaluation.audit "
                f"{shlex.quote(str(folder))}"
            )
        lines.append(text)
    return lines


def write_audit(runs: Sequence[Run], folder: Path) -> list[str]:
    """Write tables/audit.csv and audit.md of a folder; returns the lines to print, none without vanilla."""
    table = audit_table(runs, read_gaps(folder))
    if table.empty:
        return []
    lines = wording(table, folder)
    target = folder / "tables"
    write_csv(target / "audit.csv", table)
    cells = ([shown(value, ".4g") for value in row] for row in table.itertuples(index=False))
    write_text(target / "audit.md", "\n\n".join(["# Audit", RULE, *lines, markdown(table.columns, cells)]) + "\n")
    return lines


def read_gaps(folder: Path) -> Gaps:
    """Read what the command has measured in this folder; nothing if it was not given yet."""
    try:
        entries = json.loads((folder / GAPS).read_text(encoding="utf-8"))
        return {tuple(entry["at"]): float(entry["gap"]) for entry in entries}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
