"""SPEED-Bench: files of its layout, made here: placeholders in them, what is no such file, a run end to end."""

import json

import numpy as np
import pandas as pd
import pytest

from evaluation.loading import bench
from evaluation.loading.bench import load_bench
from evaluation.records.rows import subtask
from model.errors import UserError

HIDDEN = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"  # as published
TURNS = {
    "coding": ["Write f.", "Test it."],
    "qa": ["Why?"],
    "summarization": [f"{HIDDEN}\n\nSum up"],
}


def rows():
    """Rows of the published files."""
    return [
        {"question_id": f"{i:032x}", "category": category, "turns": said, "difficulty": "easy"}
        for i, (category, said) in enumerate(TURNS.items())
    ]


def prepared(path):
    """The file that NVIDIA's prepare.py writes: messages in the place of turns."""
    lines = []
    for row in rows():
        row["messages"] = [{"role": "user", "content": turn} for turn in row.pop("turns")]
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines))
    return path


def load(path, **settings):
    return load_bench("speed_bench", str(path), layout="speed_bench", **settings)


def test_messages_are_turns_and_placeholders_are_refused_or_left_out(tmp_path):
    path = prepared(tmp_path / "qualitative.jsonl")
    with pytest.raises(UserError, match="1 prompts are placeholders.*=skip"):
        load(path)
    first, second = load(path, placeholders="skip").questions
    assert first.question_id == "0" * 32 and list(first.turns) == TURNS["coding"]
    assert subtask(first.category) == first.category == "speed_coding", "not MT-bench's"
    assert load(path, categories=["speed_qa"]).questions == (second,)
    path.write_text("\n".join(map(json.dumps, rows())))
    assert load(path, placeholders="skip").questions == (first, second), "turns are read, too"


def test_another_file_is_named_in_a_line(tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question_id": "1", "category": "qa", "messages": "text"}')
    with pytest.raises(UserError, match="q.jsonl:1: turns: must be a list"):
        load(tmp_path / "q.jsonl")


@pytest.fixture
def parquet(tmp_path, monkeypatch):
    """A parquet file, whose frame is made by hand, as pyarrow is no requirement: turns are arrays."""
    frame = pd.DataFrame([row | {"turns": np.array(row["turns"], dtype=object)} for row in rows()])
    monkeypatch.setattr(bench.pd, "read_parquet", lambda file: frame)
    (tmp_path / "q.parquet").write_bytes(b"PAR1")
    return tmp_path / "q.parquet"


def test_parquet_as_pandas_gives_it(parquet, monkeypatch):
    assert [list(q.turns) for q in load(parquet, placeholders="skip").questions] == [
        *TURNS.values()
    ][:2]

    def fail(file):
        raise ImportError("pip install pyarrow")

    monkeypatch.setattr(bench.pd, "read_parquet", fail)
    with pytest.raises(UserError, match="q.parquet .*pip install pyarrow"):
        load(parquet)
    with pytest.raises(UserError, match=r"no.parquet does not exist"):
        load(parquet.with_name("no.parquet"))


def test_fetched_without_a_hash_it_is_printed_and_a_prepared_file_needs_none(
    parquet, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    settings = {"url": parquet.as_uri(), "placeholders": "skip"}
    digest = load(tmp_path / "here.parquet", **settings).sha256
    assert f"bench.sha256={digest}" in capsys.readouterr().err
    settings["sha256"] = "0" * 64
    assert load(prepared(tmp_path / "own.jsonl"), **settings).sha256 != digest
