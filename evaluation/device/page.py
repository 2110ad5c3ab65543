"""The report as one page without network: failures first, then the sections; everything from the data is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from . import sections
from .findings import failed

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
h3 { font-size: 1rem; margin-bottom: .3rem; }
.headline { font-size: 1.15rem; background: #eef3f9; padding: .8rem 1rem; border-left: 4px solid #1f5fa8; }
.bad { background: #fbecea; border-left: 4px solid #b5462b; padding: .6rem 1rem; }
.good { background: #edf5ed; border-left: 4px solid #3b7d3b; padding: .6rem 1rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .5rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #e3e3e3; font-size: 13.5px; }
th { font-weight: 600; background: #f6f6f6; } th.text, td.text { text-align: left; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; } figcaption { font-size: 13.5px; }
svg text { font: 11px system-ui, sans-serif; fill: #444; } svg .grid { stroke: #e0e0e0; }
.note { color: #555; font-size: 13.5px; }
"""
UNTRIED = (
    "Never run on a GPU by this project: captured graphs, compiled steps on CUDA, the tree attention kernel, counts "
    "by the profiler and the figures for graph memory. A line that fails here may be the report's own defect."
)
TITLES = (
    ("device", "1. The device", sections.device),
    ("checks", "2. Checks", sections.checks),
    ("steps", "3. Seconds of a step by nodes, T(n)", sections.steps),
    ("kernel", "4. The tree attention kernel", sections.kernel),
    ("searches", "5. The greatest logits", sections.searches),
    ("calls", "6. Launches and waits of a step", sections.calls),
    ("setup", "7. Compiling and capturing", sections.setup),
    ("forecast", "8. What it makes of the method", sections.forecast),
    ("against", "9. Beside another report", sections.against),
)


def page(data: dict[str, Any]) -> str:
    """HTML of a report, finished or not."""
    name = escape(str(data.get("device", {}).get("device", "a device")))
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style></head><body>',
        f"<h1>Token Recycling on {name}</h1>",
        f'<p class="note">{escape(UNTRIED)}</p>',
        f'<p class="headline">{escape(str(data.get("headline", "Nothing was timed yet.")))}</p>',
        *_news(data),
    ]
    for key, title, make in TITLES:
        if key in data:
            parts += [f'<h2 id="{key}">{title}</h2>', make(data)]
        elif key != "against" and data.get("done") is not True:
            parts += [f"<h2>{title}</h2>", '<p class="note">Not reached yet.</p>']
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _news(data: dict[str, Any]) -> list[str]:
    """Whether it is whole, what failed, what was cut."""
    parts = []
    if lines := failed(data):
        parts.append(f'<div class="bad"><strong>{len(lines)} failed</strong>{_list(lines)}</div>')
    elif data.get("checks"):
        parts.append(f'<p class="good">All {len(data["checks"])} checks of steps passed.</p>')
    made, minutes = escape(str(data.get("made", ""))), data.get("seconds", 0.0) / 60
    state = "" if data.get("done") else " <strong>It is not finished, or was cut off.</strong>"
    parts.append(f'<p class="note">Made {made}, in {minutes:.1f} minutes of {data.get("minutes", 0):g}.{state}</p>')
    if data.get("notes"):
        parts.append(f'<div class="note">Left out:{_list(data["notes"])}</div>')
    return parts


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
