"""Is the output still the model's own? Each method against vanilla, turn by turn, from the records alone."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from model.files import write_text

from ..records.comparison import common_turns, diverge
from ..records.rows import Row
from ..records.runs import Run, row_key
from .pools import Pool, pools
from .tables import baseline

GAPS = "audit_gaps.json"


Gaps = dict[tuple[str, ...], float]


@dataclass(frozen=True)
class Parting:
    """Where an answer leaves vanilla's: question, choice and turn, and the first new token that differs, from 0."""

    question_id: Any
    choice: int
    turn: int
    token: int

    def key(self, run: Run) -> tuple[str, ...]:
        return run.folder.name, *map(str, (self.question_id, self.choice, self.turn, self.token))


@dataclass
class Audit:
    """A configuration against vanilla.

    Attributes:
        turns, identical: turns that both answered from the same prompt, and those with the same tokens.
        tokens: vanilla's tokens in these turns.
        left_out: turns behind one that differed: their prompts differ, so they say nothing.
        partings: of each run, where its answers leave vanilla's.
    """

    pool: Pool
    turns: int = 0
    identical: int = 0
    tokens: int = 0
    left_out: int = 0
    partings: list[tuple[Run, Parting]] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.identical / self.turns if self.turns else math.nan


def audits(runs: Sequence[Run]) -> list[Audit]:
    """Every configuration whose folder has a vanilla run of the same model, bench and device, against it."""
    pooled = pools(runs)
    found = []
    for pool in pooled:
        base = baseline(pool, "vanilla", pooled)
        if base is not None and pool.label != "vanilla":
            any_of_theirs = {key: row for answers in reversed(base.answers.values()) for key, row in answers.items()}
            audit = Audit(pool)
            for repeat, shards in pool.repeats.items():
                theirs = any_of_theirs | base.answers.get(repeat, {})  # the same repeat's, where it has the question
                for run in shards:
                    for row in run.answers:
                        if row_key(row) in theirs:
                            _compare(audit, run, row, theirs[row_key(row)])
            found.append(audit)
    return found


def _compare(audit: Audit, run: Run, row: Row, theirs: Row) -> None:
    turns, left_out = common_turns(row, theirs)
    audit.left_out += left_out
    for index, turn, mine, base in turns:
        audit.turns += 1
        audit.tokens += len(base)
        if mine == base:
            audit.identical += 1
        else:
            audit.partings.append((run, Parting(row["question_id"], index, turn, diverge(mine, base))))


def audit_table(runs: Sequence[Run], gaps: Gaps) -> pd.DataFrame:
    """One row a configuration; the first parting and the largest gap at one, where gaps are known."""
    rows = []
    for audit in audits(runs):
        settings = audit.pool.first.settings
        known = [gaps[parting.key(run)] for run, parting in audit.partings if parting.key(run) in gaps]
        first = audit.partings[0][1] if audit.partings else None
        rows.append(
            {
                "model": settings["model"]["name"],
                "dtype": settings["model"]["dtype"],
                "bench": settings["bench"]["name"],
                "bench_questions": audit.pool.questions,
                "method": audit.pool.label,
                "variant": audit.pool.variant,
                "turns": audit.turns,
                "identical_turns": audit.identical,
                "identical_share": audit.share,
                "tokens": audit.tokens,
                "turns_left_out": audit.left_out,
                "first_difference_question": first.question_id if first else None,
                "first_difference_turn": first.turn if first else None,
                "first_difference_token": first.token if first else None,
                "gaps_known": len(known),
                "largest_logit_gap": max(known, default=math.nan),
            }
        )
    return pd.DataFrame(rows)


def wording(table: pd.DataFrame, folder: Path) -> list[str]:
    """The claim in its three layers: the rule, the implementation in float32, what happens in other types."""
    lines = [
        "The rule is exact: a drafted token stands only where it is the token that the target itself picks "
        "(greedy; model/decoding/verification.py)."
    ]
    for dtype in ["float32", *sorted(set(table["dtype"]) - {"float32"})]:
        own = table[table["dtype"] == dtype]
        turns, same = int(own["turns"].sum()), int(own["identical_turns"].sum())
        if not turns:
            if dtype == "float32":
                lines.append("The implementation in float32: not measured in this folder.")
            continue
        about = f"{int(own['tokens'].sum())} tokens in {turns} turns of {len(own)} configuration(s)"
        if same == turns:
            exact = "The implementation is exact in float32" if dtype == "float32" else f"In {dtype} all is identical"
            lines.append(f"{exact} on {about}: every turn equals vanilla's.")
            continue
        known, apart = int(own["gaps_known"].sum()), turns - same
        text = f"In {dtype} {100 * same / turns:.2f} % of the turns equal vanilla's ({about})"
        if known == apart:
            text += (
                f", and every difference starts at a top-2 logit gap of at most {own['largest_logit_gap'].max():.3g}."
            )
        else:
            text += (
                f"; the gap at {apart - known} of {apart} differences is not known: python -m evaluation.audit {folder}"
            )
        lines.append(text)
    return lines


def write_audit(runs: Sequence[Run], folder: Path) -> list[str]:
    """Write tables/audit.csv and audit.md of an experiment's folder; returns the wording, nothing without vanilla."""
    table = audit_table(runs, read_gaps(folder))
    if table.empty:
        return []
    lines = wording(table, folder)
    target = folder / "tables"
    write_text(target / "audit.csv", table.to_csv(index=False))
    head = "| " + " | ".join(table.columns) + " |\n|" + "---|" * len(table.columns)
    body = "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in table.itertuples(index=False))
    write_text(target / "audit.md", "\n\n".join(["# Audit", *lines, f"{head}\n{body}"]) + "\n")
    return lines


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read_gaps(folder: Path) -> Gaps:
    """What the command has measured in this folder; nothing if it was not given yet."""
    try:
        found = json.loads((folder / GAPS).read_text(encoding="utf-8"))
        return {tuple(entry["at"]): float(entry["gap"]) for entry in found}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
