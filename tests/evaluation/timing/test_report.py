"""The command: end to end on the CPU, cut off, beside another, with wrong flags, with nothing else installed."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch

from evaluation import device_report
from evaluation.timing import checks, kernel, plan, run, steps
from evaluation.timing.page import failures, page
from evaluation.timing.plan import Budget, make_plan
from evaluation.timing.report import Report
from evaluation.timing.stepper import Stepper
from model.files import ROOT

CPU = torch.device("cpu")
BRIEF = ("--contexts", "40", "--minutes", "3", "--device", "cpu")


@pytest.fixture
def brief(monkeypatch):
    """Few tokens, sizes and rounds."""
    monkeypatch.setattr(checks, "PROMPTS", 1)
    monkeypatch.setattr(checks, "TOKENS", 8)
    monkeypatch.setattr(plan, "SIZES_CPU", (0, 4, 80))
    monkeypatch.setattr(steps, "MOST_ROUNDS", 1)
    monkeypatch.setattr(run, "DTYPES", ("float32",))


@pytest.fixture
def traced(monkeypatch):
    """torch.compile traces and guards, but generates no code, which takes seconds."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(steps, "LONGEST_COMPILE", {"cpu": 0.0})
    monkeypatch.setattr(checks, "LONGEST_COMPILE", {"cpu": 0.0})
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def read(folder):
    return json.loads((folder / "report.json").read_text())


class Balanced(HTMLParser):
    """Raises AssertionError where tags do not match; `tags` are all of them."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_embedded_model_on_the_cpu_end_to_end(brief, traced, call, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "METHODS", {"vanilla": {}, "dynamic": {"nodes": 8}})
    out = call(device_report.main, "--out", tmp_path, "--shapes", "embedded", *BRIEF)
    assert out.code == 0, out.err
    found = read(tmp_path)
    assert found["done"] and found["notes"] == []
    assert {(row["execution"], row["passed"]) for row in found["checks"]} == {("static", True), ("compiled", True)}
    assert found["tests"]["problem"] == "skipped: they are for CUDA"
    assert [(cell["execution"], cell["context"]) for cell in found["steps"]["cells"]] == [
        ("eager", 40),
        ("compiled", 40),
    ]
    for cell in found["steps"]["cells"]:
        assert list(cell["step_s"]) == ["0", "4", "80"] and min(cell["plain_s"], *cell["step_s"].values()) > 0
        assert 0 < cell["floor_share"] < 1.5 and cell["floor_share"] == pytest.approx(cell["floor_s"] / cell["plain_s"])
    assert [row["execution"] for row in found["setup"]] == ["compiled"] and found["setup"][0]["first_s"] > 0
    rows = found["searches"]["rows"]
    assert [row["vocab"] for row in rows] == [32000, 128256, 151936] and all(row["right"] for row in rows)
    assert min(min(row["own_us"], row["torch_us"]) for row in rows) > 0
    eager, drafted = (row["calls"] for row in found["calls"] if row["execution"] == "eager")
    assert drafted["operators"] > eager["operators"] > 50
    assert out.out.splitlines()[-2] == found["headline"] and "2.2.2 at MAT 2.70" in found["headline"]
    html = (tmp_path / "report.html").read_text()
    assert out.out.startswith("Never run on a GPU by this project") and html.index("Never run") < html.index(
        'headline">'
    )
    assert Balanced(html).tags.count("svg") == 1 and html.count("<h2") == 8 and "http" not in html
    # and once more beside itself
    again = call(device_report.main, "--out", tmp_path / "b", "--shapes", "embedded", "--executions", "eager", *BRIEF)
    assert again.code == 0
    beside = call(
        device_report.main, "--out", tmp_path, "--shapes", "embedded", "--executions", "eager", *BRIEF,
        "--against", tmp_path / "b/report.json",
    )  # fmt: skip
    other, own = read(tmp_path / "b")["steps"]["cells"][0], read(tmp_path)
    (row,) = own["against"]
    assert row["ratio"]["80"] == pytest.approx(own["steps"]["cells"][0]["step_s"]["80"] / other["step_s"]["80"])
    assert "embedded float32 eager at 40: plain" in beside.out


def test_a_run_that_is_cut_off_leaves_what_it_had(brief, call, tmp_path, monkeypatch):
    bursts, burst = [], Stepper.burst

    def stopped(self, n, *arguments):
        bursts.append(n)
        if len(bursts) > 11:  # four sizes prepared and timed at the first context, two calls counted
            raise KeyboardInterrupt
        return burst(self, n, *arguments)

    monkeypatch.setattr(Stepper, "burst", stopped)
    flags = ("--shapes", "tiny", "--executions", "eager", "--minutes", "1", "--contexts", "30,60", "--device", "cpu")
    out = call(device_report.main, "--out", tmp_path, *flags)
    assert out.code == 130 and out.err.strip() == f"error: stopped; the report so far: {tmp_path / 'report.html'}"
    found = read(tmp_path)
    assert not found["done"] and [cell["context"] for cell in found["steps"]["cells"]] == [30]
    assert found["checks"] and found["device"] and "tiny, float32, 30 tokens" in found["headline"]
    html = (tmp_path / "report.html").read_text()
    assert (
        "The report is not finished." in html and "4. The tree attention kernel" in html and "Not reached yet." in html
    )


def test_a_failing_execution_is_one_line_and_the_others_go_on(brief, call, tmp_path, monkeypatch):
    burst = Stepper.burst

    def broken(self, n, *arguments):
        if self.name == "static" and n == 80:
            raise RuntimeError("out of\nregisters")
        return burst(self, n, *arguments)

    monkeypatch.setattr(Stepper, "burst", broken)
    out = call(device_report.main, "--out", tmp_path, "--shapes", "tiny", "--executions", "eager,static", *BRIEF)
    assert (
        out.code == 1 and "FAILED: static steps of tiny in float32 at 40 tokens: RuntimeError: out of regi" in out.out
    )
    assert [cell["execution"] for cell in read(tmp_path)["steps"]["cells"]] == ["eager"]
    html = (tmp_path / "report.html").read_text()
    assert html.index("out of registers") < html.index("1. The device"), "failures come first"


def test_what_does_not_fit_is_cut_with_a_note(brief, tmp_path):
    seconds = iter(range(0, 10**6, 20))
    report = Report(tmp_path, Budget(1, lambda: next(seconds)), 2.7)
    wanted = make_plan(CPU, shapes="tiny,small", executions="eager,compiled", contexts="30,60")
    rates = run.measure_rates(CPU, torch.float32)
    found = steps.time_steps(wanted, report, {torch.float32: rates})
    assert [cell["context"] for cell in found.cells] == [30], "the first is measured, however little time there is"
    assert [note.split(":")[0] for note in report.data["notes"]] == ["steps"] * 3
    assert "compiling would not fit" in report.data["notes"][0] and "60 tokens" in report.data["notes"][1]
    assert "small in float32 was cut" in report.data["notes"][2]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--shapes", "vicuna"], "--shapes vicuna: unknown; use embedded, vicuna-7b"),
        (["--dtype", "int8"], "--dtype int8: use auto, float16"),
        (["--contexts", "200,many"], "--contexts many: must be whole numbers"),
        (["--contexts", "5000"], "--contexts 5000: must be whole numbers from 2 to 3840"),
        (["--contexts", "200,"], "--contexts '200,'"),
        (["--executions", "graph", "--device", "cpu"], "--executions graph: needs CUDA"),
        (["--executions", "fast"], "--executions fast: use eager"),
        (["--mat", "0.5"], "--mat 0.5: must be a number from 1"),
        (["--mat", "nan"], "--mat nan"),
        (["--minutes", "0"], "--minutes 0: must be a number from 0.05"),
        (["--against", "nowhere.json"], "--against nowhere.json: not a report"),
        (["--device", "quantum"], "quantum: unknown device"),
    ],
)
def test_wrong_flags_are_one_line(call, tmp_path, flags, told):
    out = call(device_report.main, "--out", tmp_path, *flags)
    assert out.code == 2 and out.err.startswith("error: ") and told in out.err and out.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_everything_from_outside_is_escaped(tmp_path):
    bad = "<script>alert('x')</script>&"
    where = {"model": bad, "dtype": bad, "execution": bad, "context": 3}
    cell = where | {"rounds": 1, "plain_s": 1.0, "step_s": {"0": 1.0, "80": 2.0}, "floor_share": 0.5}
    expected = {"nodes": 1, "mat": 2.0, "tokens_per_second": 3.0, "speedup": 1.0}
    rates = {bad: {"bytes_per_second": 1.0, "flop_per_second": 1.0}}
    data = {
        "mat": 2.7,
        "made": bad,
        "notes": [bad],
        "headline": bad,
        "device": dict(device=bad, platform=bad, threads=1, cuda=bad, git={"commit": bad}, versions={bad: bad})
        | {"rates": rates},
        "checks": [{"dtype": bad, "execution": bad, "method": bad, "passed": False, "found": bad}],
        "tests": {"passed": 0, "skipped": 0, "failed": [bad], "problem": bad},
        "steps": {"cells": [cell], "failures": [where | {"error": bad}]},
        "kernel": {"rows": [dict(heads=1, kv_heads=1, dim=1, nodes=1, length=1, error=bad)], "dtype": bad},
        "calls": [where | {"nodes": None, "calls": bad}, where | {"nodes": 80, "calls": {bad: 1.0}}],
        "setup": [where | {"steps": 1, "first_s": 1.0, "others_s": 0.0, "slowest_other_s": 0.0, "bytes": 2**20}],
        "forecast": [where | {"plain_s": 1.0, "published": expected, "best": expected, "auto": expected}],
        "against": [where | {"ratio": {bad: 1.0}, "median": 1.0}],
    }
    html = page(data)
    assert html.count(bad) == 0 and "<script" not in html and html.count("&lt;script&gt;") > 30
    Balanced(html)


WITHOUT = ("hydra", "omegaconf", "fastchat", "pandas", "matplotlib", "psutil", "accelerate", "datasets", "pytest")


@pytest.mark.slow
def test_it_runs_where_nothing_else_is_installed(tmp_path):
    """torch, transformers, safetensors and numpy, and what they need themselves; everything else cannot be imported."""
    code = f"""
import runpy, sys
for name in {WITHOUT}:
    sys.modules[name] = None
from evaluation.timing import checks, plan, steps
checks.PROMPTS, checks.TOKENS, plan.SIZES_CPU, steps.MOST_ROUNDS = 1, 4, (0, 80), 1
sys.argv = ["device_report", *sys.argv[1:]]
runpy.run_module("evaluation.device_report", run_name="__main__")
"""
    flags = ["--out", str(tmp_path), "--shapes", "tiny", "--executions", "eager,static", *BRIEF]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = read(tmp_path)
    assert found["done"] and all(row["passed"] for row in found["checks"]) and len(found["steps"]["cells"]) == 2
    assert re.search(r"^On this device: 2\.2\.2 at MAT 2\.70", done.stdout, flags=re.M)


def test_a_search_that_fails_or_is_wrong_stands_first(monkeypatch):
    def broken(choice, logits):
        if logits.shape[1] == 32000:
            raise RuntimeError("out of\nregisters")
        return torch.zeros(len(logits), dtype=torch.long), torch.zeros(len(logits), 8, dtype=torch.long)

    monkeypatch.setattr(kernel, "_engine_search", broken)
    monkeypatch.setattr(kernel, "VOCABULARIES", {"Vicuna": 32000, "small": 500, "Qwen3": 151936})
    kept = {}
    notes, left, plan = [], [1.0, 1.0, 0.0], SimpleNamespace(device=CPU, dtypes=(torch.float32,))
    budget = SimpleNamespace(left=lambda: left.pop(0))
    report = SimpleNamespace(keep=lambda **sections: kept.update(sections), budget=budget, note=notes.append)
    kernel.compare_searches(plan, report)
    assert notes == ["greatest logits: Qwen3's vocabulary was cut, the time was used up"]
    assert failures(kept) == [
        "top-k over 32000 columns: RuntimeError: out of registers",
        "top-k over 500 columns: not the one of torch",
    ]
    html = page(kept)
    assert html.index("not the one of torch") < html.index("1. The device") and ">WRONG<" in html
