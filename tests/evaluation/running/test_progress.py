"""A bar in a terminal, a line a minute in a log."""

import sys

import pytest

from evaluation.running import progress
from evaluation.running.progress import Progress
from tests.evaluation.made_runs import answer

ROW = answer(1, "qa", [([1, 3], 2.0)])  # MAT 2, 2 tokens/s


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_one_plain_line_a_minute(capsys, clock):
    """A bar had written thousands of characters into it."""
    with Progress("recycling (hot)", total=400, done=10) as shown:
        for second in range(1, 151):
            shown.begin_round(1)
            clock[0] = float(second)
            shown.answered([([ROW], "recycling (hot)")])
        shown.label = "9 configurations, interleaved"
        clock[0] = 190.0
        shown.answered([([ROW] * 2, "pld")])
    assert capsys.readouterr().err.splitlines() == [
        "recycling (hot): 70 of 400 answers; MAT 2.00, 2 tokens/s; 6 min left",
        "recycling (hot): 130 of 400 answers; MAT 2.00, 2 tokens/s; 4 min left",
        "9 configurations, interleaved: 161 of 400 answers; pld: MAT 2.00, 2 tokens/s; 5 min left",
    ]


def test_the_time_left_is_shown_when_all_configurations_have_answered_a_question(capsys, clock):
    """The first of 53 answers, which share forwards, had cost what all of them did: 13 h 58 min instead of 40 min."""
    labels = ["vanilla", *["recycling"] * 52]
    with Progress("53 configurations, interleaved", total=1908, done=1005) as shown:
        for seconds in (300.0, 600.0):  # one that is behind, on its own
            clock[0] = seconds
            shown.answered([([ROW], "pld")])
        shown.begin_round(53)
        clock[0] = 660.0
        shown.answered([([ROW], label) for label in labels[:30]])
        clock[0] = 750.0
        shown.answered([([ROW], label) for label in labels[30:]])  # they ask in another order
        shown.begin_round(53)
        clock[0] = 900.0
        shown.answered([([ROW], label) for label in labels])
    before = "53 configurations, interleaved:"
    assert capsys.readouterr().err.splitlines() == [
        f"{before} 1006 of 1908 answers; pld: MAT 2.00, 2 tokens/s",
        f"{before} 1007 of 1908 answers; pld: MAT 2.00, 2 tokens/s",
        f"{before} 1037 of 1908 answers; vanilla: MAT 2.00, 2 tokens/s",
        f"{before} 1060 of 1908 answers; recycling: MAT 2.00, 2 tokens/s; 40 min left",  # 16 questions of 150 s
        f"{before} 1113 of 1908 answers; vanilla: MAT 2.00, 2 tokens/s; 38 min left",
    ]


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress("2 configurations, interleaved", total=2, done=0) as shown:
        shown.answered([([ROW], "pld"), ([ROW], "vanilla")])
    err = capsys.readouterr().err
    assert "2 configurations, interleaved" in err and "answer" in err and "mat=2.00" in err and "method=pld" in err
    assert "2/2" in err


def test_long_times_are_told_in_hours():
    assert (progress._time(29), progress._time(3599), progress._time(7380)) == ("0 min", "1 h 0 min", "2 h 3 min")
