"""Commands that are printed to be copied: a shell reads back the very path, whatever characters it has."""

import html
import re
import subprocess

import pytest
import yaml

from evaluation import tree_search
from evaluation.configuration.jobs import compose
from evaluation.page import render
from evaluation.records.runs import read_runs
from evaluation.statistics.agreement import audit_table, wording
from evaluation.tables.experiment import Experiment
from tests.evaluation.made_runs import answer, made, write

NAMES = ["plain/deep.1", """two words, it's "$HOME" a;b&c {x},y `id` <i>"""]


def words(command):
    """What a shell makes of it."""
    printed = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True
    )
    return printed.stdout.split("\0")[:-1]


@pytest.fixture(params=NAMES)
def folder(request, tmp_path):
    """An experiment's folder of that name, with a run that parts from vanilla and one that drafts from a tree."""
    folder = tmp_path / request.param
    steps = {"step_nodes": [[3, 3]], "step_paths": [[[0], []]]}
    tree = {"method": {"k": 8, "tree": "x", "tree_nodes": 2}, "draft_tree": [[0], [0, 0]]}
    plain = ([1, 1, 1], 1.0)
    runs = [
        made("vanilla", [answer(1, "qa", [plain], output_ids=[[1, 2, 3]])]),
        made("pld", [answer(1, "qa", [plain], output_ids=[[1, 2, 4]])]),
        made("recycling (hot)", [answer(1, "qa", [([2, 1], 1.0)], **steps)], **tree),
    ]
    for run in runs:
        write(run, folder)
    return folder


def test_the_commands_of_page_and_audit(folder):
    experiment = Experiment(read_runs(folder))
    page = render(experiment, folder)
    (again,) = re.findall(r"<code>(python -m evaluation.report .*?)</code>", page)
    assert words(html.unescape(again)) == ["python", "-m", "evaluation.report", str(folder)]
    said = " ".join(wording(audit_table(experiment.audits, {}), folder))
    command = said[said.index("python -m") :]
    assert words(command) == ["python", "-m", "evaluation.audit", str(folder)]


def test_a_trees_overrides(folder, call):
    tree = folder / "tree.yaml"
    outcome = call(tree_search.main, folder, "--nodes", 2, "--output", tree)
    assert outcome.code == 0 and len(yaml.safe_load(tree.read_text())["nodes"]) == 2
    (line,) = re.findall("^use it: (.*)$", outcome.out, re.M)
    (job,) = compose(words(line)).jobs
    assert (job.config.tree.name, job.config.tree.path) == ("file", str(tree))
