"""Commands that are printed to be copied: a shell reads back the very path, whatever characters it has."""

import html
import re
import subprocess

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from evaluation import tree_search
from evaluation.page import render
from evaluation.records.runs import read_runs
from evaluation.statistics.agreement import audit_table, wording
from evaluation.statistics.experiment import Experiment
from model.errors import UserError
from model.structures.heads import read_head
from tests.evaluation.made_runs import answer, made, write

NAMES = ["plain/deep.1", "two words", "it's", '"$HOME"', "a;b&c", "{x},y", "`id`", "<i>"]


def words(command):
    """What a shell makes of it."""
    told = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True
    )
    return told.stdout.split("\0")[:-1]


@pytest.fixture(params=NAMES)
def folder(request, tmp_path):
    """An experiment's folder of that name, with a run that parts from vanilla and one that drafts from a tree."""
    folder = tmp_path / request.param
    runs = [made(label, [answer(1, "qa", [([1, 1, 1], 1.0)], output_ids=[[1, 2, last]])])
            for label, last in (("vanilla", 3), ("pld", 4))]  # fmt: skip
    steps = {"step_nodes": [[3, 3]], "step_paths": [[[0], []]], "output_ids": [[1, 2, 3]]}
    tree = {"method": {"k": 8, "tree": "x", "tree_nodes": 2}, "draft_tree": [[0], [0, 0]]}
    runs.append(made("recycling (hot)", [answer(1, "qa", [([2, 1], 1.0)], **steps)], **tree))
    for run in runs:
        write(run, folder)
    return folder


def test_the_commands_of_page_and_audit(folder):
    runs = read_runs(folder)
    (again,) = re.findall(
        r"<code>(python -m evaluation.report .*?)</code>", render(Experiment(runs), folder)
    )
    assert words(html.unescape(again)) == ["python", "-m", "evaluation.report", str(folder)]
    (line,) = [
        line
        for line in wording(audit_table(Experiment(runs).audits, {}), folder)
        if "logit gap" in line
    ]
    assert words(line[line.index("python -m") :]) == [
        "python",
        "-m",
        "evaluation.audit",
        str(folder),
    ]


def test_a_trees_overrides(folder, call):
    tree = folder / "tree.yaml"
    outcome = call(tree_search.main, folder, "--nodes", 2, "--output", tree)
    assert outcome.code == 0 and len(yaml.safe_load(tree.read_text())["nodes"]) == 2
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("use it: ")]
    found = [
        OverridesParser.create().parse_override(word)
        for word in words(line.removeprefix("use it: "))
    ]
    assert [(word.key_or_group, word.value()) for word in found] == [
        ("tree", "file"),
        ("tree.path", str(tree)),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_how_to_train_a_head(name):
    with pytest.raises(UserError) as refused:
        read_head(f"nowhere/{name}", "medusa", None, ())
    command = re.search(r"`(python -m tools.*)` \(", str(refused.value))[1]
    assert words(command)[-2:] == ["--output", f"nowhere/{name}"]
