"""A method is one file and one YAML, wherever they lie; what its signature asks for it gets."""

import sys
from textwrap import dedent

import pytest

from .conftest import answers_in

DRAFTER = """
import torch
from model.decoding import Draft, Drafter, Tree

class Echo(Drafter):
    '''Drafts what it has just seen: the root again, `times` times.'''
    def __init__(self, *, times, device):
        super().__init__(device)
        self.tree, self.max_nodes = Tree.chain(times).on(device), 1 + times

    def grow(self, root):
        return root.expand(len(self.tree))

def not_a_drafter():
    return 3
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A method of somebody else's: a module on the path and a folder of configs."""
    (tmp_path / "somebody.py").write_text(dedent(DRAFTER))
    (tmp_path / "method").mkdir()
    (tmp_path / "method/echo.yaml").write_text("name: echo\ndrafter: somebody.Echo\ntimes: 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield f"--config-dir={tmp_path}"
    sys.modules.pop("somebody", None)


def test_a_method_from_outside_the_package(evaluate, outside, tmp_path):
    outcome = evaluate(outside, "method=echo", f"run_dir={tmp_path}/echo")
    assert outcome.code == 0, outcome.err
    plain = evaluate("method=vanilla", f"run_dir={tmp_path}/plain")
    assert plain.code == 0
    ours, theirs = answers_in(tmp_path / "echo"), answers_in(tmp_path / "plain")
    for a, b in zip(ours, theirs, strict=True):
        assert a["choices"][0]["output_ids"] == b["choices"][0]["output_ids"]
    nodes = {n for row in ours for turn in row["choices"][0]["step_nodes"] for n in turn}
    assert nodes == {1, 4}, "the first step begins with the root alone"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("method.drafter=somebody.Missing", "somebody.Missing: must be the import path"),
        ("method.drafter=nowhere.Echo", "No module named 'nowhere'"),
        ("method.drafter=somebody.not_a_drafter", "has no such setting"),
        ("+method.colour=red", "method.colour: Echo has no such setting; it has times, device"),
        ("~method.times", "method.times: Echo needs this setting"),
        ("method.drafter=model.decoding.Tree.chain", "must be the import path"),
    ],
)
def test_a_wrong_drafter_is_told_in_one_line(evaluate, outside, override, says):
    outcome = evaluate(outside, "method=echo", override)
    assert outcome.code != 0 and says in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1
