"""Old names of settings are answered with the new ones: on the command line, in a sweep, in Python, in old records."""

import pytest

from evaluation import run
from evaluation.records.rows import SCHEMA, check_schema
from evaluation.sweep import evaluate as measure
from model.decoder import Decoder
from model.errors import RENAMED, UserError, new_names
from tests.conftest import toy_model


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("bench.half", "; bench.half is called bench.split now"),
        ("linear=stock", "; linear=stock is called linear=torch now"),
        ("stands", "; stands is called accept_probs now"),
        ("method.k", ""),
    ],
)
def test_the_new_name_of_a_setting(asked, answer):
    assert new_names(asked) == answer


def test_no_new_name_is_an_old_one():
    assert not RENAMED.keys() & set(RENAMED.values())


def test_the_library_names_it():
    with pytest.raises(UserError, match="carry is called history_tokens now"):
        Decoder(toy_model("llama"), method="spine", carry=0)
    with pytest.raises(UserError, match="linear=packed is called linear=onednn now"):
        Decoder(toy_model("llama"), linear="packed")


def test_a_sweep_in_python_names_it():
    with pytest.raises(UserError, match=r"bench.half is called bench.split now"):
        measure(bench__half=1)
    with pytest.raises(UserError, match=r"mixed is called allow_mixed now"):
        measure(mixed=True)
    with pytest.raises(UserError, match=r"method.stands is called method.accept_probs now"):
        measure(method="spine", method__stands=[[0.5]])


def test_old_records_are_refused_by_a_line_that_says_where_the_names_are():
    with pytest.raises(UserError, match=r"schema 3, this one reads .*docs/configuration.md"):
        check_schema({"schema": SCHEMA - 1}, "answers.jsonl")


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (("bench.half=1",), "bench.half: no such setting; bench.half is called bench.split now"),
        (("-m", "method=spine", "method.carry=0,1000"), "method.carry is called method.history_tokens now"),
        (("model.linear=joint",), "model.linear=joint is called model.linear=fused now"),
        (("+mixed=true",), "mixed is called allow_mixed now"),
    ],
)
def test_the_command_line_names_it(call, arguments, answer):
    outcome = call(run.main, *arguments)
    assert outcome.code == 2 and answer in outcome.err
    assert outcome.err.count("\n") == 1, "one line"
