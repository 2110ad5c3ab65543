"""Answer files of others, as they come: each defect is told with its file and line, and nothing ends in a traceback."""

import json
import re

import pandas as pd

from evaluation import report
from evaluation.records.rows import parse_answers, read_answers
from evaluation.records.runs import read_foreign
from evaluation.statistics.experiment import Experiment
from tests.evaluation.made_runs import answer, made, write

ROWS = [answer(i, "qa", [([2, 2], 1.0), ([1], 0.5)]) for i in range(3)]
MISSING = object()


def spoilt(key, value):
    """The second row with another value in it, or without the key."""
    row = json.loads(json.dumps(ROWS[1]))
    where = row if key in (*row, "peak_memory") else row["choices"][0]
    where.pop(key, None) if value is MISSING else where.update({key: value})
    return json.dumps(row)


def test_a_byte_order_mark_is_no_part_of_the_first_answer(tmp_path):
    (tmp_path / "a.jsonl").write_text("\ufeff" + json.dumps(ROWS[0]))
    assert read_answers(tmp_path / "a.jsonl") == ({0: ROWS[0]}, "")


BROKEN = {
    "question_id": (MISSING, None, [1], True, -1),
    "choices": (MISSING, [], {"turns": []}, [3]),
    "turns": (MISSING, "text", ["text", None], []),
    "new_tokens": (MISSING, [4], ["4", "1"], [4, -1], [4, True]),
    "wall_time": (None, 1.5, [1.0, float("nan")], [1.0, float("inf")], [10**400, 1]),
    "accept_lengths": (3, "221", [2, "2", 1], [2, None, 1], [2, -2, 1], [[2, 2], [1]]),
    "decoding_steps": (2,),
    "decode_time": ([1.0, -0.5],),
    "output_ids": ([1, 2], [None, [1]], [[1, None], [1]], [[2**63], [1]]),
    "step_nodes": ([[None], [1]],),
    "repeated_3grams": (["much", 0.1],),
    "step_paths": ([[0], [1]],),
    "first_tokens": (["1", 1],),
    "first_token_time": (["soon", 0.1],),
    "engine_means": ([1, {}],),
    "ids_remade": (["no", True],),
    "step_us": ([5], [[5, -1]], [[0.5]]),
    "peak_memory": ("much",),
}


def test_a_broken_line_is_named_and_left_out():
    lines = [
        (spoilt(key, value), f"{key}: must be")
        for key, values in BROKEN.items()
        for value in values
    ]
    lines += [
        ("null", "not a JSON object"),
        ('{"question_id": 1, "ch', "not JSON"),
        ("[" * 100_000, "not JSON"),
    ]
    for line, why in [*lines, ('{"question_id": ' + "9" * 5000 + "}", "not JSON")]:
        rows, damage = parse_answers([json.dumps(ROWS[0]), line, json.dumps(ROWS[2])])
        assert list(rows) == [0, 2] and damage.startswith(f"1 broken line(s): 2 (line 2: {why}"), (
            line[:80]
        )
    rows, damage = parse_answers([json.dumps(ROWS[0]), json.dumps(ROWS[0] | {"category": "later"})])
    assert (
        rows[0]["category"] == "later"
        and damage == "1 question id(s) repeated, the later one counts: 0"
    )
    rows, damage = parse_answers([json.dumps(ROWS[1]), json.dumps(ROWS[1] | {"question_id": "1"})])
    assert list(rows) == [1] and "1 question id(s) repeated" in damage, (
        "1 and its text are one question"
    )


def test_odd_names_and_a_damaged_folder_are_reported_and_named(call, tmp_path, drawn):
    """Each had ended in a traceback, broken main.md, or vanished without a word."""
    categories = ["a|b", "overall", "half \ud800", "$x^$", "a\nb"]
    for label, seconds in (("vanilla", 2.0), ("p$_{l}d^$", 1.0)):
        rows = [
            answer(i, name, [([2, 1], seconds)], output_ids=[[i, 1, 2]])
            for i, name in enumerate(categories)
        ]
        write(made(label, rows), tmp_path)
    rows[4]["choices"][0]["output_ids"] = None
    for name in ("cut", "empty"):
        path = write(made(name, rows), tmp_path)
        path.rename(path.with_name(name))
    (tmp_path / "runs/cut/metadata.json").write_text('{"settings": {')
    (tmp_path / "runs/empty/answers.jsonl").unlink()
    write(made("pld", rows), tmp_path)
    outcome = call(report.main, tmp_path)
    assert outcome.code == 0, outcome.err
    assert (
        f"left out: {tmp_path / 'runs/cut'}: its metadata.json is missing or broken" in outcome.err
    )
    assert (
        f"left out: {tmp_path / 'runs/empty'}: its answers.jsonl is missing or broken"
        in outcome.err
    )
    table = pd.read_csv(tmp_path / "tables/main.csv")
    named = ["$x^$", "a\nb", "a|b", "half ?", "overall (category)", "overall"]
    assert table[table["method"] == "pld"]["category"].tolist() == named
    lines = [
        line
        for line in (tmp_path / "tables/main.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {
        len(re.findall(r"\|", lines[0]))
    }
    assert (
        "all 9 turns equal vanilla's" in outcome.out and "1 turns are not compared" in outcome.out
    )
    assert call(report.main, tmp_path, "--against", tmp_path).code == 0


ODD = {
    **{
        "label": None,
        "device": {},
        "questions": None,
        "versions": {},
        "draft_tree": "x",
        "command": [3],
        "config": 1,
    },
    **{
        "question_hashes": [{}],
        "cores_busy_elsewhere": "x",
        "git": "x",
        "settings": "x",
        "settings.model": 3,
    },
    **{"settings.model.files": 1.5, "settings.max_new_tokens": [[]]},
    **{"settings.method.nodes": [1], "settings.bench.name": [[]], "settings.sampling": "x"},
}


def test_a_run_whose_metadata_is_odd_is_left_out_by_name(call, tmp_path):
    """Each had ended in a traceback, and so had files of no record that are nested too deep or lack a key."""
    write(made("vanilla", ROWS), tmp_path)
    paths = {}
    for key, value in ODD.items():
        run = made("pld", ROWS, folder=key)
        *groups, name = key.split(".")
        inner = run.metadata
        for group in groups:
            inner = inner[group]
        inner[name] = value
        paths[key] = tmp_path / "runs" / key
        write(made("pld", ROWS), tmp_path).rename(paths[key])
        (paths[key] / "metadata.json").write_text(json.dumps(run.metadata))
    (tmp_path / "jobs").mkdir()
    for file, text in (
        ("sweep", '{"jobs": [[1]]}'),
        ("jobs/a", '{"not_available": "x"}'),
        ("audit_gaps", "[" * 9999),
    ):
        (tmp_path / f"{file}.json").write_text(text)
    outcome = call(report.main, tmp_path)
    assert outcome.code == 0 and len(outcome.err.splitlines()) == len(ODD), outcome.err
    assert all(f"left out: {path}: " in outcome.err for path in paths.values())


def test_of_several_answers_to_a_question_the_first_counts_as_in_spec_bench(call, tmp_path):
    row = answer(1, "qa", [([2, 2], 1.0)])
    row["choices"].append(answer(1, "qa", [([8], 1.0)])["choices"][0])
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (run,) = read_foreign(str(tmp_path / "a.jsonl"))
    assert Experiment([run]).table["mat"].tolist() == [2.0, 2.0]


def test_what_a_table_of_speeds_does_without_may_be_missing(call, tmp_path):
    """Times count all the same; MAT is over the other answers."""
    (tmp_path / "vanilla.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    for key, value in (("accept_lengths", None), ("accept_lengths", MISSING), ("category", None),
                       ("decoding_steps", None), ("decode_time", [None, None])):  # fmt: skip
        lines = [json.dumps(ROWS[0]), spoilt(key, value), json.dumps(ROWS[2])]
        (tmp_path / "mine.jsonl").write_text("\n".join(lines))
        outcome = call(
            report.main, "--answers", tmp_path / "*.jsonl", "--out", tmp_path / "main.csv"
        )
        assert outcome.code == 0 and "broken" not in outcome.err and "incomplete" not in outcome.out
        without = f"{tmp_path / 'mine.jsonl'}: 1 answer(s) without accept_lengths, which count in no MAT: 1"
        assert (without in outcome.err) is (key == "accept_lengths")
        assert re.search(r"^mine +3 .*1\.67 .*1\.00", outcome.out, re.M)
