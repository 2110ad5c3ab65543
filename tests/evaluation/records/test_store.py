"""The answer store: files met in the wild, torn lines, states, locks."""

import pytest
import torch

from evaluation.records.rows import SCHEMA, Question, read_answers
from evaluation.records.runs import read_runs
from evaluation.records.store import AnswerStore
from model.errors import UserError
from tests.evaluation.made_runs import asked, shard
from tests.evaluation.statistics.test_metrics import ROWS


def about(settings, **circumstances):
    """The metadata of a run of three questions."""
    return {
        "settings": {"schema": SCHEMA, "method": {}, "batch": 1} | settings,
        "circumstances": {"device": "a machine"} | circumstances,
        "questions": 3,
    }


def test_an_answer_with_unusual_line_ends_is_one_record(tmp_path):
    """U+2028, U+2029 and U+0085 end a line for splitlines()."""
    said = "one\u2028two\u2029three\x85four\x0bfive\x0csix\x1cseven\r\neight"
    question = Question("a\u2028b", "qa", (said,))
    row = asked("a\u2028b", "qa", [([2, 2], 1.0)], said)
    row["choices"][0]["turns"] = [said]
    store = AnswerStore(tmp_path / "runs/one")
    with store.locked():
        metadata = shard("vanilla", [row]).metadata | {"circumstances": {"device": "a machine"}}
        store.begin(metadata)
        store.append([row], {}, 1)
    assert read_answers(store.answers) == ({question.question_id: row}, "")
    (run,) = read_runs(tmp_path)
    assert run.complete and run.question_keys == (question.key,)
    assert store.begin(run.metadata) == {question.question_id: row}, "and goes on from there"


def test_a_torn_last_line_is_cut_off_and_the_rest_kept(tmp_path):
    store = AnswerStore(tmp_path)
    assert store.begin(about({"a": 1})) == {}
    for n, row in enumerate(ROWS, start=1):
        store.append([row], {}, n)
    whole = store.answers.read_bytes()
    store.answers.write_bytes(whole + b'{"question_id": 3, "cho')
    assert list(store.begin(about({"a": 1}))) == [1, 2]
    assert store.answers.read_bytes() == whole


def test_the_state_after_each_answer_is_there_and_only_that(tmp_path):
    store = AnswerStore(tmp_path)
    store.begin(about({}))
    for n, row in enumerate(ROWS, start=1):
        store.append([row], {"candidates": torch.full((2, 2), n)}, n)
        assert store.state_at(n)["candidates"].tolist() == [[n, n], [n, n]]
    assert [p.name for p in tmp_path.glob("state*")] == ["state-2.safetensors"]
    store.finish({}, {"candidates": torch.zeros(1)}, 2)
    assert [p.name for p in tmp_path.glob("state*")] == ["state.safetensors"]


def test_answers_without_metadata_are_not_touched(tmp_path):
    (tmp_path / "answers.jsonl").write_text("someone's\n")
    with pytest.raises(UserError, match="unknown configuration"):
        AnswerStore(tmp_path).begin(about({}))
    assert (tmp_path / "answers.jsonl").read_text() == "someone's\n"


def test_one_process_a_directory(tmp_path):
    one = AnswerStore(tmp_path)
    other = AnswerStore(tmp_path)
    with one.locked(), pytest.raises(UserError, match="another run is at work"), other.locked():
        pass
    with AnswerStore(tmp_path).locked():
        pass


def contents(folder):
    return {path: path.read_bytes() for path in folder.iterdir()}


def test_an_unfinished_run_goes_on_under_the_same_circumstances_alone(tmp_path):
    store = AnswerStore(tmp_path)
    store.begin(about({}, linear="torch"))
    assert store.begin(about({}, linear="onednn")) == {}, "nothing was answered yet"
    store.append([ROWS[0]], {}, 1)
    files = contents(tmp_path)
    why = r"1 answers given under other circumstances: linear is onednn there and torch"
    with pytest.raises(UserError, match=why):
        store.begin(about({}, linear="torch"))
    with pytest.raises(UserError, match=r"device is a machine there and a{35}\.\.\.a{29}c now"):
        store.begin(about({}, linear="onednn", device="a" * 200 + "c"))
    assert contents(tmp_path) == files
    assert list(store.begin(about({}, linear="onednn"))) == [1]


def test_a_finished_run_is_never_touched(tmp_path):
    store = AnswerStore(tmp_path)
    store.begin(about({}, linear="torch"))
    for number in (1, 2, 3):
        store.append([ROWS[1] | {"question_id": number}], {}, number)
    store.finish({}, {}, 3)
    files = contents(tmp_path)
    store.begin(about({}, linear="anything"))
    assert contents(tmp_path) == files
