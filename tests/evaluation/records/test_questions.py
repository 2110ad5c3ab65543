"""Benches: reading, selecting, fetching by hash, and every broken file told by name and line."""

import hashlib
import json

import pytest

from evaluation.loading import bench
from evaluation.loading.bench import load_bench
from evaluation.records.questions import read_questions
from model.errors import UserError

GOOD = {"question_id": 1, "category": "qa", "turns": ["why?"]}


def write(path, *rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def test_selection(tmp_path):
    rows = [
        GOOD | {"question_id": i, "category": c}
        for i, c in enumerate(["math", "stem", "qa", "math", "qa", "zoo"])
    ]
    path = str(write(tmp_path / "q.jsonl", *rows))

    def ids(**settings):
        return [q.question_id for q in load_bench("x", path, **settings).questions]

    assert ids() == [0, 1, 2, 3, 4, 5]
    assert ids(begin=1, end=4) == [1, 2, 3]
    assert ids(per_category=1) == [0, 2, 5]
    assert ids(categories=["mt_bench", "zoo"]) == [0, 1, 3, 5]
    assert (ids(split="dev"), ids(split="held_out")) == ([0, 2, 3, 5], [1, 4]), (
        "0, 1 and 3 are mt_bench's"
    )
    assert ids(split="held_out", per_category=1) == [1, 4]
    assert (ids(split="dev", begin=1), ids(split="held_out", begin=1)) == ([2, 3, 5], [1, 4]), (
        "a slice has the same halves"
    )
    with pytest.raises(UserError, match="no question is left of 6"):
        ids(begin=6)
    with pytest.raises(
        UserError, match="bench.categories=rag: not in .* which has mt_bench, qa, zoo"
    ):
        ids(categories=["qa", "rag"])


def test_a_byte_order_mark_is_read_over(tmp_path):
    (tmp_path / "q.jsonl").write_text(json.dumps(GOOD), encoding="utf-8-sig")
    assert [q.question_id for q in read_questions(tmp_path / "q.jsonl")] == [1]


def test_a_folder_holds_its_question_file(tmp_path):
    write(tmp_path / "question.jsonl", GOOD)
    assert len(load_bench("x", str(tmp_path)).questions) == 1


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ("{broken", "q.jsonl:2: not JSON"),
        (
            {"question_id": 2, "category": "qa", "turns": ["\ud800"]},
            "q.jsonl:2: holds a lone surrogate",
        ),
        ("[1]", "q.jsonl:2: not a JSON object"),
        ({"question_id": 2, "category": "qa"}, "q.jsonl:2: turns: must be a list of str"),
        (
            {"question_id": 2, "category": "qa", "turns": []},
            "q.jsonl:2: turns: must be a list of str",
        ),
        ({"question_id": 2, "category": "qa", "turns": ["  "]}, "q.jsonl:2: turns: must hold"),
        ({"question_id": 2, "turns": ["a"]}, "q.jsonl:2: category: must be str"),
        (GOOD, "q.jsonl:2: question_id 1 is that of .*q.jsonl:1"),
        # and had the same key
        (
            GOOD | {"question_id": "1"},
            "q.jsonl:2: question_id 1 is that of .*q.jsonl:1",
        ),
        # answered, left out
        (
            GOOD | {"question_id": -1},
            "q.jsonl:2: question_id: must be int or str",
        ),
        (GOOD | {"question_id": True}, "q.jsonl:2: question_id: must be int or str"),
        ("[" * 100_000, "q.jsonl:2: not JSON"),
        ('{"question_id": ' + "9" * 5000 + "}", "q.jsonl:2: not JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path, second, says):
    with pytest.raises(UserError, match=says):
        read_questions(write(tmp_path / "q.jsonl", GOOD, second))


def test_a_question_with_unusual_line_ends_is_one_record(tmp_path):
    """U+2028, U+2029 and U+0085 end a line for splitlines(), so such files had been refused as broken."""
    said = "one\u2028two\u2029three\x85four"
    path = tmp_path / "q.jsonl"
    row = GOOD | {"turns": [said]}
    path.write_text(
        json.dumps(row, ensure_ascii=False)
        + "\n\n"
        + json.dumps(GOOD | {"question_id": 2})
        + "\r\n"
    )
    assert [q.turns for q in read_questions(path)] == [(said,), ("why?",)]


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
