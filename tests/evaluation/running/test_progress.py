"""One line in a terminal, a line a minute in a log."""

import sys

from evaluation.running import progress
from evaluation.running.progress import Progress
from tests.evaluation.made_runs import answer

ROW = answer(1, "qa", [([1, 3], 2.0)])  # MAT 2, 2 tokens/s


def test_a_log_gets_one_plain_line_a_minute(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = Progress("recycling (hot)", total=400, done=10)
    for now[0] in range(1, 151):
        shown.answered(1, [ROW], "recycling (hot)")
    shown.label, now[0] = "9 configurations, interleaved", 7400.0
    shown.answered(9, [ROW] * 2, "pld")
    assert capsys.readouterr().err.splitlines() == [
        "recycling (hot): 70 of 400 answers; MAT 2.00, 2 tokens/s; 0 h 6 min left",
        "recycling (hot): 130 of 400 answers; MAT 2.00, 2 tokens/s; 0 h 4 min left",
        "9 configurations, interleaved: 169 of 400 answers; pld: MAT 2.00, 2 tokens/s; 2 h 59 min left",
    ]


def test_a_terminal_gets_a_line_that_is_written_over(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shown = Progress("2 configurations, interleaved", total=2, done=0)
    for _ in range(2):
        shown.answered(1, [ROW], "pld")
    first, second = capsys.readouterr().err.split("\r\x1b[K")[1:]
    assert first.startswith("2 configurations, interleaved: 1 of 2 answers; pld: MAT 2.00") and "\n" not in first
    assert second.endswith("\n")
