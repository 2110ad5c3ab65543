"""Compare answers: each method's with vanilla's by turn, two experiments' by question.

Audit: is the output still the model's own? Token ids are compared in the turns that both answered
from the same prompt.

Two experiments: token ids must be equal in every turn, as neither the machine nor a draft may
change them. Accepted lengths may differ: with the state kept between prompts, the sizes that step
times choose, other settings. The ratio of the MATs and its interval say by how much. Of runs with
different limits of new tokens, only the text is compared, up to the smaller limit. Another
processor rounds 16-bit numbers in its own way, and so does a server: another text is named.
"""

from __future__ import annotations

import json
import math
import shlex
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from ..records.rows import Row
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
IDS = "token ids"
STEPS = "accepted lengths"


class SharedTurn(NamedTuple):
    """A turn that two rows answered from the same prompt."""

    choice: int
    turn: int
    ids: list[int]
    other_ids: list[int]


def common_turns(one: Row, other: Row) -> tuple[list[SharedTurn], int]:
    """Return the turns that two rows answered from the same prompt, and how many are left out.

    Left out are the turns after an answer that differs, as their prompts differ, too; those that
    one row lacks; and those in which neither row has a token.
    """
    turns = []
    pairs = zip(one["choices"], other["choices"], strict=False)

    for index, (choice, other_choice) in enumerate(pairs):
        answers = zip(
            choice.get("output_ids") or [],
            other_choice.get("output_ids") or [],
            strict=False,
        )
        for turn, (ids, other_ids) in enumerate(answers):
            if ids or other_ids:
                turns.append(SharedTurn(index, turn, ids, other_ids))
            if ids != other_ids:
                break

    most = max(_number_of_turns(one), _number_of_turns(other))
    return turns, most - len(turns)


def _number_of_turns(row: Row) -> int:
    return sum(len(choice["turns"]) for choice in row["choices"])


def diverge(a: Any, b: Any) -> int:
    """Return the first index at which two sequences differ."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


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
        place = (self.question_id, self.choice, self.turn, self.differs_at)
        return self.run.folder.name, *map(str, place)

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

    # turns after one that differed, as their prompts differ; turns with no token ids on one side
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
    """Audit each configuration against the first of these baselines that it has.

    The last baseline is not audited. A batch is compared with the baseline's answers of batch 1, if
    there are any; so are the baseline's own batches. An answer is compared with that of the same
    repeat if the baseline has it, else with any repeat's. With sampling, hf is left out, as
    transformers draws its own noise.
    """
    audited = []
    for pool in pooled:
        base = _audit_base(pool, bases)
        if base is not None:
            audited.append(_audit(pool, base))
    return audited


def _audit_base(pool: Pool, bases: Sequence[str]) -> Pool | None:
    """Return the configuration to audit this one against; None if it is not audited."""
    if pool.first.is_served:
        return None  # audited separately (evaluation.audit), as its arithmetic differs
    batched = pool.first.facets["batch"] > 1
    if pool.label == bases[-1] and not batched:
        return None

    candidates = [pool.baselines[name] for name in bases if name != pool.label]
    if batched:
        candidates = [pool.closest(name, batch=1) for name in bases] + candidates
    base = next(filter(None, candidates), None)
    if base is None:
        return None

    samples = bool(pool.first.facets.get("temperature"))
    return None if samples and "hf" in (pool.method, base.method) else base


def _audit(pool: Pool, base: Pool) -> Audit:
    audit = Audit(pool, base)
    for repeat, shards in pool.repeats.items():
        base_rows = base.answers_to_compare(repeat)
        for run in shards:
            for row in run.answers:
                base_row = base_rows.get(row_key(row), {"choices": []})
                turns, left_out = common_turns(row, base_row)
                audit.left_out += left_out
                audit.turns += [_audited_turn(run, row, shared) for shared in turns]
    return audit


def _audited_turn(run: Run, row: Row, shared: SharedTurn) -> Turn:
    differs_at = None
    if shared.ids != shared.other_ids:
        differs_at = diverge(shared.ids, shared.other_ids)
    tokens = len(shared.other_ids)
    return Turn(run, row["question_id"], shared.choice, shared.turn, tokens, differs_at)


def audit_table(audited: Sequence[Audit], gaps: Gaps) -> pd.DataFrame:
    """Build a row for each configuration.

    It holds the first difference and, where known, the largest logit gap.
    """
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
        rows.append(identity(audit.pool) | counts)

    return pd.DataFrame(rows)


def wording(table: pd.DataFrame, folder: Path) -> list[str]:
    """Say for each type how many turns equal vanilla's.

    float32 comes first: there, every difference is a defect.
    """
    lines = []
    for dtype in ["float32", *sorted(set(table["dtype"]) - {"float32"})]:
        rows = table[table["dtype"] == dtype]
        if rows["turns"].sum():
            lines.append(_dtype_wording(dtype, rows, folder))
        elif dtype == "float32":
            lines.append("Nothing was compared in float32.")
    return lines


def _dtype_wording(dtype: str, rows: pd.DataFrame, folder: Path) -> str:
    """Say how many turns of the configurations of one type equal vanilla's."""
    turns = int(rows["turns"].sum())
    same = int(rows["identical_turns"].sum())
    different = turns - same
    configurations = f"{len(rows)} configuration{'s' if len(rows) > 1 else ''}"
    about = f"({configurations}, {int(rows['tokens'].sum()):,} tokens)"

    if not different:
        left_out = int(rows["turns_left_out"].sum())
        left = f"; {left_out:,} turns are not compared" if left_out else ""
        equal = f"all {turns:,} turns equal vanilla's, token for token"
        return f"Lossless in {dtype}: {equal} {about}{left}."

    share = f"{same:,} of {turns:,} turns ({100 * same / turns:.2f} %) equal vanilla's {about}"
    unknown = different - int(rows["gaps_known"].sum())
    if unknown:
        command = f"python -m evaluation.audit {shlex.quote(str(folder))}"
        gaps = f"this measures the logit gap at {unknown} of {different} differences: {command}"
    else:
        largest = f"{rows['largest_logit_gap'].max():.3g}"
        gaps = f"where a difference starts, the two largest logits are at most {largest} apart."
    return f"Not identical in {dtype}: {share}; {gaps}"


def read_gaps(folder: Path) -> Gaps:
    """Read the gaps that evaluation.audit has measured in this folder; empty if it has not run."""
    try:
        entries = json.loads((folder / GAPS).read_text(encoding="utf-8"))
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
    """Compare configurations paired by all settings, by all but the limit, or by label.

    Also describe what has no counterpart.
    """
    pools_here = list(here)
    pools_there = list(there)
    keys = {id(pool): _keys(pool) for pool in (*here, *there)}
    comparisons = []

    for level in range(3):
        for pool in list(pools_here):
            key = keys[id(pool)][level]
            twins = [other for other in pools_here if keys[id(other)][level] == key]
            peers = [other for other in pools_there if keys[id(other)][level] == key]
            peers = [other for other in peers if _common(pool, other)]

            unique = len(peers) == len(twins) == 1
            by_label = level == 2
            if not peers or (by_label and not unique):
                continue

            closest = max(peers, key=lambda peer: len(_common(pool, peer)))
            comparisons.append(_compare(pool, closest))
            pools_here.remove(pool)
            pools_there.remove(closest)

    alone = [f"only here: {pool.name}" for pool in pools_here]
    alone += [f"only there: {pool.name}" for pool in pools_there]

    questions_here = _questions(here)
    questions_there = _questions(there)
    if questions_here != questions_there:
        alone.append(f"questions: {len(questions_here)} here, {len(questions_there)} there")
    return comparisons, alone


def _keys(pool: Pool) -> tuple[Any, Any, Any]:
    """Return the keys that pair a configuration.

    They are: all settings, all but the limit of new tokens, the label.
    """
    facets = pool.first.facets.items()
    told = {key: value for key, value in facets if key not in HOW and value is not None}

    label = (pool.group["model"], pool.group["bench"], pool.label)
    settings = (label, pool.group["dtype"], told)
    everything = (*settings, pool.group["max_new_tokens"])
    return everything, settings, label


def _questions(pooled: Sequence[Pool]) -> set[str]:
    """Return the keys of all questions that were answered."""
    return set[str]().union(*(pool.cells.questions for pool in pooled))


def _common(here: Pool, there: Pool) -> set[str]:
    return set(here.cells.questions) & set(there.cells.questions)


def _compare(here: Pool, there: Pool) -> Comparison:
    """Compare two configurations with questions in common.

    Each repeat is compared with the same repeat if the other has it.
    """
    common = _common(here, there)
    limits = {pool.group["max_new_tokens"] for pool in (here, there)}
    most = min(limits) if len(limits) > 1 else None  # new tokens that both could have

    differing = {IDS: set[str](), STEPS: set[str]()}  # the keys of the questions that differ
    first = {IDS: "", STEPS: ""}  # where, in words
    for repeat, rows in here.answers.items():
        others = there.answers_to_compare(repeat)
        for key in filter(common.__contains__, rows):
            for kind, where in _differences(rows[key], others[key], most):
                differing[kind].add(key)
                first[kind] = first[kind] or f"{kind} differ first at {where}"

    if differing[IDS]:
        verdict = TEXT if _promised(here) and _promised(there) else ROUNDED
    elif most is not None:
        verdict = CUT
    else:
        verdict = LENGTHS if differing[STEPS] else EQUAL

    counts = mat_counts(here.cells, there.cells)
    return Comparison(
        name=here.name,
        questions=len(common),
        same_text=len(common) - len(differing[IDS]),
        same_lengths=len(common) - len(differing[STEPS]) if most is None else None,
        mats=[quotient(*counts[:2]), quotient(*counts[2:])],
        ratio=mat_ratio(here.cells, there.cells),
        verdict=verdict,
        first=first[IDS] or first[STEPS],
    )


def _promised(pool: Pool) -> bool:
    """Return whether every machine gives the same text, by this engine in float32."""
    if pool.first.is_served or pool.group["dtype"] != "float32":
        return False
    # hf samples by the device's generator
    return pool.label != "hf" or not pool.first.facets["temperature"]


def _lengths_and_ids(row: Row) -> list[tuple[list[int], list[int]]]:
    """Return each turn's accepted lengths and token ids."""
    turns: list[tuple[list[int], list[int]]] = []
    for choice in row["choices"]:
        turns += zip(lengths_by_turn(choice), choice.get("output_ids") or [], strict=False)
    return turns


def _differences(here: Row, there: Row, most: int | None) -> Iterator[tuple[str, str]]:
    """Yield where the turns of two answers differ: IDS or STEPS, and the place.

    Numbers count from 1.

    Args:
        most: compare only this many tokens, in turns answered from the same prompt, and no lengths;
            None: everything.
    """
    question = f"question {here['question_id']}"

    if most is not None:
        for shared in common_turns(here, there)[0]:
            if shared.ids[:most] != shared.other_ids[:most]:
                token = diverge(shared.ids, shared.other_ids) + 1
                yield IDS, f"{question}, turn {shared.turn + 1}, token {token}"
        return

    turns = _lengths_and_ids(here)
    other_turns = _lengths_and_ids(there)
    if len(turns) != len(other_turns):
        yield IDS, f"{question}: {len(turns)} turns here, {len(other_turns)} there"

    pairs = zip(turns, other_turns, strict=False)
    for turn, ((lengths, ids), (other_lengths, other_ids)) in enumerate(pairs, start=1):
        where = f"{question}, turn {turn}"
        if ids != other_ids:
            ends = list(accumulate(lengths))
            step = bisect_right(ends, diverge(ids, other_ids)) + 1
            yield IDS, f"{where}, step {step}"
        if lengths != other_lengths:
            yield STEPS, f"{where}, step {diverge(lengths, other_lengths) + 1}"
