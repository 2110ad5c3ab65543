"""Trees that runs ask for: nodes accepted most often; what tree=auto chose, promised and achieved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.errors import UserError

from ..records.runs import Run, read_runs, row_key
from .acceptance import TEMPLATE, accepted_paths, by_node, most_accepted, template
from .metrics import measure
from .pools import Pool, pools
from .tables import baseline


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


def find_tree(folder: Path, nodes: int, method: str | None = None) -> dict[str, Any]:
    """Return what is written to a template's file: the nodes, and where they come from."""
    if nodes < 1:
        raise UserError(f"--nodes {nodes}: must be at least 1")
    pool = pick(read_runs(folder), method)
    accepted = accepted_paths(pool.rows, TEMPLATE)
    if not accepted:
        raise UserError(f"{folder}: its records hold no drafted step")
    candidates = by_node(accepted, template(pool.first))
    if nodes > len(candidates):
        raise UserError(f"--nodes {nodes}: the run's tree has {len(candidates)} nodes; search from a larger one")
    chosen = most_accepted(candidates, nodes)
    return {
        "source": f"{folder}: {pool.label}, {accepted.total()} steps",
        "expected_accepted": round(sum(node.accepted for node in chosen) / accepted.total(), 4),
        "nodes": [list(path) for path in sorted((node.path for node in chosen), key=lambda p: (len(p), p))],
    }


def auto_runs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return of each run whose drafter chose its tree by itself what the drafter said, and the speed achieved.

    That is the decoding speed over vanilla's on the questions both have, in the same repeat if vanilla has them there;
    NaN without vanilla's times.
    """
    pooled, objects = pools(runs), []
    for pool in pooled:
        base = baseline(pool, "vanilla", pooled)
        for repeat, shards in pool.repeats.items():
            base_rows = base.answers_to_compare(repeat) if base else {}
            for run in shards:
                figures = run.summary.get("drafter") or {}
                if figures.get("predicted_speedup"):
                    common = [row for row in run.answers if row_key(row) in base_rows]
                    sides = common, [base_rows[row_key(row)] for row in common]
                    speed, base_speed = (measure(rows)["tokens_per_second_decode"] for rows in sides)
                    about = {"method": pool.name, "bench": pool.group["bench"], "repeat": repeat}
                    about |= {"run": run.folder.name, **figures, "achieved_speedup": speed / base_speed}
                    objects.append(about)
    return objects


def auto_lines(objects: Sequence[dict[str, Any]]) -> list[str]:
    """Word each of `auto_runs` in a line: the size chosen, the speed predicted and the speed measured."""
    lines = []
    for run in objects:
        several = any(other["method"] == run["method"] and other["repeat"] != run["repeat"] for other in objects)
        repeat = f", repeat {run['repeat']}" if several else ""
        speed = run["achieved_speedup"]
        measured = f"{speed:.2f} x measured" if speed == speed else "not measured, as there is no timed run of vanilla"
        aside = "; drafting does not pay here, so it decodes without drafts" if run["chosen"] == 0 else ""
        lines.append(
            f"{run['method']}{repeat} on {run['bench']}: {run.get('choice', 'last choice')} {run['chosen']} nodes; "
            f"decoding speed over vanilla {run['predicted_speedup']:.2f} x predicted, {measured}{aside}"
        )
    return lines
