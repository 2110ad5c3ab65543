"""The checks notice what they are for."""

import sys

import pytest
import torch

from evaluation.timing import checks
from evaluation.timing.checks import Difference, check_steps, judge, read_lines, run_tests
from evaluation.timing.page import failures
from evaluation.timing.plan import Budget, make_plan
from evaluation.timing.report import Report
from model.decoding import Verification
from model.decoding.static_step import WholeStep

CPU = torch.device("cpu")


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """Run the checks, briefly."""
    monkeypatch.setattr(checks, "PROMPTS", 1)
    monkeypatch.setattr(checks, "TOKENS", 12)

    def run(executions="eager"):
        report = Report(tmp_path, Budget(5), 2.7)
        return check_steps(make_plan(CPU, executions=executions), report), report

    return run


def test_static_steps_are_the_eager_ones(checked):
    rows, _ = checked()
    assert [(row["execution"], row["method"]) for row in rows] == [("static", name) for name in checks.METHODS]
    assert all(row["passed"] and row["found"] == "equal" for row in rows)


def test_another_token_is_found_with_its_gap(checked, monkeypatch):
    of_report = Verification.of_report

    def wrong(*arguments):
        verification = of_report(*arguments)
        verification.tokens[-1] = 7 if verification.tokens[-1] != 7 else 8
        return verification

    monkeypatch.setattr(Verification, "of_report", wrong)
    rows, report = checked()
    by_method = {row["method"]: row for row in rows}
    assert not by_method["vanilla"]["passed"] and not by_method["recycling"]["passed"]
    assert "prompt 0, token 1: 7, eager has" in by_method["vanilla"]["found"], "its first is the prompt's own"
    assert "prompt 0, token 0: 7, eager has" in by_method["recycling"]["found"]
    assert "logit gap" in by_method["vanilla"]["found"]
    assert by_method["pld"]["passed"], "its steps go another way"
    assert failures(report.data)[0].startswith("static steps of vanilla in float32: prompt 0, token 1")


def test_an_execution_that_breaks_is_a_finding(checked, monkeypatch):
    def broken(self):
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(WholeStep, "run", broken)
    rows, report = checked()
    assert [row["passed"] for row in rows] == [False, False, True, True], "drafts that are fed in take other steps"
    assert rows[0]["found"] == "RuntimeError: no such kernel" and len(failures(report.data)) == 2


def test_what_would_not_fit_is_cut_with_a_note(checked, monkeypatch):
    monkeypatch.setattr(checks, "LONGEST_COMPILE", {"cpu": 1e6})
    rows, report = checked("eager,compiled")
    assert {row["execution"] for row in rows} == {"static"}
    assert report.data["notes"] == [
        "checks: compiled steps of vanilla and what follows in float32 were cut, for want of time"
    ]


@pytest.mark.parametrize(
    ("dtype", "difference", "passes"),
    [
        (torch.float32, None, True),
        (torch.float32, Difference(0, "tokens", 3, 5, 6, 0.0, 1.0), False),
        (torch.float32, Difference(0, "accepted", 3, 5, 6), False),
        (torch.float16, Difference(0, "accepted", 3, 5, 6), True),
        (torch.float16, Difference(0, "tokens", 3, 5, 6, 0.01, 0.02), True),
        (torch.float16, Difference(0, "tokens", 3, 5, 6, 0.03, 0.02), False),
    ],
)
def test_ties_are_no_failures_where_numbers_are_short(dtype, difference, passes):
    assert judge(dtype, difference)[0] is passes


def test_accepted_lengths_are_compared_to_the_end():
    assert checks._first_unequal([1, 2], [1, 2]) is None
    assert checks._first_unequal([1, 2, 3], [1, 5]) == (1, 2, 5)
    assert checks._first_unequal([1, 2], [1, 2, 3]) == (2, 0, 3)


def test_failed_tests_are_named(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 0\n@pytest.mark.skip\ndef test_left(): pass\n"
        "@pytest.mark.parametrize('word', ['two words'])\ndef test_words(word): assert not word\n"
    )
    found = run_tests(60, ("test_it.py",), tmp_path)
    assert found == {
        "passed": 1,
        "skipped": 1,
        "failed": ["test_it.py::test_bad", "test_it.py::test_words[two words]"],
        "problem": None,
    }
    assert "exit code" in run_tests(60, ("nowhere.py",), tmp_path)["problem"]


def test_tests_that_take_too_long_leave_what_was_said(tmp_path):
    (tmp_path / "test_slow.py").write_text("import time\ndef test_slow(): time.sleep(60)\n")
    found = run_tests(0.2, ("test_slow.py",), tmp_path)
    assert found["problem"] == "cut after 0 s" and not found["failed"]
    assert read_lines(["a.py::b PASSED [ 50%]", "a.py::c "])["passed"] == 1


def test_without_pytest_they_are_skipped(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert checks.run_tests(1)["problem"] == "skipped: pytest is not installed"
