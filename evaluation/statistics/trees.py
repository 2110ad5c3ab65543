"""Trees that runs ask for: nodes accepted most often; what tree=auto chose, promised and achieved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from model.errors import UserError
from model.files import write_json

from ..records.rows import Row
from ..records.runs import Run, read_runs, row_key
from .acceptance import TEMPLATE, Accepted, Node, by_node, most_accepted, template
from .metrics import measure
from .pools import Pool, pools
from .tables import baseline

HALVES = {"all": None, "even": 0, "odd": 1}


def best(nodes: Sequence[Node], n: int) -> list[Node]:
    """Return the n nodes most often on an accepted path, best first.

    Raises:
        UserError: fewer than n nodes were tried.
    """
    if n > len(nodes):
        raise UserError(f"--nodes {n}: the run's tree has {len(nodes)} nodes; search from a larger one")
    return most_accepted(nodes, n)


def pick(runs: Sequence[Run], label: str | None) -> Pool:
    """Choose the repeats and shards of the one run to search in: it must have drafted from a fixed template.

    Raises:
        UserError: none or several have, and no label tells which.
    """
    fixed = [run for run in runs if template(run) and label in (None, run.label)]
    if not fixed:
        labels = ", ".join(sorted({run.label for run in runs}))
        raise UserError(f"no run with a fixed draft tree{f' of {label}' if label else ''}; there are {labels}")
    names = sorted({run.label for run in fixed})
    if len(names) > 1:
        raise UserError(f"several runs with a tree; name one with --method: {', '.join(names)}")
    # of one label the largest tree has tried most, and of its runs the one with most questions
    return max(pools(fixed), key=lambda pool: (len(pool.first.draft_tree or []), pool.questions))


def half_of(rows: Sequence[Row], half: str) -> list[Row]:
    """Return all rows, or every other one of each subtask's: what one half finds is tried on the other."""
    if HALVES[half] is None:
        return list(rows)
    counts: Counter[str] = Counter()
    kept = []
    for row in rows:
        counts[str(row.get("category"))] += 1
        if counts[str(row.get("category"))] % 2 == HALVES[half]:
            kept.append(row)
    return kept


def find_tree(folder: Path, nodes: int, *, method: str | None = None, half: str = "all") -> dict[str, Any]:
    """Return what is written to a template's file: the nodes, and where they come from."""
    if nodes < 1:
        raise UserError(f"--nodes {nodes}: must be at least 1")
    pool = pick(read_runs(folder), method)
    accepted = Accepted.of((row for run in pool.runs for row in half_of(run.answers, half)), TEMPLATE)
    if not accepted.steps:
        raise UserError(f"{folder}: its records hold no drafted step")
    chosen = best(by_node(accepted, template(pool.first)), nodes)
    return {
        "source": f"{folder}: {pool.label}, {half} questions, {accepted.steps} steps",
        "expected_accepted": round(sum(node.accepted for node in chosen) / accepted.steps, 4),
        "nodes": [list(path) for path in sorted((node.path for node in chosen), key=lambda p: (len(p), p))],
    }


def auto_figures(run: Run) -> dict[str, Any] | None:
    """Return the drafter's own figures in a run's summary; None unless it chose its tree by itself."""
    figures: dict[str, Any] = run.summary.get("drafter") or {}
    return figures if figures.get("predicted_speedup") else None


class AutoRun(NamedTuple):
    """Such a run: the drafter's figures, and its decoding speed over vanilla's on the questions both have."""

    pool: Pool
    repeat: int
    run: Run
    figures: dict[str, Any]
    achieved: float


def auto_runs(pooled: Sequence[Pool]) -> Iterator[AutoRun]:
    """Yield every such run, against the same repeat of vanilla where that has the question; NaN without vanilla."""
    for pool in pooled:
        for repeat, shards in pool.repeats.items():
            for run in shards:
                if (figures := auto_figures(run)) is not None:
                    base = baseline(pool, "vanilla", pooled)
                    base_rows = base.answers_to_compare(repeat) if base else {}
                    yield AutoRun(pool, repeat, run, figures, _speedup(run, base_rows))


def _speedup(run: Run, base_rows: dict[str, Row]) -> float:
    common = [row for row in run.answers if row_key(row) in base_rows]
    base = [base_rows[row_key(row)] for row in common]
    return (
        measure(common)["tokens_per_second_decode"] / measure(base)["tokens_per_second_decode"] if common else math.nan
    )


def auto_lines(runs: Sequence[Run]) -> list[str]:
    """Word each such run in a line: the size chosen, the speed predicted and the speed measured."""
    lines = []
    for pool, repeat, run, figures, achieved in auto_runs(pools(runs)):
        outcome = f"{achieved:.2f} x measured" if achieved == achieved else "not measured, as vanilla did not run"
        aside = "; drafting does not pay here, so it decodes without drafts" if figures["chosen"] == 0 else ""
        chosen = f"{figures.get('choice', 'last choice')} {figures['chosen']} nodes"
        name = pool.name + (f", repeat {repeat}" if len(pool.repeats) > 1 else "")
        lines.append(
            f"{name} on {run.settings['bench']['name']}: {chosen}; decoding speed over vanilla "
            f"{figures['predicted_speedup']:.2f} x predicted, {outcome}{aside}"
        )
    return lines


def write_auto_runs(runs: Sequence[Run], path: Path) -> None:
    """Write the same figures for programs, one object a run; nothing where no run chose its tree."""
    objects = [
        {"method": pool.name, "bench": pool.group["bench"], "repeat": repeat, "run": run.folder.name}
        | figures
        | {"achieved_speedup": achieved}
        for pool, repeat, run, figures, achieved in auto_runs(pools(runs))
    ]
    if objects:
        write_json(path, objects)
