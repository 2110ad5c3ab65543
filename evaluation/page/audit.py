"""The losslessness audit: is each method's output its baseline's, token by token?"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from ..records.comparison import common_turns, diverge
from ..records.rows import Row
from ..records.runs import row_key
from ..statistics.pools import closest
from .circumstances import Configuration

REFERENCES = ("vanilla", "hf")  # the first that a run has at its side is what it is compared with


@dataclass(frozen=True)
class Turn:
    """A turn that two runs share: how long the reference's answer is, and where the other departs (None: nowhere)."""

    where: str
    tokens: int
    diverges: int | None


@dataclass(frozen=True)
class Audit:
    """A configuration, all its repeats, against its reference.

    Attributes:
        turns: those whose prompts are the same; `skipped` counts later turns behind an answer that differs.
    """

    name: str
    reference: str
    turns: list[Turn]
    skipped: int

    @property
    def same(self) -> int:
        return sum(turn.diverges is None for turn in self.turns)

    @property
    def different(self) -> list[tuple[int, Turn]]:
        """Turns that differ, with their place among all."""
        return [(i, turn) for i, turn in enumerate(self.turns) if turn.diverges is not None]

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    @property
    def first(self) -> Turn | None:
        """The turn that departs earliest."""
        return min((t for _, t in self.different), key=lambda t: t.diverges or 0, default=None)

    def in_words(self) -> str:
        """What was found, as a sentence."""
        if not self.turns:
            return "The records share no turn with token ids, so nothing can be said."
        turns = f"{len(self.turns):,} turn{'s' if len(self.turns) > 1 else ''}"
        if self.first is None:
            return f"All {turns} ({self.tokens:,} tokens) equal those of {self.reference}, token for token."
        share = 100 * self.same / len(self.turns)
        where = [turn.diverges or 0 for _, turn in self.different]
        return (
            f"{self.same:,} of {turns} ({share:.1f} %) equal those of {self.reference}; the earliest difference is at "
            f"token {min(where) + 1} ({self.first.where}), the median one at token {median(where) + 1:g}."
        )


def audit(ran: list[Configuration]) -> list[Audit]:
    """Each method against vanilla, and vanilla against hf, where they ran on the same model, bench and device."""
    found = []
    names = {id(c.pool): c.name for c in ran}
    for own in ran:
        if own.first.label == "hf":  # the last resort: nothing stands behind it
            continue
        others = [[c.pool for c in ran if c.first.label == name != own.first.label] for name in REFERENCES]
        reference = next((pool for pools in others if (pool := closest(own.pool, pools))), None)
        if reference is not None:
            found.append(Audit(own.name, names[id(reference)], *_compare(own.rows, reference.first_answers)))
    return found


def _compare(rows: list[Row], reference: list[Row]) -> tuple[list[Turn], int]:
    """The turns that can be compared, and how many later ones cannot."""
    theirs = {row_key(row): row for row in reference}
    turns: list[Turn] = []
    skipped = 0
    for row in rows:
        if row_key(row) not in theirs:
            continue
        common, left_out = common_turns(row, theirs[row_key(row)])
        skipped += left_out
        for choice, i, mine, base in common:
            where = f"question {row['question_id']}, turn {i + 1}" + (f", answer {choice + 1}" if choice else "")
            turns.append(Turn(where, len(base), None if mine == base else diverge(mine, base)))
    return turns, skipped
