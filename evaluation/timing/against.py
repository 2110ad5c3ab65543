"""Compare with another report: the ratio of step times wherever both have them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from model.errors import UserError

SAME = ("model", "dtype", "execution", "context")
PLAIN = "plain"


def read_report(path: Path) -> list[dict[str, Any]]:
    """Read the measured cells of a saved report. Raises UserError for any other file."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        cells: list[dict[str, Any]] = report["steps"]["cells"]
        for cell in cells:
            if not all(t > 0 for t in (float(cell["plain_s"]), *map(float, cell["step_s"].values()))):
                raise ValueError("a step time that is not positive")
            _ = [cell[key] for key in SAME], [int(n) for n in cell["step_s"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise UserError(f"--against {path}: not a report of this command ({why})") from None
    return cells


def ratios(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each cell of both reports, seconds now over before, by nodes, `plain` first, and their median."""
    earlier = {tuple(cell[key] for key in SAME): cell for cell in before}
    rows = []
    for cell in now:
        other = earlier.get(tuple(cell[key] for key in SAME))
        if other is None:
            continue
        ours = {PLAIN: cell["plain_s"]} | cell["step_s"]
        theirs = {PLAIN: other["plain_s"]} | other["step_s"]
        by_nodes = {str(n): ours[n] / theirs[n] for n in ours if n in theirs}
        rows.append(
            {key: cell[key] for key in SAME} | {"ratio": by_nodes, "median": statistics.median(by_nodes.values())}
        )
    return rows


def ratio_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Format ratios as lines of text."""
    if not rows:
        return ["against the other report: no model, type, execution and context that both have"]
    lines = ["against the other report, step times now / then:"]
    for row in rows:
        parts = [f"{name} {row['ratio'][name]:.2f}" for name in (PLAIN, "0", "80") if name in row["ratio"]]
        where = f"{row['model']} {row['dtype']} {row['execution']} at {row['context']}"
        lines.append(f"  {where}: {', '.join(parts)} nodes; median of all {row['median']:.2f}")
    return lines
