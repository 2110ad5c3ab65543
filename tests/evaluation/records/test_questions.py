"""Benches: reading, selecting, fetching by hash, and every broken file told by name and line."""

import hashlib
import json

import pytest

from evaluation.loading import bench
from evaluation.loading.bench import load_bench
from evaluation.records.rows import read_questions
from model.errors import UserError

GOOD = {"question_id": 1, "category": "qa", "turns": ["why?"]}


def write(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_halves_of_characters_are_replaced_and_named(tmp_path, capsys):
    row = '{"question_id": 1, "category": "qa", "turns": ["\\ud83d\\ude00 \\uD83D"]}'
    (question,) = read_questions(write(tmp_path / "q.jsonl", row))
    assert question.turns == ("\N{GRINNING FACE} \ufffd",)
    assert capsys.readouterr().err.startswith(f"{tmp_path}/q.jsonl:1: a half character")


@pytest.fixture
def path(tmp_path):
    """One question a category, but two of math and of qa."""
    categories = ["math", "stem", "qa", "math", "qa", "zoo"]
    rows = [GOOD | {"question_id": i, "category": c} for i, c in enumerate(categories)]
    return str(write(tmp_path / "q.jsonl", *rows))


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"begin": 1, "end": 4}, [1, 2, 3]),
        ({"per_category": 1}, [0, 2, 5]),
        ({"categories": ["mt_bench", "zoo"]}, [0, 1, 3, 5]),
        ({"split": "dev"}, [0, 2, 3, 5]),  # 0, 1 and 3 are mt_bench's
        ({"split": "held_out"}, [1, 4]),
        ({"split": "held_out", "per_category": 1}, [1, 4]),
        ({"split": "dev", "begin": 1}, [2, 3, 5]),  # a slice has the same halves
        ({"split": "held_out", "begin": 1}, [1, 4]),
    ],
)
def test_selection(settings, ids, path):
    assert [question.question_id for question in load_bench("x", path, **settings).questions] == ids


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"begin": 6}, "no question is left of 6"),
        ({"categories": ["qa", "rag"]}, "bench.categories=rag: not in .* mt_bench, qa, zoo"),
    ],
)
def test_a_selection_that_makes_no_sense_is_refused(settings, why, path):
    with pytest.raises(UserError, match=why):
        load_bench("x", path, **settings)


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ("{broken", "not JSON"),
        ("[1]", "not a JSON object"),
        ({"category": "qa", "question_id": 2}, "turns: must be a list of str"),
        (GOOD | {"question_id": 2, "turns": []}, "turns: must be a list of str"),
        (GOOD | {"question_id": 2, "turns": ["  "]}, "turns: must hold"),
        ({"question_id": 2, "turns": ["a"]}, "category: must be str"),
        (GOOD, "question_id 1 is that of .*q.jsonl:1"),
        (GOOD | {"question_id": "1"}, "question_id 1 is that of .*q.jsonl:1"),
        (GOOD | {"question_id": -1}, "question_id: must be int or str"),
        (GOOD | {"question_id": True}, "question_id: must be int or str"),
    ],
)
def test_a_broken_line_is_named(tmp_path, second, says):
    with pytest.raises(UserError, match=f"q.jsonl:2: {says}"):
        read_questions(write(tmp_path / "q.jsonl", GOOD, second))


def test_missing_or_empty_file(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_questions(tmp_path / "q.jsonl")
    with pytest.raises(UserError, match="is empty"):
        read_questions(write(tmp_path / "q.jsonl"))


def test_fetched_once_and_only_with_the_right_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    source = write(tmp_path / "source.jsonl", GOOD)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    here = tmp_path / "data" / "question.jsonl"
    with pytest.raises(UserError, match="sha256.*expected 000000.*nothing was kept"):
        load_bench("x", str(here), url=source.as_uri(), sha256="0" * 64)
    assert not here.exists() and not list(tmp_path.glob("data/*"))
    assert load_bench("x", str(here), url=source.as_uri(), sha256=digest).sha256 == digest
    source.unlink()  # a second use does not fetch
    assert load_bench("x", str(here), url=source.as_uri(), sha256=digest).sha256 == digest
    here.write_text(json.dumps(GOOD | {"turns": ["changed"]}))
    with pytest.raises(UserError, match="delete it to fetch it again"):
        load_bench("x", str(here), url=source.as_uri(), sha256=digest)


def test_no_network_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    with pytest.raises(UserError, match=r"cannot fetch http://127.0.0.1:9/x .*bench.path="):
        load_bench("x", str(tmp_path / "q.jsonl"), url="http://127.0.0.1:9/x", sha256="0" * 64)
