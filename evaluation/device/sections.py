"""The sections of the page, each from the report's data as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from .against import PLAIN
from .chart import lines
from .forecast import K
from .plan import PUBLISHED

LAW = (
    "Random weights measure time alone: what would be accepted is assumed. 2.2.2 has the MAT that was given. The best "
    "n nodes of its order stand by the power law 0.45 / (rank + 1)^1.9 a rank, multiplied along a path "
    "(model/recycling/templates.py), times (n + 1)^0.2 for the rows of the matrix that a step fills "
    "(model/recycling/auto.py), scaled so that 80 nodes give that MAT; beyond 80 the order and the law go on, and "
    "nothing published bears them out. auto settles on the best of its own sizes, T(n) between measured sizes on a "
    "straight line, and pays for its probes. Speedups are over plain decoding in the same execution."
)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; columns whose cells are texts stand left."""
    texts = [any(isinstance(row[i], str) and not _numeric(row[i]) for row in rows) for i in range(len(head))]

    def line(tag: str, cells: Sequence[object]) -> str:
        told = zip(cells, texts, strict=True)
        return "<tr>" + "".join(f"<{tag}{' class=text' * left}>{escape(str(c))}</{tag}>" for c, left in told) + "</tr>"

    return f'<div class="wide"><table>{line("th", head)}{"".join(line("td", row) for row in rows)}</table></div>'


def _numeric(cell: object) -> bool:
    """Whether it reads as a number, perhaps with a unit's sign behind it, or stands for none."""
    text = str(cell).rstrip(" %x")
    return text in ("", "-") or text.replace(".", "", 1).replace("-", "", 1).isdigit()


def paragraph(text: str) -> str:
    """A note."""
    return f'<p class="note">{escape(text)}</p>'


def device(data: dict[str, Any]) -> str:
    """What it is, what it copies and multiplies, and the versions."""
    own = data["device"]
    rates = [
        (name, f"{r['bytes_per_second'] / 1e9:.1f}", f"{r['flop_per_second'] / 1e12:.3g}")
        for name, r in own["rates"].items()
    ]
    told = [(name, version) for name, version in own["versions"].items() if version != "not installed"]
    about = [("device", own["device"]), ("platform", own["platform"]), ("threads", str(own["threads"]))]
    about += [("CUDA", own["cuda"] or "none"), ("commit", str(own["git"].get("commit", "unknown"))), *told]
    return table(("type", "GB/s copied (read and written)", "TFLOP/s multiplied"), rates) + table(("", ""), about)


def checks(data: dict[str, Any]) -> str:
    """Every check; the tests in a line."""
    rows = [
        (row["dtype"], row["execution"], row["method"], "passed" if row["passed"] else "FAILED", row["found"])
        for row in sorted(data["checks"], key=lambda row: bool(row["passed"]))
    ]
    told = "Steps against eager ones on the embedded model: the same tokens and accepted lengths in float32; in other "
    told += "types the same tokens up to a tie of logits."
    return paragraph(told) + table(("type", "execution", "method", "", "against eager steps"), rows) + _tests(data)


def _tests(data: dict[str, Any]) -> str:
    """What the tests gave, if they were come to."""
    if "tests" not in data:
        return ""
    tests = data["tests"]
    counts = f"{tests['passed']} passed, {len(tests['failed'])} failed, {tests['skipped']} skipped"
    counted = [counts] if tests["passed"] or tests["failed"] else []
    return paragraph(f"Tests for CUDA: {'; '.join([*counted, *filter(None, [tests['problem']])])}.")


def steps(data: dict[str, Any]) -> str:
    """A chart and a table for each model, type and context."""
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
    told = "Whole steps of Token Recycling with the n best nodes, milliseconds, medians of rounds in which sizes and "
    told += (
        "executions take turns; plain decodes without drafting and learning. The floor's share: what plain decoding "
    )
    told += "must read (weights and used cache) at the rate of a copy, over its step. Weights other than the embedded "
    told += "model's are random, which is nothing to the time."
    return paragraph(told) + f'<div class="charts">{"".join(charts)}</div>' + "".join(tables)


def kernel(data: dict[str, Any]) -> str:
    """Microseconds a layer."""
    own = data["kernel"]
    if not own["rows"]:
        return paragraph(own["problem"] or "No case fitted into the time.")
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
        for row in own["rows"]
    ]
    head = ("H/Hkv/D", "nodes", "length", "tree kernel us", "SDPA, mask us", "FlexAttention us", "GB/s", "")
    return paragraph(f"Microseconds of one layer's attention, {own['dtype']}; keys and values from memory.") + table(
        head, rows
    )


def searches(data: dict[str, Any]) -> str:
    """Microseconds a step, by vocabulary."""
    own = data["searches"]
    rows = [
        (row["model"], row["vocab"], f"{row['own_us']:.0f}", f"{row['torch_us']:.0f}", "" if row["right"] else "WRONG")
        if "right" in row
        else (row["model"], row["vocab"], "-", "-", row["error"])
        for row in own["rows"]
    ]
    note = f"Arg-max and the {K} greatest after each of {1 + PUBLISHED} nodes, microseconds, {own['dtype']}: as steps "
    note += "find them, and torch.argmax with torch.topk."
    head = ("vocabulary", "columns", "own us", "torch us", "")
    return paragraph(note) + table(head, rows)


def calls(data: dict[str, Any]) -> str:
    """Of a step, by execution."""
    rows = []
    for row in data["calls"]:
        found = row["calls"]
        told = found if isinstance(found, str) else ", ".join(f"{name} {n:.1f}" for name, n in found.items())
        what = PLAIN if row["nodes"] is None else f"{row['nodes']} nodes"
        rows.append((row["model"], row["dtype"], row["execution"], what, told))
    note = (
        "On CUDA by the profiler: kernels or graphs launched, copies asked for, waits. On a CPU by counting operators; "
    )
    note += "host reads are single numbers taken from a tensor."
    return paragraph(note) + table(("model", "type", "execution", "step", "a step asks for"), rows)


def setup(data: dict[str, Any]) -> str:
    """Seconds and bytes of making steps."""
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
    note = "Seconds until steps of every size are there, and the GPU's memory that they took (graphs and their work "
    note += "space). The first step pays for compiling. Eager steps are not made."
    return paragraph(note) + table(head, rows)


def forecast(data: dict[str, Any]) -> str:
    """Tokens a second and speedup, with the assumption."""
    rows = []
    for row in data["forecast"]:
        shown = [f"{1 / row['plain_s']:.0f}"]
        for name in ("published", "best", "auto"):
            own = row[name]
            if name != "published":
                shown += [f"{own['nodes']}", f"{own['mat']:.2f}"]
            shown += [f"{own['tokens_per_second']:.0f}", f"{own['speedup']:.2f} x"]
        rows.append((row["model"], row["dtype"], row["context"], row["execution"], *shown))
    head = ["model", "type", "context", "execution", "plain tok/s", f"2.2.2 ({PUBLISHED}) tok/s", "speedup"]
    head += ["best n", "MAT", "tok/s", "speedup", "auto n", "MAT", "tok/s", "speedup"]
    return paragraph(f"2.2.2 at MAT {data['mat']:.2f}. {LAW}") + table(head, rows)


def against(data: dict[str, Any]) -> str:
    """Ratios of step times."""
    rows = data["against"]
    if not rows:
        return paragraph("The two reports have no model, type, execution and context in common.")
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
    return paragraph("Step times of this report over the other's; below 1 this one is faster.") + table(head, shown)
