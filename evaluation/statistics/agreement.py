"""Do two experiments agree? Configurations of the same settings next to each other, question by question.

Accepted lengths do not depend on the machine, so the runs may be of different ones; times are shown and decide nothing.
Two configurations disagree if the 95 % interval of the ratio of their MATs, paired by question, leaves out 1. Questions
decide where both were answered from the same state: with state kept between prompts, behind the same questions. A tree
that follows the machine's step times decides nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..records.compact import without_folders
from ..records.provenance import flat
from ..records.questions import subtask
from ..records.rows import Row, diverge
from ..records.runs import Run, row_key
from .acceptance import LEARNT
from .pools import Cells, Pool, mat_ratio, paired, pools
from .rendering import aligned
from .tables import baseline, speedup

EQUAL, WITHIN, APART, OPEN = "equal", "within interval", "apart", "not decided"
STATELESS, CATEGORY = (None, "cold"), "category"  # starts: without state, and state kept within a subtask
# Settings that two runs of one configuration may differ in: how much was run, and the machine's, which may be a reason.
EXTENT = {"schema", "repeat", "timed", "phases", "bench.questions", "bench.ids_sha256"}
NO_REASON = {"model.path", "model.context", "model.processes", "model.allow_pickle", "model.trust_remote_code"}
MACHINE = NO_REASON | {
    *("model.revision", "model.dtype", "model.device", "model.device_map", "model.tensor_parallel"),
    *("model.attention", "model.linear", "execution"),
}


@dataclass
class Difference:
    """How far the answers of two configurations are the same; turns, steps and tokens count from 1.

    Attributes:
        equal: by question, whether accepted lengths are equal in every repeat.
        turns: compared in all repeats; same_text: those of the same token ids.
        lengths: where accepted lengths differ first, in words; empty if nowhere.
        text: where the text differs first; empty if nowhere.
    """

    equal: dict[str, bool] = field(default_factory=dict)
    turns: int = 0
    same_text: int = 0
    lengths: str = ""
    text: str = ""

    def add(self, key: str, here: Row, there: Row) -> None:
        """Compare two answers to a question."""
        shapes = [[len(_turns(choice)) for choice in row["choices"]] for row in (here, there)]
        self.equal[key] = self.equal.get(key, True) and shapes[0] == shapes[1]
        for choice, other in zip(here["choices"], there["choices"], strict=False):
            parted = ""
            for turn, (mine, theirs) in enumerate(zip(_turns(choice), _turns(other), strict=False), start=1):
                where = f"question {here['question_id']}, turn {turn}"
                where += f", answer {choice['index'] + 1}" if choice.get("index") else ""
                self.turns += 1
                (lengths, ids), (other_lengths, other_ids) = mine, theirs
                same = ids == other_ids
                self.same_text += same
                token = len(ids) if same else diverge(ids, other_ids)
                if lengths != other_lengths:
                    self.equal[key] = False
                    step = diverge(lengths, other_lengths)
                    pair = [part[step : step + 1] for part in (lengths, other_lengths)]
                    until = sum(lengths[:step]) + max(map(sum, pair))
                    text = parted or ("on the same text" if same or token >= until else f"text differs at {token + 1}")
                    counts = " and ".join(str(n[0]) if n else "no step" for n in pair)
                    self.lengths = self.lengths or f"{where}, step {step + 1}: {counts}, {text}"
                if not same:
                    self.text = self.text or f"{where}, token {token + 1}"
                    parted = parted or "behind a turn whose text differs"


def _turns(choice: Row) -> list[tuple[list[int], list[int]]]:
    """Return each turn's accepted lengths and token ids."""
    lengths, start, turns = choice.get("accept_lengths") or [], 0, []
    for steps, ids in zip(choice["decoding_steps"], choice["output_ids"], strict=True):
        turns.append((lengths[start : start + steps], ids))
        start += steps
    return turns


@dataclass(frozen=True)
class Comparison:
    """A configuration here and there, on the questions that both have answered.

    Attributes:
        mats: here and there.
        decided: the questions that decide.
        ratio, low, high: of the MATs on these; on all where they are equal on these.
        reasons: what the records hold that may be why they differ.
        speedups: over vanilla, here and there; NaN where one was not timed.
    """

    name: str
    here: Pool
    there: Pool
    difference: Difference
    mats: tuple[float, float]
    decided: list[str]
    ratio: float
    low: float
    high: float
    reasons: list[str]
    speedups: tuple[float, float]

    @property
    def questions(self) -> int:
        return len(self.difference.equal)

    @property
    def equal(self) -> int:
        return sum(self.difference.equal.values())

    @property
    def turns_alike(self) -> tuple[int, int]:
        """How many turns have the same token ids, and how many there are."""
        return self.difference.same_text, self.difference.turns

    @property
    def verdict(self) -> str:
        if self.equal == self.questions:
            return EQUAL
        if all(self.difference.equal[key] for key in self.decided):
            return OPEN
        if math.isnan(self.low):  # one question has no interval
            return WITHIN if self.ratio == 1.0 else APART
        return WITHIN if self.low <= 1.0 <= self.high else APART


@dataclass(frozen=True)
class Agreement:
    """Two experiments: what both have, and the names of what only one has.

    Attributes:
        questions: how many there are here, there and in both.
    """

    comparisons: list[Comparison]
    only_here: list[str]
    only_there: list[str]
    questions: tuple[int, int, int]

    @property
    def agrees(self) -> bool:
        return all(comparison.verdict != APART for comparison in self.comparisons)

    @property
    def all_equal(self) -> bool:
        return all(comparison.verdict == EQUAL for comparison in self.comparisons)

    def of(self, verdict: str) -> list[str]:
        """Return the names of the configurations with this verdict."""
        return [comparison.name for comparison in self.comparisons if comparison.verdict == verdict]


def compare(here: Sequence[Run], there: Sequence[Run]) -> Agreement:
    """Compare two experiments, configuration by configuration."""
    mine, theirs = pools(here), pools(there)
    names = dict(zip(map(id, (*mine, *theirs)), (*_names(mine), *_names(theirs)), strict=True))
    compared = (_compare(names[id(a)], a, b, mine, theirs) for a, b in _pairs(mine, theirs))
    comparisons = [comparison for comparison in compared if comparison is not None]
    both = {id(pool) for c in comparisons for pool in (c.here, c.there)}
    asked = [{key for pool in side for key in pool.cells.questions} for side in (mine, theirs)]
    return Agreement(
        comparisons,
        [names[id(pool)] for pool in mine if id(pool) not in both],
        [names[id(pool)] for pool in theirs if id(pool) not in both],
        (len(asked[0]), len(asked[1]), len(asked[0] & asked[1])),
    )


def _pairs(mine: Sequence[Pool], theirs: Sequence[Pool]) -> Iterator[tuple[Pool, Pool]]:
    """Yield pairs of the same settings; of the rest, those whose label only one has on either side.

    The second kind differs in a setting, such as another tree: that is then a reason.
    """
    left, alone = list(theirs), []
    identities = {id(pool): _identity(pool.first) for pool in (*mine, *theirs)}
    for pool in mine:
        same = [other for other in left if identities[id(other)] == identities[id(pool)]]
        best = max(same, key=lambda other: _likeness(pool, other), default=None)
        if best is None:
            alone.append(pool)
        else:
            left.remove(best)
            yield pool, best
    labels = [_label(pool) for pool in alone]
    for pool in alone:
        found = [other for other in left if _label(other) == _label(pool)]
        if labels.count(_label(pool)) == len(found) == 1:
            yield pool, found[0]


def _names(pooled: Sequence[Pool]) -> list[str]:
    """Name each configuration, with its block where several have one of that name."""
    names = [pool.name for pool in pooled]
    blocks = [", ".join(str(p.group[key]) for key in ("model", "dtype", "bench", "max_new_tokens")) for p in pooled]
    return [f"{name} ({block})" if names.count(name) > 1 else name for name, block in zip(names, blocks, strict=True)]


def _label(pool: Pool) -> tuple[str, ...]:
    return str(pool.group["model"]), str(pool.group["bench"]), pool.label


def _settings(run: Run) -> dict[str, str]:
    """Return by name what decides the answers, as JSON."""
    found = {key: json.dumps(without_folders(value), sort_keys=True) for key, value in flat(run.settings)}
    return {key: value for key, value in found.items() if key not in EXTENT and value != "{}"}


def _identity(run: Run) -> dict[str, str]:
    """Return the settings that the same configuration has on any machine, digests of files left out."""
    files = ("model.files", "sha256")
    return {k: v for k, v in _settings(run).items() if k not in MACHINE and not any(word in k for word in files)}


def _likeness(pool: Pool, other: Pool) -> tuple[int, int]:
    """Return how many settings are the same, and how many questions."""
    mine, theirs = _settings(pool.first), _settings(other.first)
    common = sum(other.cells.questions.get_indexer(pool.cells.questions) >= 0)
    return sum(theirs.get(key) == value for key, value in mine.items()), int(common)


def _compare(name: str, here: Pool, there: Pool, mine: Sequence[Pool], theirs: Sequence[Pool]) -> Comparison | None:
    """Compare two configurations; None if they have no question in common."""
    common = [key for key in here.cells.questions if key in there.cells.questions]
    if not common:
        return None
    difference = Difference()
    for repeat, rows in here.answers.items():
        others = there.answers_to_compare(repeat)
        for key in common:
            if key in rows:
                difference.add(key, rows[key], others[key])
    states, more = [_states(pool) for pool in (here, there)], []
    decided = [key for key in common if states[0][key] == states[1][key]]
    if len(decided) < len(common):
        more.append(f"state is kept between prompts, and behind other questions in {len(common) - len(decided)}")
    if any(pool.first.settings["method"].get("tree") == LEARNT for pool in (here, there)):
        decided, more = [], ["the tree follows the machine's step times", *more]
    basis = common if all(difference.equal[key] for key in decided) else decided
    ratio, low, high = mat_ratio(_only(here, basis), _only(there, basis))
    mats = [_mat(_only(pool, common)) for pool in (here, there)]
    speedups = [_speedup(pool, side, common) for pool, side in ((here, mine), (there, theirs))]
    return Comparison(
        name=name,
        here=here,
        there=there,
        difference=difference,
        mats=(mats[0], mats[1]),
        decided=decided,
        ratio=ratio,
        low=low,
        high=high,
        reasons=more + _reasons(here.first, there.first),
        speedups=(speedups[0], speedups[1]),
    )


def _states(pool: Pool) -> dict[str, str]:
    """Return by question a mark of the questions that were answered before it, in the first repeat that has it."""
    states: dict[str, str] = {}
    for run in pool.runs:
        start, before, last = run.settings["method"].get("start"), "", ""
        for row in run.answers:
            now = subtask(str(row.get("category")))
            before = "" if start in STATELESS or (start == CATEGORY and now != last) else before
            states.setdefault(row_key(row), before)
            before, last = hashlib.sha256(f"{before} {row_key(row)}".encode()).hexdigest(), now
    return states


def _only(pool: Pool, questions: Sequence[str]) -> Cells:
    return pool.cells.take(pool.cells.questions.isin(questions))


def _mat(cells: Cells) -> float:
    tokens, steps = cells.mean_counts()
    return float(tokens.sum() / steps.sum()) if steps.sum() else math.nan


def _speedup(pool: Pool, side: Sequence[Pool], questions: Sequence[str]) -> float:
    """Return the speedup over vanilla on these questions; NaN where there is none, or no time."""
    base = baseline(pool, "vanilla", side)
    if base is None or not pool.first.settings.get("timed", True):
        return math.nan
    cells, theirs = paired(_only(pool, questions), base.cells)
    return speedup(cells.mean_speed(), theirs.mean_speed())


def _reasons(here: Run, there: Run) -> list[str]:
    """Name what differs between two runs that may change accepted lengths or the text."""
    mine, theirs = ({k: v for k, v in _settings(run).items() if k not in NO_REASON} for run in (here, there))
    words = [
        f"other {key.removeprefix('model.files.').removesuffix('_sha256').removesuffix('.sha256').split('.')[-1]}"
        if "model.files" in key or key.endswith("sha256")
        else f"{key} is {_short(mine.get(key))} here and {_short(theirs.get(key))} there"
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key)
    ]
    if here.metadata.get("draft_tree") != there.metadata.get("draft_tree"):
        words.append("another draft tree")
    if here.metadata.get("template_sha256") != there.metadata.get("template_sha256"):
        words.append("another prompt template")
    now, then = (dict(flat(run.metadata.get("circumstances") or {})) for run in (here, there))
    for key in ("device", "linear", "threads", "versions.torch", "versions.transformers"):
        if now.get(key) != then.get(key):
            words.append(f"{key} is {now.get(key)} here and {then.get(key)} there")
    if now.get("sources_sha256") != then.get("sources_sha256"):
        words.append("other code")
    return list(dict.fromkeys(words))


def _short(value: str | None) -> str:
    text = "not set" if value is None else value.strip('"')
    return text if len(text) <= 40 else f"{text[:37]}..."


def lines(agreement: Agreement) -> list[str]:
    """Word the comparison: a table, a line for each configuration that differs, and what only one side has."""
    head = ["method", "questions", "equal", "mat", "mat_there", "ratio", "same_text", "speedup", "speedup_there", ""]
    cells = [head] + [
        [
            *(c.name, str(c.questions), str(c.equal), f"{c.mats[0]:.2f}", f"{c.mats[1]:.2f}", _ratio(c)),
            *("{}/{}".format(*c.turns_alike), _number(c.speedups[0]), _number(c.speedups[1])),
            c.verdict,
        ]
        for c in agreement.comparisons
    ]
    figures = aligned([row[:-1] for row in cells])
    out = [f"{line}  {row[-1]}".rstrip() for line, row in zip(figures, cells, strict=True)]
    for c in agreement.comparisons:
        found = [f"lengths differ first at {c.difference.lengths}"] if c.difference.lengths else []
        found += [f"text differs first at {c.difference.text}"] if c.difference.text else []
        if found:
            reasons = "; ".join(c.reasons) or "none, as a tie of two logits leaves none"
            out.append(f"{c.name}: {'; '.join(found)} (here and there). What the records hold as a reason: {reasons}")
    here, there, both = agreement.questions
    if not here == there == both:
        out.append(f"questions: {here} here, {there} there; compared on the {both} that both have")
    for where, names in (("here", agreement.only_here), ("there", agreement.only_there)):
        if names:
            out.append(f"only {where}: {'; '.join(names)}")
    return out


def summary(agreement: Agreement) -> str:
    """Say in one line how far two experiments agree."""
    total = len(agreement.comparisons)
    questions = {c.questions for c in agreement.comparisons}
    count = f"{max(questions)} questions" if len(questions) == 1 else f"{min(questions)} to {max(questions)} questions"
    parts = [f"accepted lengths equal in {len(agreement.of(EQUAL))} of {total} configurations on {count}"]
    for verdict, words in ((WITHIN, "differ within the interval"), (APART, "DIFFER"), (OPEN, "not decided")):
        if names := agreement.of(verdict):
            parts.append(f"{words}: {', '.join(names)}")
    same, turns = (sum(c.turns_alike[i] for c in agreement.comparisons) for i in (0, 1))
    parts.append(f"text equal in {f'all {turns}' if same == turns else f'{same} of {turns}'} turns")
    return "; ".join(parts)


def _ratio(c: Comparison) -> str:
    return f"{c.ratio:.3f}" + (f" [{c.low:.3f}, {c.high:.3f}]" if math.isfinite(c.low) else "")


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"
