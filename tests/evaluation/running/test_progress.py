"""One line in a terminal, a line a minute in a log."""

import itertools
import sys

from evaluation.running.scheduling import Progress


def test_a_log_gets_one_plain_line_a_minute(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with Progress("recycling (hot)", total=400, done=10) as shown:
        for now[0] in range(1, 151):
            shown.set_postfix_str("MAT 2.00, 2 tokens/s", refresh=False)
            shown.update()
    now[0] = 0.0
    with Progress("9 configurations, interleaved", total=400, done=40) as shown:
        now[0] = 8192.0
        shown.update(8)
    assert capsys.readouterr().err.splitlines() == [
        "recycling (hot): 70 of 400 answers, MAT 2.00, 2 tokens/s; 05:30 left",
        "recycling (hot): 130 of 400 answers, MAT 2.00, 2 tokens/s; 04:30 left",
        "9 configurations, interleaved: 48 of 400 answers; 100:07:28 left",
    ]


def test_a_terminal_gets_a_line_that_is_written_over(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("tqdm.std.time", itertools.count().__next__)
    with Progress("2 configurations, interleaved", total=2) as shown:
        for _ in range(2):
            shown.update()
    *first, last = capsys.readouterr().err.split("\r")[1:]
    assert first[0].startswith(
        "2 configurations, interleaved: 1 of 2 answers; "
    ) and "\n" not in "".join(first)
    assert last.startswith("2 configurations, interleaved: 2 of 2 answers; ") and last.endswith(
        "\n"
    )
