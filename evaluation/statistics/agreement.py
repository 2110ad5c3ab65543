"""Do two experiments agree? Token ids and accepted lengths of the same configurations, question by question.

Token ids must be the same in every turn: neither the machine nor a draft may change them. MATs agree if the 95 % interval
of their ratio holds 1, on the questions that both answered from the same state: with state kept between prompts, those
before which both were asked the same. Drafts sized by the clock have accepted lengths that decide nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

from ..records.rows import Row, diverge
from ..records.runs import Run
from .acceptance import LEARNT
from .pools import Pool, mat_ratio, pools
from .view import aligned, interval_text

EQUAL, SIZES, WITHIN = "equal", "text equal, sizes differ", "text equal, lengths differ within the interval"
OPEN, APART, TEXT = "text equal, lengths not decided", "text equal, LENGTHS DIFFER", "ANOTHER TEXT"
STATELESS = (None, "cold")  # starts without state of earlier prompts
HOW = ("execution", "timed", "phases")  # facets that change neither text nor accepted lengths


@dataclass(frozen=True)
class Comparison:
    """A configuration here and there, on the questions that both have answered.

    Attributes:
        questions: in common, here and there; same_text, same_lengths: of those in common, in every turn and repeat.
        mats: here and there; ratio: theirs with its interval, on the questions that decide.
        first: where token ids differ first, or else accepted lengths; empty if nowhere.
    """

    name: str
    questions: tuple[int, int, int]
    same_text: int
    same_lengths: int
    mats: tuple[float, float]
    ratio: tuple[float, float, float]
    verdict: str
    first: str


@dataclass(frozen=True)
class Agreement:
    """Two experiments: what both have, and the names of what only one has."""

    comparisons: list[Comparison]
    only_here: list[str]
    only_there: list[str]

    @property
    def agrees(self) -> bool:
        return not any(comparison.verdict in (APART, TEXT) for comparison in self.comparisons)

    @property
    def all_equal(self) -> bool:
        return all(comparison.verdict == EQUAL for comparison in self.comparisons)


def compare(here: Sequence[Run], there: Sequence[Run]) -> Agreement:
    """Compare two experiments: configurations of the same settings, then what is alone of its label on both sides."""
    mine, theirs = pools(here), pools(there)
    blocks = {_block(pool) for pool in (*mine, *theirs)}
    comparisons = []
    for key in (_identity, _label):
        for pool in list(mine):
            peers = [other for other in theirs if key(other) == key(pool) and _common(pool, other)]
            if peers and (key is _identity or len(peers) == [key(p) for p in mine].count(key(pool)) == 1):
                other = max(peers, key=lambda peer: len(_common(pool, peer)))
                name = f"{pool.name} ({', '.join(_block(pool))})" if len(blocks) > 1 else pool.name
                comparisons.append(_compare(name, pool, other))
                mine.remove(pool)
                theirs.remove(other)
    return Agreement(comparisons, [pool.name for pool in mine], [pool.name for pool in theirs])


def _block(pool: Pool) -> tuple[str, ...]:
    return tuple(str(pool.group[key]) for key in ("model", "dtype", "bench", "max_new_tokens"))


def _identity(pool: Pool) -> Any:
    facets = {key: value for key, value in pool.first.facets.items() if key not in HOW and value is not None}
    return _block(pool), pool.label, facets


def _label(pool: Pool) -> Any:
    return pool.group["model"], pool.group["bench"], pool.label


def _common(here: Pool, there: Pool) -> list[str]:
    return [key for key in here.cells.questions if key in there.cells.questions]


def _compare(name: str, here: Pool, there: Pool) -> Comparison:
    """Compare two configurations with questions in common, each repeat with the same one there, if it is there."""
    common, first = set(_common(here, there)), {}
    differ: dict[str, set[str]] = {"text": set(), "lengths": set()}
    for repeat, rows in here.answers.items():
        others = there.answers_to_compare(repeat)
        for key in (key for key in rows if key in common):
            for kind, where in _differences(rows[key], others[key]):
                differ[kind].add(key)
                first.setdefault(kind, f"{kind} differ{'s' * (kind == 'text')} first at {where}")
    decided = common
    if any(pool.first.settings["method"].get("start") not in STATELESS for pool in (here, there)):
        orders = [max(pool.answers.values(), key=len) for pool in (here, there)]
        decided = {a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*orders, strict=False))}
    cells = [pool.cells.take(pool.cells.questions.isin(list(common))) for pool in (here, there)]
    deciding = [c.take(c.questions.isin(list(decided & differ["lengths"] and decided or common))) for c in cells]
    ratio, low, high = mat_ratio(*deciding)
    if differ["text"]:
        verdict = TEXT
    elif not differ["lengths"]:
        verdict = EQUAL
    elif any(pool.first.settings["method"].get("tree") in LEARNT for pool in (here, there)):
        verdict = SIZES
    elif not differ["lengths"] & decided:
        verdict = OPEN
    else:
        verdict = WITHIN if ratio == 1.0 or low <= 1.0 <= high else APART
    counts = len(common), len(here.cells.questions), len(there.cells.questions)
    mats = [float(tokens.sum() / steps.sum()) for tokens, steps in (c.mean_counts() for c in cells)]
    where = first.get("text") or first.get("lengths", "")
    same = [len(common) - len(differ[kind]) for kind in ("text", "lengths")]
    return Comparison(name, counts, same[0], same[1], (mats[0], mats[1]), (ratio, low, high), verdict, where)


def _differences(here: Row, there: Row) -> Iterator[tuple[str, str]]:
    """Yield where two answers differ in a turn, in text or lengths; turns, steps and tokens count from 1."""
    mine, theirs = ([turn for choice in row["choices"] for turn in _turns(choice)] for row in (here, there))
    if len(mine) != len(theirs):
        yield "text", f"question {here['question_id']}: {len(mine)} turns here and {len(theirs)} there"
    for turn, ((lengths, ids), (other_lengths, other_ids)) in enumerate(zip(mine, theirs, strict=False), start=1):
        where = f"question {here['question_id']}, turn {turn}"
        if ids != other_ids:
            token = diverge(ids, other_ids)
            yield "text", f"{where}, step {bisect_right(list(accumulate(lengths)), token) + 1}, token {token + 1}"
        if lengths != other_lengths:
            step = diverge(lengths, other_lengths)
            counts = [str(n[step]) if step < len(n) else "none" for n in (lengths, other_lengths)]
            yield "lengths", f"{where}, step {step + 1}: {' here and '.join(counts)} there"


def _turns(choice: Row) -> Iterator[tuple[list[int], list[int]]]:
    """Yield each turn's accepted lengths and token ids."""
    ends = list(accumulate(choice["decoding_steps"]))
    for start, end, ids in zip([0, *ends], ends, choice["output_ids"], strict=False):
        yield choice["accept_lengths"][start:end], ids


def lines(agreement: Agreement) -> list[str]:
    """Word the comparison: a table, where configurations differ first, and what only one side has."""
    head = ["method", "questions", "same text", "same lengths", "mat", "mat there", "ratio"]
    rows = [
        [c.name, str(c.questions[0]), str(c.same_text), str(c.same_lengths), *(f"{mat:.2f}" for mat in c.mats), _ratio(c)]
        for c in agreement.comparisons
    ]
    table = aligned([head, *rows])
    out = [table[0], *(f"{row}  {c.verdict}" for row, c in zip(table[1:], agreement.comparisons, strict=True))]
    out += [f"{c.name}: {c.first}" for c in agreement.comparisons if c.first]
    if any(len(set(c.questions)) > 1 for c in agreement.comparisons):
        out.append("not all questions are on both sides; compared are those that are")
    only = (("here", agreement.only_here), ("there", agreement.only_there))
    return out + [f"only {where}: {'; '.join(names)}" for where, names in only if names]


def _ratio(c: Comparison) -> str:
    ratio, low, high = c.ratio
    return f"{ratio:.3f}" + (f" {interval_text(low, high)}" if math.isfinite(low) else "")


def summary(agreement: Agreement) -> str:
    """Say in one line how far two experiments agree."""
    verdicts: dict[str, list[str]] = {EQUAL: []}
    for c in agreement.comparisons:
        verdicts.setdefault(c.verdict, []).append(c.name)
    counts = sorted({c.questions[0] for c in agreement.comparisons})
    questions = f"{counts[0]} questions" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} questions"
    equal = f"token ids and accepted lengths equal in {len(verdicts.pop(EQUAL))} of {len(agreement.comparisons)}"
    others = (f"{verdict}: {', '.join(names)}" for verdict, names in verdicts.items())
    return "; ".join([f"{equal} configurations on {questions}", *others])
