"""Compare answers: each method's with vanilla's, turn by turn, and two experiments', question by
question.

Audit: is the output still the model's own? Token ids are compared in the turns that both answered
from the same prompt.

Two experiments: token ids must be equal in every turn, as neither the machine nor a draft may
change them. Accepted
lengths may differ: with the state kept between prompts, the sizes that step times choose, other
settings. The ratio of
the MATs and its interval say by how much. Of runs with different limits of new tokens, only the
text is compared, up to the smaller limit. Another processor rounds 16-bit numbers in its own way,
and so does a server: another text is named.
"""

from __future__ import annotations

import math
import shlex
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas as pd

from ..records.rows import Row, parsed
from ..records.runs import Run, row_key
from .intervals import quotient
from .metrics import lengths_by_turn
from .pools import Pool, mat_counts, mat_ratio
from .tables import identity

GAPS = "audit_gaps.json"
Gaps = dict[tuple[str, ...], float]
EQUAL = "equal"
LENGTHS = "text equal, lengths differ"
TEXT = "ANOTHER TEXT"
CUT = "text equal up to the smaller limit"
ROUNDED = "another text, as 16 bits may give"  # or a server, or hf with sampling
HOW = ("execution", "timed", "phases")  # facets that change neither text nor accepted lengths


def common_turns(one: Row, other: Row) -> tuple[list[tuple[int, int, list[int], list[int]]], int]:
    """Return the turns answered from the same prompt: choice, turn, token ids of the one and of the
    other.

    Also return how many turns are left out: those after an answer that differs, as their prompts
    differ, too; those
    that one row lacks; and those in which neither row has a token.
    """
    turns = []
    for index, choices in enumerate(zip(one["choices"], other["choices"], strict=False)):
        pairs = list(zip(*(choice.get("output_ids") or [] for choice in choices), strict=False))
        same = next((turn for turn, (a, b) in enumerate(pairs) if a != b), len(pairs))
        turns += [(index, turn, a, b) for turn, (a, b) in enumerate(pairs[: same + 1]) if a or b]
    most = max(sum(len(choice["turns"]) for choice in row["choices"]) for row in (one, other))
    return turns, most - len(turns)


def diverge(a: Any, b: Any) -> int:
    """Return the first index at which two sequences differ."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


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
        """The turn and its first difference, as in the file of gaps."""
        return self.run.folder.name, *map(
            str, (self.question_id, self.choice, self.turn, self.differs_at)
        )

    @property
    def where(self) -> str:
        place = f"question {self.question_id}, turn {self.turn + 1}"
        return f"{place}, answer {self.choice + 1}" if self.choice else place


@dataclass
class Audit:
    """A configuration's turns, of all repeats, compared with its baseline's."""

    pool: Pool
    base: Pool
    turns: list[Turn] = field(default_factory=list)
    # turns after one that differed, as their prompts differ, and turns with no token ids on one
    # side
    left_out: int = 0

    @property
    def different(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.differs_at is not None]

    @property
    def identical(self) -> int:
        return len(self.turns) - len(self.different)

    @property
    def tokens(self) -> int:
        """The baseline's tokens, in all turns."""
        return sum(turn.tokens for turn in self.turns)


def audits(pooled: Sequence[Pool], bases: Sequence[str] = ("vanilla",)) -> list[Audit]:
    """Audit each configuration against the first of these baselines that it has; the last baseline
    is not audited.

    A batch is compared with the baseline's answers of batch 1, if there are any; so are the
    baseline's own batches. An answer is compared with that of the same repeat if the baseline has
    it, else with any repeat's. With sampling, hf is left out, as transformers draws its own noise.
    """
    audited = []
    for pool in pooled:
        # audited separately (evaluation.audit), as its arithmetic differs
        if pool.identity.is_served:
            continue
        batched = pool.identity.facets["batch"] > 1
        alone = (pool.closest(name, batch=1) if batched else None for name in bases)
        own = (None if name == pool.label else pool.baselines[name] for name in bases)
        base = next((base for base in (*alone, *own) if base is not None), None)
        if base is None or (pool.label == bases[-1] and not batched):
            continue
        if pool.identity.facets.get("temperature") and "hf" in (pool.method, base.method):
            continue
        audit = Audit(pool, base)
        for repeat, shards in pool.repeats.items():
            base_rows = base.answers_to_compare(repeat)
            for run, row in ((shard, row) for shard in shards for row in shard.answers):
                turns, left_out = common_turns(row, base_rows.get(row_key(row), {"choices": []}))
                audit.left_out += left_out
                for choice, turn, ids, base_ids in turns:
                    differs_at = None if ids == base_ids else diverge(ids, base_ids)
                    audit.turns.append(
                        Turn(run, row["question_id"], choice, turn, len(base_ids), differs_at)
                    )
        audited.append(audit)
    return audited


def audit_table(audited: Sequence[Audit], gaps: Gaps) -> pd.DataFrame:
    """Build a row for each configuration, with its first difference and, where known, its largest
    logit gap.
    """
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
    """Say for each type how many turns equal vanilla's; float32 first, where every difference is a
    defect.
    """
    lines = []
    for dtype in ["float32", *sorted(set(table["dtype"]) - {"float32"})]:
        rows = table[table["dtype"] == dtype]
        turns = int(rows["turns"].sum())
        same = int(rows["identical_turns"].sum())
        about = (
            f"({len(rows)} configuration{'s' if len(rows) > 1 else ''},"
            f" {int(rows['tokens'].sum()):,} tokens)"
        )
        measured = int(rows["gaps_known"].sum())
        different = turns - same
        if not turns:
            lines += ["Nothing was compared in float32."] if dtype == "float32" else []
        elif not different:
            left = (
                f"; {left_out:,} turns are not compared"
                if (left_out := int(rows["turns_left_out"].sum()))
                else ""
            )
            lines.append(
                f"Lossless in {dtype}: all {turns:,} turns equal vanilla's, token for token"
                f" {about}{left}."
            )
        else:
            largest = f"{rows['largest_logit_gap'].max():.3g}"
            gap = f"where a difference starts, the two largest logits are at most {largest} apart."
            command = f"python -m evaluation.audit {shlex.quote(str(folder))}"
            ask = (
                f"this measures the logit gap at {different - measured} of {different} differences:"
                f" {command}"
            )
            share = (
                f"{same:,} of {turns:,} turns ({100 * same / turns:.2f} %) equal vanilla's {about}"
            )
            lines.append(
                f"Not identical in {dtype}: {share}; {gap if measured == different else ask}"
            )
    return lines


def read_gaps(folder: Path) -> Gaps:
    """Read the gaps that evaluation.audit has measured in this folder; empty if it has not run."""
    try:
        entries = parsed((folder / GAPS).read_text(encoding="utf-8"))
        return {tuple(map(str, entry["at"])): float(entry["gap"]) for entry in entries}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


@dataclass(frozen=True)
class Comparison:
    """A configuration of one experiment (here), compared with that of the other (there)."""

    name: str
    questions: int  # number that both have answered
    same_text: int  # number of these with the same text in every turn and repeat
    same_lengths: int | None  # number with the same accepted lengths; None: not compared
    mats: list[float]  # here and there
    ratio: tuple[float, float, float]  # ratio of the MATs with its interval
    verdict: str
    first: str  # where token ids, or else accepted lengths, first differ; empty if nowhere


def compare(here: Sequence[Pool], there: Sequence[Pool]) -> tuple[list[Comparison], list[str]]:
    """Compare configurations paired by all settings, by all but the limit, or by label; also
    describe the rest.
    """
    pools_here = list(here)
    pools_there = list(there)
    comparisons = []
    keys = {id(pool): _keys(pool) for pool in (*here, *there)}
    for i in range(3):
        for pool in list(pools_here):
            key = keys[id(pool)][i]
            peers = [
                other for other in pools_there if keys[id(other)][i] == key and _common(pool, other)
            ]
            twins = sum(keys[id(other)][i] == key for other in pools_here)
            # by the label alone only where it is unique
            if peers and (i < 2 or len(peers) == twins == 1):
                other = max(peers, key=lambda peer: len(_common(pool, peer)))
                comparisons.append(_compare(pool, other))
                pools_here.remove(pool)
                pools_there.remove(other)
    alone = [f"only here: {pool.name}" for pool in pools_here] + [
        f"only there: {pool.name}" for pool in pools_there
    ]
    counts = [{key for pool in side for key in pool.cells.questions} for side in (here, there)]
    alone += (
        [f"questions: {len(counts[0])} here, {len(counts[1])} there"]
        if counts[0] != counts[1]
        else []
    )
    return comparisons, alone


def _keys(pool: Pool) -> tuple[Any, Any, Any]:
    """Return the keys that pair a configuration: all settings, all but the limit of new tokens, the
    label.
    """
    facets = {
        key: value
        for key, value in pool.identity.facets.items()
        if key not in HOW and value is not None
    }
    label = pool.group["model"], pool.group["bench"], pool.label
    settings = label, pool.group["dtype"], facets
    return (*settings, pool.group["max_new_tokens"]), settings, label


def _common(here: Pool, there: Pool) -> set[str]:
    return set(here.cells.questions) & set(there.cells.questions)


def _compare(here: Pool, there: Pool) -> Comparison:
    """Compare two configurations with questions in common, each repeat with the same one if it is
    there.
    """
    common = _common(here, there)
    first = dict[str, str]()
    limits = {pool.group["max_new_tokens"] for pool in (here, there)}
    most = min(limits) if len(limits) > 1 else None  # new tokens that both could have
    # keys of questions in which these differ
    text = set[str]()
    lengths = set[str]()
    for repeat, rows in here.answers.items():
        others = there.answers_to_compare(repeat)
        for key in (key for key in rows if key in common):
            for kind, where in _differences(rows[key], others[key], most):
                (text if kind == "token ids" else lengths).add(key)
                first.setdefault(kind, f"{kind} differ first at {where}")
    if text:
        verdict = TEXT if _promised(here) and _promised(there) else ROUNDED
    elif most is not None:
        verdict = CUT
    else:
        verdict = LENGTHS if lengths else EQUAL
    counts = mat_counts(here.cells, there.cells)
    mats = [quotient(*counts[:2]), quotient(*counts[2:])]
    same = (len(common) - len(text), len(common) - len(lengths) if most is None else None)
    where = first.get("token ids") or first.get("accepted lengths", "")
    ratio = mat_ratio(here.cells, there.cells)
    return Comparison(here.name, len(common), *same, mats, ratio, verdict, where)


def _promised(pool: Pool) -> bool:
    """Return whether every machine gives the same text, by this engine in float32."""
    drawn = pool.label == "hf" and pool.identity.facets["temperature"]  # by the device's generator
    return not (pool.identity.is_served or drawn or pool.group["dtype"] != "float32")


def _differences(here: Row, there: Row, most: int | None) -> Iterator[tuple[str, str]]:
    """Yield where the turns of two answers differ, in token ids or accepted lengths; numbers count
    from 1.

    Args:
        most: compare only this many tokens, in turns answered from the same prompt, and no lengths;
            None: everything.
    """
    if most is not None:
        for _, turn, ids, other_ids in common_turns(here, there)[0]:
            if ids[:most] != other_ids[:most]:
                place = diverge(ids, other_ids) + 1
                yield "token ids", f"question {here['question_id']}, turn {turn + 1}, token {place}"
        return
    # accepted lengths and token ids
    turns, other_turns = (
        [
            turn
            for c in row["choices"]
            for turn in zip(lengths_by_turn(c), c.get("output_ids") or [], strict=False)
        ]
        for row in (here, there)
    )
    if len(turns) != len(other_turns):
        yield (
            "token ids",
            f"question {here['question_id']}: {len(turns)} turns here, {len(other_turns)} there",
        )
    pairs = zip(turns, other_turns, strict=False)
    for turn, ((lengths, ids), (other_lengths, other_ids)) in enumerate(pairs, start=1):
        where = f"question {here['question_id']}, turn {turn}"
        if ids != other_ids:
            yield (
                "token ids",
                (
                    f"{where}, step"
                    f" {bisect_right(list(accumulate(lengths)), diverge(ids, other_ids)) + 1}"
                ),
            )
        if lengths != other_lengths:
            yield "accepted lengths", f"{where}, step {diverge(lengths, other_lengths) + 1}"
