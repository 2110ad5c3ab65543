"""The losslessness audit in words: is each method's output its baseline's, token by token?"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from ..statistics.audits import Audit, Turn, audits
from .facts import Configuration

BASES = ("vanilla", "hf")  # a configuration is compared with the first of these that ran


@dataclass(frozen=True)
class Finding:
    """An audit, with the names that the page has for the configuration and for its baseline."""

    name: str
    base: str
    audit: Audit

    @property
    def different(self) -> list[tuple[int, str, Turn]]:
        """Turns that differ: their place among all, where they are, in words, and themselves."""
        return [(i, _where(turn), turn) for i, turn in enumerate(self.audit.turns) if turn.parts is not None]

    def in_words(self) -> str:
        """Say how much of the output equals the baseline's."""
        audit = self.audit
        if not audit.turns:
            return "No turn can be compared: the records share none that has token ids."
        turns = f"{len(audit.turns):,} turn{'s' if len(audit.turns) > 1 else ''}"
        first = min(audit.partings, key=lambda turn: turn.parts or 0, default=None)
        if first is None:
            return f"All {turns} equal those of {self.base}, token for token ({audit.tokens:,} tokens)."
        tokens = [1 + (turn.parts or 0) for turn in audit.partings]
        share = 100 * audit.identical / len(audit.turns)
        return (
            f"{audit.identical:,} of {turns} ({share:.1f} %) equal those of {self.base}. The earliest difference is at "
            f"token {min(tokens)} ({_where(first)}), the median one at token {median(tokens):g}."
        )


def findings(ran: list[Configuration]) -> list[Finding]:
    """Audit each method against vanilla, and vanilla against hf, where they ran on the same model, bench and device."""
    names = {id(configuration.pool): configuration.name for configuration in ran}
    audited = audits([configuration.pool for configuration in ran], BASES)
    return [Finding(names[id(audit.pool)], names[id(audit.base)], audit) for audit in audited]


def _where(turn: Turn) -> str:
    return f"question {turn.question_id}, turn {turn.turn + 1}" + (f", answer {turn.choice + 1}" if turn.choice else "")
