"""From step times to tokens per second: for the published tree, its best cut, and tree=auto.

Random weights give step times, but no acceptance. So the published tree's MAT is given, and the MAT of other sizes is
assumed, as `tree=auto` does before its first step: the n best nodes are accepted by the power law of
`model.recycling.templates.likelihood`, times (n + 1) ** FILLING for the rows that a step fills. Both are scaled so that
80 nodes give the MAT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from model.recycling.auto import PROBE_EVERY, PROBE_EVERY_IDLE, PROBE_UP
from model.recycling.templates import best_order, likelihood
from model.sizing.draft_size import FILLING, SIZES, best_size, between

from .plan import PUBLISHED

K = 8  # candidates per token


def expected_mat(n: int, mat: float) -> float:
    """Return the tokens per step of the best n nodes, if the published 80 give `mat`."""

    def law(nodes: int) -> float:
        return sum(map(likelihood, best_order(nodes, K))) * math.pow(1 + nodes, FILLING)

    return 1 + (mat - 1) * law(n) / law(PUBLISHED)


def forecast(seconds: Mapping[int, float], plain: float, mat: float) -> dict[str, dict[str, float]]:
    """Forecast the published tree, the best measured size, and `auto`.

    Args:
        seconds: T(n) by nodes below the root, 0 among them.
        plain: seconds of a step that neither drafts nor learns.

    Returns:
        By `published`, `best` and `auto`: nodes, mat, tokens_per_second, and speedup over plain decoding.
    """
    speed = {n: expected_mat(n, mat) / t for n, t in seconds.items()}
    best = max(speed, key=speed.__getitem__)
    by_tree = {"published": (PUBLISHED, mat, mat / between(seconds, PUBLISHED))}
    by_tree["best"] = (best, expected_mat(best, mat), speed[best])
    by_tree["auto"] = _auto(seconds, mat)
    return {
        name: {"nodes": nodes, "mat": accepted, "tokens_per_second": rate, "speedup": rate * plain}
        for name, (nodes, accepted, rate) in by_tree.items()
    }


def _auto(seconds: Mapping[int, float], mat: float) -> tuple[int, float, float]:
    """Return nodes, MAT and tokens per second of the size that auto settles on, with its probes of a larger tree."""
    times = [between(seconds, n) for n in SIZES]
    tokens = [expected_mat(n, mat) for n in SIZES]
    at = best_size(tokens, times)
    probe, every = min(at + PROBE_UP, len(SIZES) - 1), PROBE_EVERY if at else PROBE_EVERY_IDLE
    made, spent = ((every - 1) * each[at] + each[probe] for each in (tokens, times))
    return SIZES[at], made / every, made / spent


def forecasts(cells: list[dict[str, Any]], mat: float) -> list[dict[str, Any]]:
    """Return a forecast for each measured cell, as rows of the report."""
    rows = []
    for cell in cells:
        seconds = {int(n): s for n, s in cell["step_s"].items()}
        about = {key: cell[key] for key in ("model", "dtype", "execution", "context", "plain_s")}
        rows.append(about | forecast(seconds, cell["plain_s"], mat))
    return rows


def headline(rows: list[dict[str, Any]], mat: float) -> str:
    """Sum up the report: the first model at the first context, in the execution fastest with the published tree."""
    if not rows:
        return "On this device: no step was timed, so nothing can be said of the speed."
    first = rows[0]
    same = [row for row in rows if all(row[key] == first[key] for key in ("model", "dtype", "context"))]
    row = max(same, key=lambda row: float(row["published"]["tokens_per_second"]))
    fastest = min(float(other["plain_s"]) for other in same)
    published, nodes = row["published"], row["best"]["nodes"]
    return (
        f"On this device: 2.2.2 at MAT {mat:.2f}: {published['tokens_per_second']:.0f} tokens/s, "
        f"{published['tokens_per_second'] * fastest:.2f} x plain; the best tree has {nodes} node{'s' * (nodes != 1)} "
        f"({row['model']}, {row['dtype']}, {row['context']} tokens of context, {row['execution']}; plain decoding as "
        "its fastest execution has it)."
    )
