"""Write the device report as one self-contained page: failures first, then its sections. All data is escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from .against import PLAIN
from .forecast import K
from .plan import PUBLISHED

COLOURS = ("#1f5fa8", "#b5462b", "#3b7d3b", "#7a4a9c", "#6b6b6b")


def lines(curves: Mapping[str, Mapping[int, float]], unit: str) -> str:
    """Draw a chart of curves, values by nodes below the root, from 0 up; named at their right ends.

    Args:
        unit: of the values.
    """
    most_x = max(n for curve in curves.values() for n in curve) or 1
    most_y = _round_up(max(value for curve in curves.values() for value in curve.values()))

    def at(n: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * n / most_x
        return x, HEIGHT - BELOW - (HEIGHT - BELOW - ABOVE) * value / most_y

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">']
    for i in range(5):
        value = most_y * i / 4
        x, y = at(0, value)
        parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for n in range(0, most_x + 1, 20 if most_x <= 100 else 40):
        x, y = at(n, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{n}</text>')
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 4}" text-anchor="middle">nodes below the root</text>')
    parts.append(f'<text x="4" y="{ABOVE - 1}">{escape(unit)}</text>')
    parts += _curves(curves, at)
    return "".join([*parts, "</svg>"])


def _curves(curves: Mapping[str, Mapping[int, float]], at: Point) -> list[str]:
    """Draw each curve as a line with its points, and its name at the right end."""
    parts, ends = [], []
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [at(n, value) for n, value in sorted(curve.items())]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}"/>' for x, y in points]
        ends.append((points[-1][1], points[-1][0], name, colour))
    lowest = -math.inf
    for y, x, name, colour in sorted(ends):  # names of curves that end together go below one another
        lowest = max(y, lowest + 13)
        parts.append(f'<text x="{x + 6:.1f}" y="{lowest + 4:.1f}" style="fill:{colour}">{escape(name)}</text>')
    return parts


def _round_up(value: float) -> float:
    """Round up to 1, 2, 4, 6, 8 or 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value * 0.999)


LAW = (
    "Random weights measure time only, so acceptance is assumed. 2.2.2 has the MAT given. The best n nodes of its "
    "order are accepted by the power law 0.45 / (rank + 1)^1.9 per rank, multiplied along a path "
    "(model/recycling/templates.py), times (n + 1)^0.2 for the rows of the matrix that a step fills "
    "(model/recycling/auto.py), scaled so that 80 nodes give that MAT. Beyond 80 nodes the law is extrapolated; no "
    "published figure supports it there. auto chooses the best of its sizes, with T(n) interpolated linearly between "
    "measured sizes, and pays for its probes. Speedups are over plain decoding in the same execution."
)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Write a table; columns of text are left-aligned."""
    texts = [any(isinstance(row[i], str) and not _numeric(row[i]) for row in rows) for i in range(len(head))]

    def line(tag: str, cells: Sequence[object]) -> str:
        pairs = zip(cells, texts, strict=True)
        return "<tr>" + "".join(f"<{tag}{' class=text' * left}>{escape(str(c))}</{tag}>" for c, left in pairs) + "</tr>"

    return f'<div class="wide"><table>{line("th", head)}{"".join(line("td", row) for row in rows)}</table></div>'


def _numeric(cell: object) -> bool:
    """True if the cell is a number, perhaps followed by a unit's sign, or marks a missing one."""
    text = str(cell).rstrip(" %x")
    return text in ("", "-") or text.replace(".", "", 1).replace("-", "", 1).isdigit()


def paragraph(text: str) -> str:
    """Write a note."""
    return f'<p class="note">{escape(text)}</p>'


def section_device(data: dict[str, Any]) -> str:
    """Show the device, its rates, and versions."""
    device = data["device"]
    rates = [
        (name, f"{r['bytes_per_second'] / 1e9:.1f}", f"{r['flop_per_second'] / 1e12:.3g}")
        for name, r in device["rates"].items()
    ]
    installed = [(name, version) for name, version in device["versions"].items() if version != "not installed"]
    about = [("device", device["device"]), ("platform", device["platform"]), ("threads", str(device["threads"]))]
    about += [("CUDA", device["cuda"] or "none"), ("commit", str(device["git"].get("commit", "unknown"))), *installed]
    return table(("type", "GB/s copied (read and written)", "TFLOP/s multiplied"), rates) + table(("", ""), about)


def section_checks(data: dict[str, Any]) -> str:
    """Show every check, and the tests in a line."""
    rows = [
        (row["dtype"], row["execution"], row["method"], "passed" if row["passed"] else "FAILED", row["found"])
        for row in sorted(data["checks"], key=lambda row: bool(row["passed"]))
    ]
    note = "Each execution is compared with eager steps on the embedded model. In float32 tokens and accepted lengths "
    note += "must be the same, in other types the tokens up to a tie of logits."
    return paragraph(note) + table(("type", "execution", "method", "", "against eager steps"), rows) + _tests(data)


def _tests(data: dict[str, Any]) -> str:
    """Show the results of the tests, if they were reached."""
    if "tests" not in data:
        return ""
    tests = data["tests"]
    counts = f"{tests['passed']} passed, {len(tests['failed'])} failed, {tests['skipped']} skipped"
    counted = [counts] if tests["passed"] or tests["failed"] else []
    return paragraph(f"Tests for CUDA: {'; '.join([*counted, *filter(None, [tests['problem']])])}.")


def section_steps(data: dict[str, Any]) -> str:
    """Show a chart and a table for each model, type and context."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for cell in data["steps"]["cells"]:
        groups.setdefault((cell["model"], cell["dtype"], cell["context"]), []).append(cell)
    charts, tables = [], []
    for (model, dtype, context), cells in groups.items():
        title = escape(f"{model}, {dtype}, {context} tokens of context")
        curves = {c["execution"]: {int(n): 1e3 * s for n, s in c["step_s"].items()} for c in cells}
        charts.append(f"<figure><figcaption>{title}</figcaption>{lines(curves, 'ms')}</figure>")
        sizes = list(cells[0]["step_s"])
        rows = [
            (
                c["execution"],
                f"{1e3 * c['plain_s']:.2f}",
                f"{100 * c['floor_share']:.0f} %",
                *(f"{1e3 * c['step_s'][n]:.2f}" for n in sizes),
                c["rounds"],
            )
            for c in cells
        ]
        head = ("ms", "plain", "floor's share", *sizes, "rounds")
        tables.append(f"<h3>{title}</h3>{table(head, rows)}")
    note = (
        "Milliseconds of a whole step of Token Recycling with the n best nodes: medians of rounds in which sizes and "
        "executions take turns. plain: without drafting and learning. Floor's share: the time to copy what plain "
        "decoding must read (weights and used cache), over its step time. Weights other than the embedded model's are "
        "random, which does not change the time."
    )
    return paragraph(note) + f'<div class="charts">{"".join(charts)}</div>' + "".join(tables)


def section_kernel(data: dict[str, Any]) -> str:
    """Show microseconds per layer."""
    kernel = data["kernel"]
    if not kernel["rows"]:
        return paragraph(kernel["problem"] or "No case fitted into the time.")
    columns = ("tree_us", "sdpa_us", "flex_us")
    rows = [
        (
            f"{row['heads']}/{row['kv_heads']}/{row['dim']}",
            row["nodes"],
            row["length"],
            *(f"{row[c]:.1f}" if row.get(c) else "-" for c in columns),
            f"{row['gb_per_s']:.0f}" if "gb_per_s" in row else "-",
            row.get("error") or "; ".join(f"{name}: {why}" for name, why in row.get("notes", {}).items()),
        )
        for row in kernel["rows"]
    ]
    head = ("H/Hkv/D", "nodes", "length", "tree kernel us", "SDPA, mask us", "FlexAttention us", "GB/s", "")
    note = f"Microseconds of one layer's attention in {kernel['dtype']}, with keys and values read from memory."
    return paragraph(note) + table(head, rows)


def section_searches(data: dict[str, Any]) -> str:
    """Show microseconds per step by vocabulary."""
    searches = data["searches"]
    rows = [
        (row["model"], row["vocab"], f"{row['own_us']:.0f}", f"{row['torch_us']:.0f}", "" if row["right"] else "WRONG")
        if "right" in row
        else (row["model"], row["vocab"], "-", "-", row["error"])
        for row in searches["rows"]
    ]
    note = f"Microseconds to find the arg-max and the {K} largest logits after each of {1 + PUBLISHED} nodes in "
    note += f"{searches['dtype']}: by this engine's search, and by torch.argmax with torch.topk."
    head = ("vocabulary", "columns", "engine us", "torch us", "")
    return paragraph(note) + table(head, rows)


def section_calls(data: dict[str, Any]) -> str:
    """Show the device calls of a step by execution."""
    rows = []
    for row in data["calls"]:
        calls = row["calls"]
        counts = calls if isinstance(calls, str) else ", ".join(f"{name} {n:.1f}" for name, n in calls.items())
        what = PLAIN if row["nodes"] is None else f"{row['nodes']} nodes"
        rows.append((row["model"], row["dtype"], row["execution"], what, counts))
    note = "On CUDA the profiler counts launched kernels or graphs, copies and waits; on a CPU operators are counted. "
    note += "A host read takes a single number from a tensor."
    return paragraph(note) + table(("model", "type", "execution", "step", "per step"), rows)


def section_setup(data: dict[str, Any]) -> str:
    """Show seconds and bytes to build steps."""
    rows = [
        (
            row["model"],
            row["dtype"],
            row["execution"],
            row["context"],
            row["steps"],
            f"{row['first_s']:.2f}",
            f"{row['others_s']:.2f}",
            f"{row['slowest_other_s']:.2f}",
            "-" if row["bytes"] is None else f"{row['bytes'] / 2**20:.0f}",
        )
        for row in data["setup"]
    ]
    head = ("model", "type", "execution", "context", "steps", "first s", "all others s", "slowest other s", "MiB more")
    note = (
        "Seconds to build the steps of all sizes, and the GPU memory that they take (graphs and their workspace). The "
        "first step includes compilation. Eager steps are not built."
    )
    return paragraph(note) + table(head, rows)


def section_forecast(data: dict[str, Any]) -> str:
    """Show tokens per second and speedup, with the assumption."""
    rows = []
    for row in data["forecast"]:
        shown = [f"{1 / row['plain_s']:.0f}"]
        for name in ("published", "best", "auto"):
            tree = row[name]
            if name != "published":
                shown += [f"{tree['nodes']}", f"{tree['mat']:.2f}"]
            shown += [f"{tree['tokens_per_second']:.0f}", f"{tree['speedup']:.2f} x"]
        rows.append((row["model"], row["dtype"], row["context"], row["execution"], *shown))
    head = ["model", "type", "context", "execution", "plain tok/s", f"2.2.2 ({PUBLISHED}) tok/s", "speedup"]
    head += ["best n", "MAT", "tok/s", "speedup", "auto n", "MAT", "tok/s", "speedup"]
    return paragraph(f"2.2.2 at MAT {data['mat']:.2f}. {LAW}") + table(head, rows)


def section_against(data: dict[str, Any]) -> str:
    """Show ratios of step times."""
    rows = data["against"]
    if not rows:
        return paragraph("The two reports share no combination of model, type, execution and context.")
    sizes = list(dict.fromkeys(n for row in rows for n in row["ratio"]))
    shown = [
        (
            *(row[key] for key in ("model", "dtype", "execution", "context")),
            *(f"{row['ratio'][n]:.2f}" if n in row["ratio"] else "-" for n in sizes),
            f"{row['median']:.2f}",
        )
        for row in rows
    ]
    head = ("model", "type", "execution", "context", *sizes, "median")
    note = "Step times of this report divided by the other's; below 1 this one is faster."
    return paragraph(note) + table(head, shown)


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
    ("device", "1. The device", section_device),
    ("checks", "2. Checks", section_checks),
    ("steps", "3. Step time by nodes, T(n)", section_steps),
    ("kernel", "4. The tree attention kernel", section_kernel),
    ("searches", "5. The largest logits", section_searches),
    ("calls", "6. Launches and waits of a step", section_calls),
    ("setup", "7. Compiling and capturing", section_setup),
    ("forecast", "8. Predicted speed", section_forecast),
    ("against", "9. Against another report", section_against),
)


def page(data: dict[str, Any]) -> str:
    """Return the HTML of a report, finished or not."""
    name = escape(str(data.get("device", {}).get("device", "a device")))
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style></head><body>',
        f"<h1>Token Recycling on {name}</h1>",
        f'<p class="note">{escape(UNTRIED)}</p>',
        f'<p class="headline">{escape(str(data.get("headline", "Nothing was timed yet.")))}</p>',
        *_status(data),
    ]
    for key, title, make in TITLES:
        if key in data:
            parts += [f'<h2 id="{key}">{title}</h2>', make(data)]
        elif key != "against" and data.get("done") is not True:
            parts += [f"<h2>{title}</h2>", '<p class="note">Not reached yet.</p>']
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _status(data: dict[str, Any]) -> list[str]:
    """Say whether the report is complete, what failed and what was cut."""
    parts = []
    if lines := failures(data):
        parts.append(f'<div class="bad"><strong>{len(lines)} failed</strong>{_list(lines)}</div>')
    elif data.get("checks"):
        parts.append(f'<p class="good">All {len(data["checks"])} checks of steps passed.</p>')
    made, minutes = escape(str(data.get("made", ""))), data.get("seconds", 0.0) / 60
    state = "" if data.get("done") else " <strong>The report is not finished.</strong>"
    parts.append(f'<p class="note">Made {made}, in {minutes:.1f} minutes of {data.get("minutes", 0):g}.{state}</p>')
    if data.get("notes"):
        parts.append(f'<div class="note">Not measured:{_list(data["notes"])}</div>')
    return parts


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


WIDTH, HEIGHT, LEFT, BELOW, RIGHT, ABOVE = 420, 230, 52, 34, 92, 12
Point = Callable[[float, float], tuple[float, float]]  # from nodes and a value to a point of the drawing


def failures(data: dict[str, Any]) -> list[str]:
    """Name the checks, tests and executions that failed."""
    lines = [
        f"{row['execution']} steps of {row['method']} in {row['dtype']}: {row['found']}"
        for row in data.get("checks", [])
        if not row["passed"]
    ]
    lines += [f"test {name}" for name in data.get("tests", {}).get("failed", [])]
    for row in data.get("steps", {}).get("failures", []):
        context = "" if row["context"] is None else f" at {row['context']} tokens"
        lines.append(f"{row['execution']} steps of {row['model']} in {row['dtype']}{context}: {row['error']}")
    lines += [
        f"kernel with {row['heads']}/{row['kv_heads']} heads, {row['nodes']} nodes at {row['length']}: {row['error']}"
        for row in data.get("kernel", {}).get("rows", [])
        if "error" in row
    ]
    searches = data.get("searches", {})
    return lines + [
        f"top-k over {row['vocab']} columns: {row.get('error', 'not the one of torch')}"
        for row in searches.get("rows", [])
        if not row.get("right")
    ]
