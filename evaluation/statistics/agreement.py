"""Audit: each method's token ids are compared with vanilla's, turn by turn."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from ..records.rows import Row
from ..records.runs import STOCK, Run, row_key
from .pools import Pool

GAPS = "audit_gaps.json"
Gaps = dict[tuple[str, ...], float]
EQUAL = "equal"
LENGTHS = "text equal, lengths differ"
TEXT = "ANOTHER TEXT"
HOW = ("execution", "timed", "phases")  # facets that change neither text nor accepted lengths


def diverge(a: Any, b: Any) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class Turn:
    """A turn that a run and the baseline answered from the same prompt."""

    run: Run
    question_id: Any
    choice: int
    turn: int
    tokens: int  # of the baseline's answer
    differs_at: int | None  # index of the first new token that differs, from 0; None if none does

    @property
    def key(self) -> tuple[str, ...]:
        place = (self.question_id, self.choice, self.turn, self.differs_at)
        return self.run.folder.name, *map(str, place)

    @property
    def where(self) -> str:
        place = f"question {self.question_id}, turn {self.turn + 1}"
        return f"{place}, answer {self.choice + 1}" if self.choice else place


@dataclass
class Audit:
    pool: Pool
    base: Pool
    turns: list[Turn] = field(default_factory=list)

    # turns of other prompts, as after one that differed; turns with no token ids on one side
    left_out: int = 0

    @property
    def different(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.differs_at is not None]

    @property
    def identical(self) -> int:
        return len(self.turns) - len(self.different)

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)


def audits(pooled: Sequence[Pool]) -> list[Audit]:
    """Audit each configuration against vanilla, if it has such a baseline.

    An answer is compared with that of the same repeat if there is one. With sampling, hf is left
    out, as transformers draws its own noise.
    """
    pairs = ((pool, _audit_base(pool)) for pool in pooled)
    return [_audit(pool, base) for pool, base in pairs if base and base is not pool]


def _audit_base(pool: Pool) -> Pool | None:
    """Return the configuration to audit this one against, of batch 1 if there is one; or None."""
    facets = pool.first.facets
    if pool.first.is_served:
        return None  # audited separately (evaluation.audit), as its arithmetic differs
    if facets["temperature"] and pool.method in STOCK:
        return None

    base = pool.baselines["vanilla"]
    if facets["batch"] > 1:
        base = pool.closest("vanilla", batch=1) or base
    return base


def _audit(pool: Pool, base: Pool) -> Audit:
    audit = Audit(pool, base)
    for repeat, shards in pool.repeats.items():
        base_rows = base.answers_to_compare(repeat)
        for run in shards:
            for row in run.answers:
                base_row = base_rows.get(row_key(row), {"choices": []})
                turns = common_turns(run, row, base_row)
                most = max(_count(row), _count(base_row))
                audit.turns += turns
                audit.left_out += most - len(turns)

    return audit


def _count(row: Row) -> int:
    return sum(len(choice["turns"]) for choice in row["choices"])


def common_turns(run: Run, row: Row, base: Row) -> list[Turn]:
    """Return the turns that a run's row and its baseline's answered from the same prompt."""
    turns = []
    for number, pair in enumerate(zip(row["choices"], base["choices"], strict=False)):
        answers = zip(*(choice.get("output_ids") or [] for choice in pair), strict=False)
        hashes = [choice.get("prompt_sha256") for choice in pair]
        for turn, (ids, base_ids) in enumerate(answers):
            if all(hashes) and hashes[0][turn] != hashes[1][turn]:
                break
            differs_at = None if ids == base_ids else diverge(ids, base_ids)
            if ids or base_ids:
                turns.append(
                    Turn(
                        run,
                        question_id=row["question_id"],
                        choice=number,
                        turn=turn,
                        tokens=len(base_ids),
                        differs_at=differs_at,
                    )
                )

            if differs_at is not None:
                break

    return turns


def audit_table(audited: Sequence[Audit], gaps: Gaps) -> pd.DataFrame:
    """Build a row for each configuration: its first difference and largest logit gap, if known."""
    rows = []
    for audit in audited:
        measured = [gaps[turn.key] for turn in audit.different if turn.key in gaps]
        first = next(iter(audit.different), None)

        counts = {
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
        rows.append(audit.pool.columns | counts)

    return pd.DataFrame(rows)


def wording(table: pd.DataFrame, folder: Path) -> list[str]:
    lines = []
    for dtype, rows in table.groupby("dtype", sort=False):
        total = rows.sum(numeric_only=True).astype(int)
        turns = total["turns"]
        different = turns - total["identical_turns"]
        unknown = different - total["gaps_known"]

        equal = f"{turns - different:,} of {turns:,}" if different else f"all {turns:,}"
        text = f"{equal} turns equal vanilla's, token for token"
        text += f" ({len(rows)} configuration{'s' * (len(rows) > 1)}, {total['tokens']:,} tokens)"
        left_out = f"{total['turns_left_out']:,} turns are"
        if total["turns_left_out"]:
            text += f"; {left_out} not compared"

        if not turns:
            lines.append(f"Nothing was compared in {dtype}; {left_out} left out.")
        elif not different:
            lines.append(f"Lossless in {dtype}: {text}.")
        else:
            largest = f"{rows['largest_logit_gap'].max():.3g}"
            gaps = f"where a difference starts, two largest logits are at most {largest} apart."
            if unknown:
                command = f"python -m evaluation.audit {shlex.quote(str(folder))}"
                gaps = f"this measures the logit gap at {unknown} of {different}: {command}"
            lines.append(f"Not identical in {dtype}: {text}; {gaps}")

    return lines


def read_gaps(folder: Path) -> Gaps:
    """Read the gaps that evaluation.audit has measured in this folder; empty if it has not run."""
    file = folder / GAPS
    if not file.exists():
        return {}
    entries = json.loads(file.read_text(encoding="utf-8"))
    return {tuple(map(str, entry["at"])): entry["gap"] for entry in entries}


def compared(here: Sequence[Pool], there: Sequence[Pool]) -> dict[str, list[str]]:
    """Compare the configurations that two experiments share; return their names by verdict.

    First repeats are compared, on common questions that had the same first prompt.
    """
    others = {_identity(pool): pool for pool in there}
    verdicts: dict[str, list[str]] = {}
    for pool in here:
        other = others.get(_identity(pool))
        if other is None:
            continue
        keys = pool.cells.questions[pool.cells.matched(other.cells) >= 0]
        answers = pool.first_answers
        peers = other.first_answers
        common = [(answers[key], peers[key]) for key in keys if key in answers and key in peers]
        if common:
            verdict = EQUAL if _agree(common, "accept_lengths") else LENGTHS
            verdict = verdict if _agree(common, "output_ids") else TEXT
            verdicts.setdefault(verdict, []).append(pool.name)
    return verdicts


def _agree(pairs: Sequence[tuple[Row, Row]], key: str) -> bool:
    choices = chain.from_iterable(
        zip(row["choices"], peer["choices"], strict=False) for row, peer in pairs
    )
    return all(choice.get(key) == peer.get(key) for choice, peer in choices)


def _identity(pool: Pool) -> str:
    """Return what configurations of two experiments must share; not the machine."""
    # a setting that is off may be in no record
    facets = {key: value for key, value in pool.first.facets.items() if value and key not in HOW}
    block = [pool.block[name] for name in ("model", "dtype", "bench", "max_new_tokens")]
    return json.dumps([block, pool.label, facets], sort_keys=True)
