"""Answer files of others: Spec-Bench's own arithmetic, and each defect named with its file and line."""

import json
import random
import re
from functools import reduce
from operator import getitem

import pandas as pd
import pytest

from evaluation import report
from evaluation.page.facts import facts
from evaluation.records.rows import MT_BENCH, parse_answers
from evaluation.records.runs import read_foreign
from evaluation.records.store import mark_of, missing_jobs, not_available
from evaluation.tables.experiment import Experiment
from evaluation.tables.notes import heading
from model.files import write_json
from tests.evaluation.made_runs import answer, asked, made, write

OTHERS = ["translation", "summarization", "qa", "math_reasoning", "rag"]
CATEGORIES = [*MT_BENCH, *OTHERS]
ROWS = [answer(i, "qa", [([2, 2], 1.0), ([1], 0.5)]) for i in range(3)]
MISSING = object()


def rows_of(seed, plain):
    """Answers of random length, two turns where the label is MT-bench's."""
    rng = random.Random(seed)
    rows = []
    for i in range(65):
        category = CATEGORIES[i % 13]
        turns = []
        for _ in range(2 if category in MT_BENCH else 1):
            lengths = [1 if plain else rng.randint(1, 6) for _ in range(rng.randint(5, 40))]
            turns.append((lengths, sum(lengths) * rng.uniform(0.01, 0.03)))
        rows.append(answer(81 + i, category, turns))
    return rows


def write_answers(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def spec_bench(rows, base, task):
    """evaluation/speed.py there: tokens/s, MAT, and the ratio of the two files' tokens/s."""
    categories = {"overall": CATEGORIES, "mt_bench": MT_BENCH}.get(task, [task])

    def speed(file):
        choices = [row["choices"][0] for row in file if row["category"] in categories]
        return sum(sum(c["new_tokens"]) / sum(c["wall_time"]) for c in choices) / len(choices)

    lengths = []
    for row in rows:
        if row["category"] in categories:
            lengths += row["choices"][0]["accept_lengths"]
    return speed(rows), sum(lengths) / len(lengths), speed(rows) / speed(base)


def test_equal_to_spec_benchs_own_arithmetic(call, tmp_path):
    method = rows_of(1, False)
    base = rows_of(2, True)
    write_answers(tmp_path / "vicuna-7b-v1.3-eagle2-float16.jsonl", method)
    write_answers(tmp_path / "vicuna-7b-v1.3-vanilla-float16.jsonl", base)
    out = tmp_path / "deep/main.csv"
    outcome = call(report.main, "--answers", tmp_path / "*.jsonl", "--out", out)
    assert outcome.code == 0, outcome.err
    assert "speedup_vanilla" in outcome.out and "not recorded" in outcome.out
    table = pd.read_csv(out)
    table = table[table["method"] == "vicuna-7b-v1.3-eagle2-float16"].set_index("category")
    assert list(table.index) == ["mt_bench", *OTHERS, "overall"]
    for task, row in table.iterrows():
        figures = row[["tokens_per_second", "mat", "speedup_vanilla"]].tolist()
        assert figures == pytest.approx(spec_bench(method, base, task), abs=1e-9)


@pytest.mark.parametrize(("hashed", "speedup"), [(True, 2.0), (False, (3 * 2 + 10) / 4)])
def test_questions_are_told_apart_where_all_files_know_them(hashed, speedup, tmp_path):
    plain = [asked(i, "qa", [([1], 1.0)]) for i in range(4)]
    faster = [asked(i, "qa", [([1], 0.5)]) for i in range(3)]
    faster.append(asked(3, "qa", [([1], 0.1)], "how?"))
    if not hashed:
        plain = [answer(i, "qa", [([1], 1.0)]) for i in range(4)]
    write_answers(tmp_path / "vanilla.jsonl", plain)
    write_answers(tmp_path / "mine.jsonl", faster)
    table = Experiment(read_foreign(str(tmp_path / "*.jsonl"))).table
    (row,) = table[(table["method"] == "mine") & (table["category"] == "overall")].to_dict(
        "records"
    )
    assert row["speedup_vanilla"] == pytest.approx(speedup)


def test_the_baseline_is_the_file_that_is_named_and_no_model_called_hf(call, tmp_path):
    write_answers(tmp_path / "llama-2-7b-hf-eagle.jsonl", rows_of(1, False))
    write_answers(tmp_path / "llama-2-7b-own.jsonl", rows_of(1, True))
    arguments = ("--answers", tmp_path / "*.jsonl", "--out", tmp_path / "main.csv")
    assert "speedup" not in call(report.main, *arguments).out
    outcome = call(report.main, *arguments, "--baseline", tmp_path / "llama-2-7b-own.jsonl")
    assert outcome.code == 0 and "speedup_vanilla" in outcome.out
    methods = pd.read_csv(tmp_path / "main.csv")["method"]
    assert [*methods.unique()] == ["vanilla", "llama-2-7b-hf-eagle"]


def test_what_is_odd_is_named_and_nothing_is_guessed(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = rows_of(1, False)
    write_answers(tmp_path / "b.jsonl", rows)
    write_answers(tmp_path / "a.jsonl", rows[:5])
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{torn")
    outcome = call(report.main, "--answers", "*.jsonl")
    assert outcome.code == 0 and "1 broken line(s), first line 6: " in outcome.err
    assert "incomplete: a, repeat 0: 5 of 65 questions" in outcome.out
    assert "speedup" not in outcome.out
    (tmp_path / "c.txt").write_text("nothing\n")
    (tmp_path / "d [1].txt").write_text(spoilt("accept_lengths", [2.0, 1.5]))
    for arguments, why in (
        (["--answers", "none/*.jsonl"], "no such file"),
        (["--answers", "c.txt"], "holds no answer"),
        (["--answers", "d [1].txt"], "first line 1: accept_lengths: must be a list of int\n"),
        ([], "name an experiment"),
        ([tmp_path, "--out", "x.csv"], "--out, --baseline: with --answers only"),
        ([tmp_path, "--baseline", "x.jsonl"], "--out, --baseline: with --answers only"),
    ):
        assert why in call(report.main, *arguments).err


def spoilt(key, value):
    """The second row with another value in it, or without the key."""
    row = json.loads(json.dumps(ROWS[1]))
    where = row if key in row else row["choices"][0]
    where.pop(key, None)
    if value is not MISSING:
        where[key] = value
    return json.dumps(row)


BROKEN = {
    "question_id": (MISSING, [1], True, -1),
    "choices": (MISSING, [], {"turns": []}, [3]),
    "turns": (MISSING, ["text", None], []),
    "new_tokens": (MISSING, [4], ["4", "1"], [4, -1]),
    "wall_time": (None, 1.5, [1.0, float("nan")], [1.0, float("inf")]),
    "accept_lengths": (3, [2, "2", 1], [2, None, 1], [[2, 2], [1]]),
    "decode_time": ([1.0, -0.5],),
    "output_ids": ([1, 2], [[1, None], [1]], [[2**63], [1]]),
}
LINES = [(spoilt(key, value), f"{key}: must be") for key in BROKEN for value in BROKEN[key]]
LINES += [("null", "not a JSON object"), ('{"question_id": 1, "ch', "not JSON")]


@pytest.mark.parametrize(("line", "why"), LINES)
def test_a_broken_line_is_named_and_left_out(line, why):
    rows, damage = parse_answers([json.dumps(ROWS[0]), line, json.dumps(ROWS[2])])
    assert list(rows) == [0, 2] and damage.startswith(f"1 broken line(s), first line 2: {why}")


def test_odd_names_and_a_damaged_folder_are_reported_and_named(call, tmp_path, drawn):
    categories = ["a|b", "overall", "half", "$x^$", "a\nb"]
    rows = []
    for i, name in enumerate(categories):
        rows.append(answer(i, name, [([2, 1], 1.0)], output_ids=[[i, 1, 2]]))
    folders = [write(made(label, rows), tmp_path) for label in ("p$_{l}d^$", "cut", "empty")]
    (folders[1] / "metadata.json").write_text('{"settings": {')
    (folders[2] / "answers.jsonl").unlink()
    outcome = call(report.main, tmp_path)
    assert outcome.code == 0, outcome.err
    assert re.search("left out: .*/cut.*: its metadata.json is missing or broken", outcome.err)
    assert re.search("left out: .*/empty.*: its answers.jsonl is missing or broken", outcome.err)
    table = pd.read_csv(tmp_path / "tables/main.csv")
    named = ["$x^$", "a\nb", "a|b", "half", "overall (category)", "overall"]
    assert table["category"].tolist() == named
    text = (tmp_path / "tables/main.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("accept_lengths", None),
        ("accept_lengths", MISSING),
        ("category", None),
        ("decoding_steps", None),
        ("decode_time", [None, None]),
    ],
)
def test_what_a_table_of_speeds_does_without_may_be_missing(key, value, call, tmp_path):
    """Times count all the same; MAT is over the other answers."""
    write_answers(tmp_path / "vanilla.jsonl", ROWS)
    lines = [json.dumps(ROWS[0]), spoilt(key, value), json.dumps(ROWS[2])]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    arguments = ("--answers", tmp_path / "*.jsonl", "--out", tmp_path / "main.csv")
    outcome = call(report.main, *arguments)
    assert outcome.code == 0 and "broken" not in outcome.err
    without = "1 answer(s) without accept_lengths, which count in no MAT"
    assert (without in outcome.err) is (key == "accept_lengths")
    assert re.search(r"^mine +3 .*1\.67 .*1\.00", outcome.out, re.M)


ODD = ("x", 3, [], {"a": 1}, None)
# of a run's metadata: places whose odd values ended the whole report in a traceback
PLACES = """settings device label questions versions config circumstances converted_from summary
question_hashes draft_tree cores_busy_elsewhere settings.model settings.bench settings.method
settings.sampling settings.max_new_tokens settings.model.name settings.method.name"""


@pytest.mark.parametrize("place", PLACES.split())
def test_a_run_whose_metadata_is_of_odd_types_is_named_and_left_out(place, tmp_path, capsys):
    write(made("vanilla", [answer(1, "qa", [([2], 1.0)])]), tmp_path)
    folder = write(made("pld", [answer(1, "qa", [([2], 1.0)])], started="2026"), tmp_path)
    good = (folder / "metadata.json").read_text()
    left_out = 0
    for odd in ODD:
        metadata = json.loads(good)
        *parents, key = place.split(".")
        reduce(getitem, parents, metadata)[key] = odd
        write_json(folder / "metadata.json", metadata)
        experiment = Experiment.read(tmp_path)
        assert facts(experiment.pools) and len(experiment.table) and heading(experiment.runs)
        named = capsys.readouterr().err.count(str(folder))
        assert named == 2 - len(experiment.runs), "once, or it counts"
        left_out += named
    assert left_out >= 1


def test_a_mark_and_a_sweep_of_odd_types_are_those_of_no_job(tmp_path):
    sweep = {"command": "c", "jobs": [["method=pld"], ["method=sps"]]}
    write_json(tmp_path / "sweep.json", sweep)
    for job, mark in zip(sweep["jobs"], ({"run": ["a"]}, {"runs": 3}), strict=True):
        write_json(mark_of(tmp_path, job), mark)
    assert missing_jobs(tmp_path).startswith("missing: 2 of 2 jobs")
    for broken in ({"jobs": 5}, {"jobs": [[1]]}, {"not_available": "x"}):
        write_json(tmp_path / "sweep.json", sweep | broken)
        assert missing_jobs(tmp_path) == "" and not not_available(tmp_path)
