"""Do two experiments agree? Token ids and accepted lengths of the same configurations, question by question.

Token ids must be the same in every turn: neither the machine nor a draft may change them. MATs agree if the 95 %
interval of their ratio holds 1, on the questions that both answered from the same state: with state kept between
prompts, those before which both were asked the same; with states saved from other questions, none. Accepted lengths
decide nothing where there is no interval (fewer than FEWEST questions) or the clock sizes drafts. Of runs with
different limits of new tokens the text is compared up to the smaller one, and no accepted lengths.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

from ..records.identity import NAMED
from ..records.rows import Row, common_turns, diverge
from .acceptance import LEARNT
from .experiment import Experiment
from .metrics import lengths_by_turn
from .pools import Pool, mat_ratio
from .published import default_settings
from .rendering import aligned, interval_text, shown

EQUAL, SIZES, WITHIN = "equal", "text equal, sizes differ", "text equal, lengths differ within the interval"
OPEN, APART, TEXT = "text equal, lengths not decided", "text equal, LENGTHS DIFFER", "ANOTHER TEXT"
CUT = "text equal up to the smaller limit"
WRONG = (APART, TEXT)
HOW = ("execution", "timed", "phases")  # facets that change neither text nor accepted lengths


@dataclass(frozen=True)
class Comparison:
    """A configuration here and there.

    Attributes:
        questions: how many both have answered; same_text, same_lengths: of these, in every turn and repeat; None: not
            compared.
        mats: here and there; ratio: of these, with its interval, on the questions that decide.
        first: where token ids differ first, or else accepted lengths; empty if nowhere.
    """

    name: str
    questions: int
    same_text: int
    same_lengths: int | None
    mats: list[float]
    ratio: tuple[float, float, float]
    verdict: str
    first: str


def compare(here: Experiment, there: Experiment) -> tuple[list[Comparison], list[str]]:
    """Compare configurations of the same settings, limit or label, in this order; return lines on the rest, too."""
    pools_here, pools_there, comparisons = list(here.pools), list(there.pools), []
    for key in (_settings, _any_limit, _label):
        for pool in list(pools_here):
            peers = [other for other in pools_there if key(other) == key(pool) and _common(pool, other)]
            twins = sum(key(other) == key(pool) for other in pools_here)
            if peers and (key is not _label or len(peers) == twins == 1):
                other = max(peers, key=lambda peer: len(_common(pool, peer)))
                comparisons.append(_compare(pool, other))
                pools_here.remove(pool)
                pools_there.remove(other)
    alone = [f"only here: {pool.name}" for pool in pools_here] + [f"only there: {pool.name}" for pool in pools_there]
    counts = [{key for pool in experiment.pools for key in pool.cells.questions} for experiment in (here, there)]
    alone += [f"questions: {len(counts[0])} here, {len(counts[1])} there"] if counts[0] != counts[1] else []
    return comparisons, alone


def _settings(pool: Pool) -> Any:
    today, recorded = default_settings(pool.method), pool.first.settings["method"].keys()  # some have gone since
    left_out = {*HOW, *(f"{p}{key}" for key in recorded - today.keys() - {*NAMED} if today for p in ("", "method_"))}
    facets = {key: value for key, value in pool.identity.facets.items() if key not in left_out and value is not None}
    return _label(pool), pool.group["dtype"], facets, pool.group["max_new_tokens"]


def _any_limit(pool: Pool) -> Any:
    return _settings(pool)[:-1]


def _label(pool: Pool) -> Any:
    return pool.group["model"], pool.group["bench"], pool.label


def _common(here: Pool, there: Pool) -> set[str]:
    return set(here.cells.questions) & set(there.cells.questions)


def _compare(here: Pool, there: Pool) -> Comparison:
    """Compare two configurations with questions in common, each repeat with the same one if it is there."""
    common, first = _common(here, there), dict[str, str]()
    limits = {pool.group["max_new_tokens"] for pool in (here, there)}
    most = min(limits) if len(limits) > 1 else None  # new tokens that both could have
    text, lengths = set[str](), set[str]()  # keys of questions in which these differ
    for repeat, rows in here.answers.items():
        others = there.answers_to_compare(repeat)
        for key in (key for key in rows if key in common):
            for kind, where in _differences(rows[key], others[key], most):
                (text if kind == "token ids" else lengths).add(key)
                first.setdefault(kind, f"{kind} differ first at {where}")
    decided = common
    methods = [pool.first.settings["method"] for pool in (here, there)]
    if any(method.get("start") not in (None, "cold") for method in methods):
        orders = [max(pool.answers.values(), key=len) for pool in (here, there)]
        decided = {a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*orders, strict=False))}
        if len({method.get("start_sha256") for method in methods}) > 1 and here.selection != there.selection:
            decided = set()  # the saved states are of other questions
    cells = [pool.cells.take(pool.cells.questions.isin(list(common))) for pool in (here, there)]
    deciding = decided if lengths & decided else common
    ratio, low, high = mat_ratio(*(c.take(c.questions.isin(list(deciding))) for c in cells))
    if text or not lengths:
        verdict = TEXT if text else EQUAL if most is None else CUT
    elif any(method.get("tree") == LEARNT for method in methods):
        verdict = SIZES
    elif not lengths & decided or (ratio != 1.0 and math.isnan(low)):
        verdict = OPEN
    else:
        verdict = WITHIN if ratio == 1.0 or low <= 1.0 <= high else APART
    mats = [float(tokens.sum() / steps.sum()) for tokens, steps in (c.mean_counts() for c in cells)]
    same = (len(common) - len(text), len(common) - len(lengths) if most is None else None)
    where = first.get("token ids") or first.get("accepted lengths", "")
    return Comparison(here.name, len(common), *same, mats, (ratio, low, high), verdict, where)


def _differences(here: Row, there: Row, most: int | None) -> Iterator[tuple[str, str]]:
    """Yield where the turns of two answers differ, in token ids or accepted lengths; numbers count from 1.

    Args:
        most: compare so many tokens of turns that were answered from the same prompt, and no lengths; None: everything.
    """
    if most is not None:
        for _, turn, ids, other_ids in common_turns(here, there)[0]:
            if ids[:most] != other_ids[:most]:
                place = diverge(ids, other_ids) + 1
                yield "token ids", f"question {here['question_id']}, turn {turn + 1}, token {place}"
        return
    turns, other_turns = _turns(here), _turns(there)
    if len(turns) != len(other_turns):
        yield "token ids", f"question {here['question_id']}: {len(turns)} turns here, {len(other_turns)} there"
    pairs = zip(turns, other_turns, strict=False)
    for turn, ((lengths, ids), (other_lengths, other_ids)) in enumerate(pairs, start=1):
        where = f"question {here['question_id']}, turn {turn}"
        if ids != other_ids:
            yield "token ids", f"{where}, step {bisect_right(list(accumulate(lengths)), diverge(ids, other_ids)) + 1}"
        if lengths != other_lengths:
            yield "accepted lengths", f"{where}, step {diverge(lengths, other_lengths) + 1}"


def _turns(row: Row) -> list[tuple[list[int], list[int]]]:
    """Return each turn's accepted lengths and token ids, over all choices."""
    choices = row["choices"]
    return [turn for c in choices for turn in zip(lengths_by_turn(c), c.get("output_ids") or [], strict=False)]


def lines(comparisons: Sequence[Comparison]) -> list[str]:
    """Word the comparison: a table, then where configurations differ first."""
    rows = [["method", "questions", "same text", "same lengths", "mat", "mat there", "ratio"]]
    for c in comparisons:
        interval = f" {interval_text(*c.ratio[1:])}" if math.isfinite(c.ratio[1]) else ""
        counts = (shown(count) for count in (c.questions, c.same_text, c.same_lengths))
        rows.append([c.name, *counts, *(f"{mat:.2f}" for mat in c.mats), f"{c.ratio[0]:.3f}{interval}"])
    verdicts = ["", *(f"  {c.verdict}" for c in comparisons)]
    table = [row + verdict for row, verdict in zip(aligned(rows), verdicts, strict=True)]
    return table + [f"{c.name}: {c.first}" for c in comparisons if c.first]


def summary(comparisons: Sequence[Comparison]) -> str:
    """Say in one line how far two experiments agree."""
    verdicts: dict[str, list[str]] = {EQUAL: []}
    for c in comparisons:
        verdicts.setdefault(c.verdict, []).append(c.name)
    questions = " or ".join(map(str, sorted({c.questions for c in comparisons})))
    equal = f"token ids and accepted lengths equal in {len(verdicts.pop(EQUAL))} of {len(comparisons)}"
    others = (f"{verdict}: {', '.join(names)}" for verdict, names in verdicts.items())
    return "; ".join([f"{equal} configurations on {questions} questions", *others])
