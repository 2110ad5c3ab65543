"""The frozen table's command: from files of token ids to a table that the drafter takes."""

import json

import pytest

from model.ngrams.ngram_cache import NgramCache
from tools.ngram_table import main

IDS = [1, 5, 6, 7, 1, 5, 6, 8, 1, 2, 3, 4]


def files(tmp_path):
    """The same ids in both forms."""
    (tmp_path / "ids.jsonl").write_text(json.dumps(IDS) + "\n[9]\n")
    row = {"question_id": 1, "choices": [{"output_ids": [IDS, []]}]}
    row["choices"][0]["turns"] = ["one\u2028line"]  # where splitlines() had cut
    (tmp_path / "answers.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    return [tmp_path / name for name in ("ids.jsonl", "answers.jsonl")]


def test_a_table_is_made_from_each_form(tmp_path):
    output = tmp_path / "table.safetensors"
    for path in files(tmp_path):
        main([str(path), "--vocab-size", "61", "--output", str(output), "--follower", "2"])
        drafter = NgramCache(61, follower=2, table_path=str(output))
        assert drafter.due((1,)) == [(5, 6), (2, 3)] and drafter.due((6,)) == [(7, 1), (8, 1)]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", "[1, 2]\n[1, 99]\n", "line 2: token id 99 is outside the vocabulary of 61"),
        ("a.jsonl", "[1, 2.5]\n", "line 1: must be a list of token ids"),
        ("a.jsonl", '{"text": "no ids"}\n', "line 1: neither a list"),
        ("a.jsonl", "[1,\n", "line 1: neither a list"),
        ("a.jsonl", "[1, 2]\n", "no n-gram of 1 + 3 tokens"),
        ("a.jsonl", "1 2 3\n", "line 1: neither a list"),
    ],
)
def test_other_content_is_refused_in_one_line(tmp_path, capsys, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / name), "--vocab-size", "61", "--output", str(tmp_path / "out")])
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and message in told and told.count("\n") == 1
    assert not (tmp_path / "out").exists()
