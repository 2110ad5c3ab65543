"""The tests that are for CUDA, run by a pytest of their own where there is one."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from model.files import ROOT

FILES = tuple(f"tests/model/decoding/test_{name}.py" for name in ("attention", "selection", "step", "verification"))


def run_tests(seconds: float, files: tuple[str, ...] = FILES, root: Path = ROOT) -> dict[str, Any]:
    """Run them for at most so long.

    Returns:
        `passed`, `skipped`: how many; `failed`: names; `problem`: why not all of them were run, or None.
    """
    if importlib.util.find_spec("pytest") is None:
        return skipped("pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-v", "--tb=no", "--color=no", "-k", "not without_one", *files]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as told:  # kept where the time runs out
        problem = None
        try:
            done = subprocess.run(command, cwd=root, stdout=told, stderr=subprocess.STDOUT, timeout=seconds)
        except subprocess.TimeoutExpired:
            problem = f"cut after {seconds:.0f} s"
        told.seek(0)
        lines = told.read().splitlines()
    found = read_lines(lines)
    if problem is None and done.returncode not in (0, 1):  # 1: some failed
        problem = f"pytest ended with exit code {done.returncode}: {(lines or ['nothing was said'])[-1][:200]}"
    return found | {"problem": problem}


def read_lines(lines: list[str]) -> dict[str, Any]:
    """Count what `pytest -v` printed; a test's name may hold blanks."""
    outcomes = [
        match.groups() for line in lines if (match := re.match(r"(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", line))
    ]
    counts = {word: sum(outcome == word for _, outcome in outcomes) for word in ("PASSED", "SKIPPED")}
    failed = [name for name, outcome in outcomes if outcome in ("FAILED", "ERROR")]
    return {"passed": counts["PASSED"], "skipped": counts["SKIPPED"], "failed": failed}


def skipped(why: str) -> dict[str, Any]:
    """No test was run."""
    return {"passed": 0, "skipped": 0, "failed": [], "problem": f"skipped: {why}"}
