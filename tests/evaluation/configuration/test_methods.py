"""A method is one file and one YAML, wherever they lie; what its signature asks for it gets."""

import html
import json
import shutil
import sys
from textwrap import dedent

import pytest

from evaluation.records.runs import read_runs
from evaluation.tables.experiment import Experiment
from tests.evaluation.made_runs import answer, made

DRAFTER = """
from model.engine import Drafter

class Echo(Drafter):
    def __init__(self, *, times, device):
        super().__init__(device)

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


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("method.drafter=somebody.Missing", "somebody.Missing: must be a method"),
        ("method.drafter=nowhere.Echo", "No module named 'nowhere'"),
        (
            "method.drafter=somebody.not_a_drafter",
            "method.times: no such setting; not_a_drafter has none",
        ),
        ("+method.colour=red", "method.colour: no such setting; Echo has times"),
        ("+method.tines=3", "method.tines: no such setting; did you mean times?"),
        ("~method.times", "~method.times: a job has all settings"),
        ("+method.dtype=[int64]", "method.dtype: no such setting"),
        ("method.times=2", "Echo has no sessions"),
        ("method.drafter=model.engine.Tree.chain", "must be a method"),
    ],
)
def test_a_wrong_drafter_is_told_in_one_line(evaluate, outside, override, says):
    outcome = evaluate(outside, "method=echo", override)
    assert outcome.code != 0 and says in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1


def test_hf_is_plain_greedy_whatever_the_checkpoint_says(evaluate, checkpoint, tmp_path):
    """It had taken repetition penalty and forced tokens from generation_config.json: another text."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    own = {"repetition_penalty": 1.7, "min_new_tokens": 30, "do_sample": True, "temperature": 0.3}
    own |= {"forced_eos_token_id": 7, "suppress_tokens": [5]}
    ids = {"eos_token_id": [2, 9], "bos_token_id": 1, "pad_token_id": 0}
    ids |= {"output_attentions": False}  # asks for nothing, and was said to be left out
    (folder / "generation_config.json").write_text(json.dumps(own | ids))
    few = (f"model.path={folder}", "max_new_tokens=40", "bench.end=2", "name=greedy")
    outcome = evaluate("-m", "method=hf,vanilla", *few)
    assert outcome.code == 0, outcome.err
    runs = read_runs(tmp_path / "results/greedy")
    hf, vanilla = ([row["choices"][0]["output_ids"] for row in run.answers] for run in runs)
    assert hf == vanilla
    assert runs[0].metadata["generation_config_left_out"] == own
    page = (tmp_path / "results/greedy/report.html").read_text()
    for text in (outcome.out, html.unescape(page)):
        assert "toy: the checkpoint's own" in text and "repetition_penalty=1.7" in text


def test_a_setting_named_as_a_column_is_next_to_it():
    """It stood in the place of what was measured."""
    settings = dict.fromkeys(("steps", "repeats", "temperature", "mat", "colour"), 99)
    run = made("echo", [answer(1, "qa", [([1, 3], 2.0)])], method=settings)
    row = Experiment([run]).table.to_dict("records")[0]
    assert (row["steps"], row["repeats"], row["temperature"], row["mat"]) == (2, 1, 0, 2)
    assert row["colour"] == 99
    assert all(row[f"method_{key}"] == 99 for key in settings if key != "colour")
