"""Is the output still the model's own? Each method against vanilla, turn by turn, from the records alone."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from ..records.rows import common_turns, diverge, parsed
from ..records.runs import Run, row_key
from .pools import Pool
from .tables import identity

GAPS = "audit_gaps.json"
Gaps = dict[tuple[str, ...], float]


@dataclass(frozen=True)
class Turn:
    """A turn that a run and the baseline answered from the same prompt.

    Attributes:
        tokens: how long the baseline's answer is.
        differs_at: the first new token, from 0, in which the run's differs from it; None: in none.
    """

    run: Run
    question_id: Any
    choice: int
    turn: int
    tokens: int
    differs_at: int | None

    @property
    def key(self) -> tuple[str, ...]:
        """Where the two differ, as the file of gaps has it."""
        return self.run.folder.name, *map(str, (self.question_id, self.choice, self.turn, self.differs_at))

    @property
    def where(self) -> str:
        place = f"question {self.question_id}, turn {self.turn + 1}"
        return f"{place}, answer {self.choice + 1}" if self.choice else place


@dataclass
class Audit:
    """A configuration, all its repeats, against its baseline.

    Attributes:
        left_out: turns behind one that differed, whose prompts differ, and those of which one side has no token ids.
    """

    pool: Pool
    base: Pool
    turns: list[Turn] = field(default_factory=list)
    left_out: int = 0

    @property
    def different(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.differs_at is not None]

    @property
    def identical(self) -> int:
        return len(self.turns) - len(self.different)

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
        base = next((base for name in bases if name != pool.label and (base := pool.baselines[name])), None)
        if base is None or pool.label == bases[-1]:
            continue
        if pool.identity.facets.get("temperature") and "hf" in (pool.label, base.label):
            continue
        audit = Audit(pool, base)
        for repeat, shards in pool.repeats.items():
            base_rows = base.answers_to_compare(repeat)
            for run, row in ((shard, row) for shard in shards for row in shard.answers):
                turns, left_out = common_turns(row, base_rows.get(row_key(row), {"choices": []}))
                audit.left_out += left_out
                for choice, turn, ids, base_ids in turns:
                    differs_at = None if ids == base_ids else diverge(ids, base_ids)
                    audit.turns.append(Turn(run, row["question_id"], choice, turn, len(base_ids), differs_at))
        audited.append(audit)
    return audited


def audit_table(audited: Sequence[Audit], gaps: Gaps) -> pd.DataFrame:
    """Build one row a configuration, with the first difference and the largest gap at one, where gaps are known."""
    rows = []
    for audit in audited:
        measured = [gaps[turn.key] for turn in audit.different if turn.key in gaps]
        first = next(iter(audit.different), None)
        rows.append(
            identity(audit.pool)
            | {
                "turns": len(audit.turns),
                "identical_turns": audit.identical,
                "identical_share": audit.identical / len(audit.turns) if audit.turns else math.nan,
                "tokens": audit.tokens,
                "turns_left_out": audit.left_out,
                "first_difference_question": first and first.question_id,
                "first_difference_turn": first and first.turn,
                "first_difference_token": first and first.differs_at,
                "gaps_known": len(measured),
                "largest_logit_gap": max(measured, default=math.nan),
            }
        )
    return pd.DataFrame(rows)


def wording(table: pd.DataFrame, folder: Path) -> list[str]:
    """Say for each type how many turns equal vanilla's; float32 first, where every difference is a defect."""
    lines = []
    for dtype in ["float32", *sorted(set(table["dtype"]) - {"float32"})]:
        rows = table[table["dtype"] == dtype]
        turns, same = int(rows["turns"].sum()), int(rows["identical_turns"].sum())
        about = f"({len(rows)} configuration{'s' if len(rows) > 1 else ''}, {int(rows['tokens'].sum()):,} tokens)"
        measured, different = int(rows["gaps_known"].sum()), turns - same
        if not turns:
            lines += ["Nothing was compared in float32."] if dtype == "float32" else []
        elif not different:
            left = f"; {left_out:,} turns are not compared" if (left_out := int(rows["turns_left_out"].sum())) else ""
            lines.append(f"Lossless in {dtype}: all {turns:,} turns equal vanilla's, token for token {about}{left}.")
        else:
            largest = f"{rows['largest_logit_gap'].max():.3g}"
            gap = f"where a difference starts, the two largest logits are at most {largest} apart."
            command = f"python -m evaluation.audit {shlex.quote(str(folder))}"
            ask = f"this measures the logit gap at {different - measured} of {different} differences: {command}"
            share = f"{same:,} of {turns:,} turns ({100 * same / turns:.2f} %) equal vanilla's {about}"
            lines.append(f"Not identical in {dtype}: {share}; {gap if measured == different else ask}")
    return lines


def read_gaps(folder: Path) -> Gaps:
    """Read what the command has measured in this folder; nothing if it was not given yet."""
    try:
        entries = parsed((folder / GAPS).read_text(encoding="utf-8"))
        return {tuple(map(str, entry["at"])): float(entry["gap"]) for entry in entries}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
