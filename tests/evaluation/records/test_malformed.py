"""Answer files of others, as they come: each defect is told with its file and line, and nothing ends in a traceback."""

import json
import re

import pytest

from evaluation import report
from evaluation.records.rows import parse_answers, read_answers
from tests.evaluation.made_runs import answer

ROWS = [answer(i, "qa", [([2, 2], 1.0), ([1], 0.5)]) for i in range(3)]
MISSING = object()


def spoilt(key, value):
    """The second row with another value in it, or without the key."""
    row = json.loads(json.dumps(ROWS[1]))
    where = row if key in (*row, "peak_memory") else row["choices"][0]
    where.pop(key, None) if value is MISSING else where.update({key: value})
    return json.dumps(row)


BROKEN = [
    ("question_id", MISSING, "question_id: must be"),
    ("question_id", None, "question_id: must be"),
    ("question_id", [1], "question_id: must be"),
    ("choices", MISSING, "choices: must be"),
    ("choices", [], "choices: must be"),
    ("choices", {"turns": []}, "choices: must be"),
    ("choices", [3], "choices: must be"),
    ("turns", MISSING, "turns: must be"),
    ("turns", "text", "turns: must be"),
    ("turns", ["text", None], "turns: must be"),
    ("turns", [], "turns: must be"),
    ("new_tokens", MISSING, "new_tokens: must be"),
    ("new_tokens", [4], "new_tokens: must be"),
    ("new_tokens", ["4", "1"], "new_tokens: must be"),
    ("new_tokens", [4, -1], "new_tokens: must be"),
    ("new_tokens", [4, True], "new_tokens: must be"),
    ("wall_time", None, "wall_time: must be"),
    ("wall_time", 1.5, "wall_time: must be"),
    ("wall_time", ["1.0", "0.5"], "wall_time: must be"),
    ("wall_time", [1.0, -0.5], "wall_time: must be"),
    ("wall_time", [1.0, float("nan")], "wall_time: must be"),
    ("wall_time", [1.0, float("inf")], "wall_time: must be"),
    ("accept_lengths", 3, "accept_lengths: must be"),
    ("accept_lengths", "221", "accept_lengths: must be"),
    ("accept_lengths", [2, "2", 1], "accept_lengths: must be"),
    ("accept_lengths", [2, None, 1], "accept_lengths: must be"),
    ("accept_lengths", [2, -2, 1], "accept_lengths: must be"),
    ("accept_lengths", [[2, 2], [1]], "accept_lengths: must be"),
    ("decoding_steps", 2, "decoding_steps: must be"),
    ("decode_time", [1.0, -0.5], "decode_time: must be"),
    ("prefill_time", "fast", "prefill_time: must be"),
    ("output_ids", [1, 2], "output_ids: must be"),
    ("step_paths", [[0], [1]], "step_paths: must be"),
    ("peak_memory", "much", "peak_memory: must be"),
]
LINES = [
    ('{"question_id": 1, "ch', "not JSON"),
    ("[" * 100_000, "not JSON"),
    ('{"question_id": ' + "9" * 5000 + "}", "not JSON"),
    ("null", "not a JSON object"),
    *((spoilt(key, value), why) for key, value, why in BROKEN),
]


@pytest.mark.parametrize(("line", "why"), LINES)
def test_a_broken_line_is_named_and_left_out(line, why):
    rows, damage = parse_answers([json.dumps(ROWS[0]), line, json.dumps(ROWS[2])])
    assert list(rows) == [0, 2] and damage.startswith(f"1 broken line(s): 2 (line 2: {why}")


UNRECORDED = [("accept_lengths", None), ("accept_lengths", MISSING), ("category", None)]
UNRECORDED += [("decoding_steps", None), ("decoding_steps", [2]), ("decode_time", [1.5]), ("decode_time", [None, None])]


@pytest.mark.parametrize(("key", "value"), UNRECORDED)
def test_what_a_table_of_speeds_does_without_may_be_missing(call, tmp_path, key, value):
    """Times count all the same; MAT is over the other answers."""
    for name, second in (("mine", spoilt(key, value)), ("vanilla", json.dumps(ROWS[1]))):
        (tmp_path / f"{name}.jsonl").write_text("\n".join([json.dumps(ROWS[0]), second, json.dumps(ROWS[2])]))
    without = f"{tmp_path / 'mine.jsonl'}: 1 answer(s) without accept_lengths, which count in no MAT: 1"
    outcome = call(report.main, "--answers", tmp_path / "*.jsonl", "--out", tmp_path / "main.csv")
    assert outcome.code == 0 and "broken" not in outcome.err and "incomplete" not in outcome.out
    assert (without in outcome.err) is (key == "accept_lengths")
    assert re.search(r"^mine +1\.67 .*1\.00", outcome.out, re.M)


def test_a_baseline_without_accepted_lengths(call, tmp_path):
    """Its MAT is unknown, its speed is what it is for."""
    for name, lengths in (("pld", [2, 2, 1]), ("baseline", None)):
        rows = [row | {"choices": [row["choices"][0] | {"accept_lengths": lengths}]} for row in ROWS]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = call(report.main, "--answers", tmp_path / "*.jsonl", "--out", tmp_path / "main.csv")
    assert outcome.code == 0 and "3 answer(s) without accept_lengths" in outcome.err
    vanilla, pld = (line.split() for line in outcome.out.splitlines() if line.startswith(("vanilla", "pld")))
    assert vanilla[1] == "-" and pld[1] == "1.67" and pld[-1].startswith("1.00")


def test_a_byte_order_mark_is_no_part_of_the_first_answer(tmp_path):
    (tmp_path / "a.jsonl").write_text("\ufeff" + json.dumps(ROWS[0]))
    assert read_answers(tmp_path / "a.jsonl") == ({0: ROWS[0]}, "")


def test_a_file_without_an_answer(call, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(spoilt("wall_time", None))
    outcome = call(report.main, "--answers", path)
    assert outcome.code == 2 and f"{path}: holds no answer" in outcome.err and "line 1: wall_time" in outcome.err
