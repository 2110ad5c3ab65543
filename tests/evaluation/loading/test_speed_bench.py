"""SPEED-Bench: files of its layout, made here: placeholders in them, what is no such file, a run end to end."""

import json

import numpy as np
import pandas as pd
import pytest

from evaluation import prefetch
from evaluation.loading import bench
from evaluation.loading.bench import load_bench
from evaluation.records.questions import subtask
from model.errors import UserError
from tests.evaluation.conftest import answers_in

HIDDEN = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"  # as published
SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
TURNS = {
    "coding": ["Write f.", "Test it."],
    "qa": ["Why?"],
    "summarization": [f"{HIDDEN}\n\nSum up {{article}}"],
}


def rows(turns=TURNS):
    """Rows with all fields of the published files."""
    rest = {"sub_category": None, "source": "https://a", "src_id": "7", "difficulty": "easy"}
    return [
        {
            "question_id": f"{i:032x}",
            "category": category,
            "turns": said,
            **rest,
            "multiturn": len(said) > 1,
        }
        for i, (category, said) in enumerate(turns.items())
    ]


def prepared(path, turns=TURNS):
    """The file that NVIDIA's prepare.py writes: messages in the place of turns."""
    lines = []
    for row in rows(turns):
        messages = [{"role": "user", "content": turn} for turn in row.pop("turns")]
        lines.append(json.dumps(row | {"messages": messages}) + "\n")
    path.write_text("".join(lines))
    return path


def load(path, **settings):
    return load_bench("speed_bench", str(path), layout="speed_bench", **settings)


def test_messages_are_turns_and_categories_rows_of_their_own(tmp_path):
    path = prepared(
        tmp_path / "qualitative.jsonl",
        {"coding": ["Write f.", "Test it."], "low_entropy": ["Sort."]},
    )
    first, second = load(path).questions
    assert (first.question_id, first.turns) == (
        "0" * 32,
        ("Write f.", "Test it."),
    ) and second.turns == ("Sort.",)
    assert subtask(first.category) == first.category == "speed_coding", "not the label of MT-bench"
    assert [q.category for q in load(path, categories=["speed_low_entropy"]).questions] == [
        "speed_low_entropy"
    ]
    flat = tmp_path / "flat.jsonl"
    flat.write_text(
        "".join(json.dumps(row) + "\n" for row in rows({"coding": ["Write f.", "Test it."]}))
    )
    assert load(flat).questions == (first,), "turns are read, too"


def test_placeholders_are_refused_counted_or_left_out(tmp_path):
    path = prepared(tmp_path / "qualitative.jsonl")
    with pytest.raises(
        UserError, match=r"1 prompts are placeholders.*speed_summarization 1.*prepare.py.*=skip"
    ):
        load(path)
    assert len(load(path, placeholders="skip").questions) == len(load(path, categories=["speed_qa", "speed_coding"])
                                                                 .questions) == 2  # fmt: skip
    with pytest.raises(UserError, match="bench.placeholders=drop: must be refuse or skip"):
        load(path, placeholders="drop")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"question_id": 1, "category": "translation", "turns": ["a"]},
            "'translation' is none of SPEED-Bench's",
        ),
        (
            {"question_id": "1", "category": "qa", "messages": [{"role": "user"}]},
            "q.jsonl:1: turns: must be a list",
        ),
        (
            {"question_id": "1", "category": "qa", "messages": "text"},
            "q.jsonl:1: turns: must be a list",
        ),
        (
            {"question_id": "1", "category": "qa", "messages": SYSTEM},
            "q.jsonl:1: a message's role is not user",
        ),
        ([1], "q.jsonl:1: not a JSON object"),
    ],
)
def test_another_file_is_named_in_a_line(tmp_path, row, says):
    (tmp_path / "q.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=says) as raised:
        load(tmp_path / "q.jsonl")
    assert "\n" not in str(raised.value)


def test_parquet_as_pandas_gives_it(tmp_path, monkeypatch):
    """pyarrow is no requirement: pandas' frame of it is made by hand, turns as arrays."""
    path = tmp_path / "q.parquet"
    frame = pd.DataFrame([row | {"turns": np.array(row["turns"], dtype=object)} for row in rows()])
    monkeypatch.setattr(bench.pd, "read_parquet", lambda file: frame)
    path.write_bytes(b"PAR1")
    assert [q.turns for q in load(path, placeholders="skip").questions] == [
        ("Write f.", "Test it."),
        ("Why?",),
    ]
    monkeypatch.setattr(bench.pd, "read_parquet", lambda file: pd.concat([frame, frame]))
    with pytest.raises(UserError, match=r"q.parquet: row 4: question_id 0{32} is that of .*row 1"):
        load(path, placeholders="skip")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ImportError, "pip install pyarrow"),
        (ValueError("x"), "no parquet .x."),
        (KeyError("columns"), "no parquet"),
    ],
)
def test_parquet_that_cannot_be_read(tmp_path, monkeypatch, error, says):
    def read(file):
        raise error

    monkeypatch.setattr(bench.pd, "read_parquet", read)
    with pytest.raises(UserError, match=r"q.parquet does not exist"):
        load(tmp_path / "q.parquet")
    (tmp_path / "q.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=says):
        load(tmp_path / "q.parquet")


def test_fetched_without_a_hash_it_is_printed_and_a_prepared_file_needs_none(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    frame = pd.DataFrame(rows({"qa": ["Why?"]}))
    monkeypatch.setattr(bench.pd, "read_parquet", lambda file: frame)
    (tmp_path / "source.parquet").write_bytes(b"PAR1")
    url = (tmp_path / "source.parquet").as_uri()
    digest = load(tmp_path / "here.parquet", url=url).sha256
    assert f"bench.sha256={digest}" in capsys.readouterr().err
    with pytest.raises(UserError, match="delete it to fetch it again"):
        load(tmp_path / "here.parquet", url=url, sha256="0" * 64)
    assert (
        load(prepared(tmp_path / "own.jsonl", {"qa": ["Why?"]}), url=url, sha256="0" * 64).sha256
        != digest
    )
    # and is not fetched as parquet
    with pytest.raises(UserError, match="none.jsonl does not exist"):
        load(tmp_path / "none.jsonl", url=url, sha256="0" * 64)


def test_a_run_end_to_end(evaluate, call, tmp_path):
    path = prepared(tmp_path / "qualitative.jsonl")
    given = ["bench=speed_bench", f"bench.path={path}", "method=recycling", "name=speed"]
    refused = evaluate(*given)
    assert (
        refused.code == 2
        and refused.err.count("\n") == 1
        and "1 prompts are placeholders" in refused.err
    )
    outcome = evaluate(*given, "bench.placeholders=skip")
    assert outcome.code == 0, outcome.err
    table = pd.read_csv(tmp_path / "results/speed/tables/main.csv")
    assert table["category"].tolist() == ["speed_coding", "speed_qa", "overall"] and set(
        table["bench"]
    ) == {"speed_bench"}
    assert [len(row["choices"][0]["turns"]) for row in answers_in(tmp_path / "results")] == [2, 1]
    missing = call(
        prefetch.main,
        "bench=speed_bench_1k",
        f"bench.path={tmp_path / 'none.parquet'}",
        "method=vanilla",
    )
    assert missing.code == 2 and "missing  bench speed_bench_1k: " in missing.out
