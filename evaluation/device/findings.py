"""What of a report is bad news."""

from __future__ import annotations

from typing import Any


def failed(data: dict[str, Any]) -> list[str]:
    """What stands first on the page: checks and tests that failed, and executions that did."""
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
    found = data.get("searches", {})
    return lines + [
        f"top-k over {row['vocab']} columns: {row.get('error', 'not the one of torch')}"
        for row in found.get("rows", [])
        if not row.get("right")
    ]
