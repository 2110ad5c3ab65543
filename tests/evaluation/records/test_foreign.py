"""Other people's answer files in our tables: equal to Spec-Bench's own arithmetic, written out here step by step."""

import json
import random

import pandas as pd
import pytest

from evaluation import report
from evaluation.records.questions import MT_BENCH
from evaluation.records.runs import read_foreign
from evaluation.statistics.experiment import Experiment
from tests.evaluation.made_runs import answer, asked

CATEGORIES = [*MT_BENCH, "translation", "summarization", "qa", "math_reasoning", "rag"]


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


def spec_bench(rows, base, task):
    """evaluation/speed.py there: tokens/s and MAT of a task, and the ratio of the two files' tokens/s."""
    categories = {"overall": CATEGORIES, "mt_bench": MT_BENCH}.get(task, [task])
    of_task, base_of_task = (
        [row for row in file if row["category"] in categories] for file in (rows, base)
    )
    lengths, speeds, speeds0 = [], [], []
    for data in of_task:
        speeds.append(sum(data["choices"][0]["new_tokens"]) / sum(data["choices"][0]["wall_time"]))
        lengths.extend(data["choices"][0]["accept_lengths"])
    for data in base_of_task:
        speeds0.append(sum(data["choices"][0]["new_tokens"]) / sum(data["choices"][0]["wall_time"]))
    speed, speed0 = sum(speeds) / len(speeds), sum(speeds0) / len(speeds0)
    return speed, sum(lengths) / len(lengths), speed / speed0


def test_equal_to_spec_benchs_own_arithmetic(call, tmp_path):
    method, base = rows_of(1, False), rows_of(2, True)
    for name, rows in (
        ("vicuna-7b-v1.3-eagle2-float16", method),
        ("vicuna-7b-v1.3-vanilla-float16", base),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "deep/main.csv"
    outcome = call(report.main, "--answers", tmp_path / "*.jsonl", "--out", out)
    assert outcome.code == 0, outcome.err
    table = pd.read_csv(out)
    table = table[table["method"] == "vicuna-7b-v1.3-eagle2-float16"].set_index("category")
    assert list(table.index) == [
        "mt_bench",
        "translation",
        "summarization",
        "qa",
        "math_reasoning",
        "rag",
        "overall",
    ]
    for task, row in table.iterrows():
        speed, mat, ratio = spec_bench(method, base, task)
        assert row["tokens_per_second"] == pytest.approx(speed, abs=1e-9)
        assert row["mat"] == pytest.approx(mat, abs=1e-9)
        assert row["speedup_vanilla"] == pytest.approx(ratio, abs=1e-9)
    assert "speedup_vanilla" in outcome.out and "not recorded" in outcome.out


def test_questions_are_told_apart_where_all_files_know_them(tmp_path):
    """Answers to other prompts had been compared, as their questions' ids are the same."""

    def speedup(*files):
        for name, rows in zip(("vanilla", "mine"), files, strict=True):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        table = Experiment(read_foreign(str(tmp_path / "*.jsonl"))).table.set_index(
            ["method", "category"]
        )
        return table.loc[("mine", "overall"), "speedup_vanilla"]

    plain = [asked(i, "qa", [([1], 1.0)]) for i in range(4)]
    faster = [
        asked(i, "qa", [([1], 0.5 if i < 3 else 0.1)], "why?" if i < 3 else "how?")
        for i in range(4)
    ]
    assert speedup(plain, faster) == pytest.approx(2.0)
    assert speedup([answer(i, "qa", [([1], 1.0)]) for i in range(4)], faster) == pytest.approx(
        (3 * 2 + 10) / 4
    )


def test_the_baseline_is_the_file_that_is_named_and_no_model_called_hf(call, tmp_path):
    """Llama-2-7b-hf-eagle had been taken for transformers' own decoding."""
    for name, plain in (("llama-2-7b-hf-eagle", False), ("llama-2-7b-own", True)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows_of(1, plain))
        )
    arguments = ("--answers", tmp_path / "*.jsonl", "--out", tmp_path / "main.csv")
    assert "speedup" not in call(report.main, *arguments).out
    outcome = call(report.main, *arguments[:1], tmp_path / "*eagle.jsonl", *arguments[2:], "--baseline",
                   tmp_path / "llama-2-7b-own.jsonl")  # fmt: skip
    assert outcome.code == 0 and "speedup_vanilla" in outcome.out
    table = pd.read_csv(tmp_path / "main.csv")
    assert [*table["method"].unique()] == ["vanilla", "llama-2-7b-hf-eagle"] and table[
        "speedup_vanilla"
    ].notna().all()
    assert (
        "--baseline: with --answers only"
        in call(report.main, tmp_path, "--baseline", "x.jsonl").err
    )


def test_what_is_odd_is_told_and_nothing_is_guessed(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = rows_of(1, False)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:5]) + "{torn")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = call(report.main, "--answers", "*.jsonl")
    assert outcome.code == 0 and "1 broken line(s): 6" in outcome.err
    assert (
        "incomplete: a, repeat 0: 5 of 65 questions" in outcome.out and "speedup" not in outcome.out
    )
    assert (tmp_path / "results/report/tables/main.csv").exists()
    assert "no such file" in call(report.main, "--answers", "none/*.jsonl").err
    (tmp_path / "c.txt").write_text("nothing\n")
    assert "holds no answer" in call(report.main, "--answers", "c.txt").err
    assert "name an experiment" in call(report.main).err
    assert "with --answers only" in call(report.main, tmp_path, "--out", "x.csv").err
