"""Experiments: each composes, runs, and draws the figure that its question asks for."""

import json
import os
import re
import subprocess
from collections import Counter

import hydra
import pytest
import yaml
from hydra import initialize_config_dir

from evaluation.configuration.jobs import compose
from evaluation.records.runs import IN_TABLES
from evaluation.records.store import missing_jobs
from model.engine import Drafter
from model.files import ROOT
from model.methods import METHODS, method_class

EXPERIMENTS = {path.stem: path for path in (ROOT / "configs/experiment").glob("*.yaml")}
METHOD_FILES = {path.stem: path for path in (ROOT / "configs/method").glob("*.yaml")}
# their results have the names of model and bench
OF_SPEC_BENCH = ("batch", "curves", "dynamic_tree", "headline", "rivals", "speed", "whole")
OF_SUBJECT = dict.fromkeys(OF_SPEC_BENCH, "vicuna-7b-spec_bench") | {"paper": "vicuna-7b-sample"}


def composed(*words):
    """The settings that all jobs of an experiment share."""
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        return hydra.compose("config", [*words], return_hydra_config=True)


def methods_of(config):
    return set(config.hydra.sweeper.params.method.split(","))


@pytest.mark.parametrize("name", sorted(EXPERIMENTS.keys() - {"quickstart", "real"}))
def test_every_experiment_composes_for_vicuna_and_states_its_command(name):
    lines = EXPERIMENTS[name].read_text().splitlines()
    assert lines[1] == f"# bash eval.sh experiment={name}"
    config = composed(f"experiment={name}", "model=vicuna-7b", "model.path=here")
    folder = f"{name}-{OF_SUBJECT[name]}" if name in OF_SUBJECT else name
    assert (config.name, config.repeats, config.model.path) == (folder, 3, "here")
    assert config.model.weights is None, "which only a GGUF file takes"
    assert "vanilla" in methods_of(config) and next(iter(config.hydra.sweeper.params)) == "repeat"
    smoke = composed(f"experiment={name}", "preset=smoke")
    assert (smoke.repeats, smoke.bench.per_category, smoke.max_new_tokens) == (1, 1, 48)


def test_the_library_names_the_methods_that_the_harness_configures():
    drafters = {name: yaml.safe_load(path.read_text())["drafter"] for name, path in METHOD_FILES.items()}  # fmt: skip
    stock = dict.fromkeys(("hf", "hf_lookup", "hf_assisted"))
    assert drafters == stock | {"server": "server"} | {name: name for name in METHODS}
    assert {*IN_TABLES} == drafters.keys() - {"server"}
    for page, section in (("README.md", "## Methods"), ("docs/methods.md", "# Methods")):
        text = (ROOT / page).read_text().partition(section)[2].partition("\n## ")[0]
        assert drafters.keys() <= {*re.findall(r"`(\w+)`", text)}, page
    others = re.search(r"and (\d+) others", (ROOT / "README.md").read_text())
    assert int(others[1]) == len(METHODS.keys() - {"recycling", "vanilla"})
    assert all(issubclass(method_class(name), Drafter) for name in METHODS)
    full = composed("experiment=quickstart", "preset=full")
    assert methods_of(full) == methods_of(composed("experiment=table1"))
    assert methods_of(full) | {"server"} == METHOD_FILES.keys()
    assert full.bench.per_category is None and full.hydra.sweeper.params.start == "cold,hot"
    short = [job.config for job in compose(["experiment=quickstart"]).jobs]
    assert len(short) == 9 and {config.bench.per_category for config in short} == {4}


FIGURE = {
    "tree_size": "tree_size", "tree_shape": "mat", "topk": "topk", "start": "mat", "update": "mat",
    "order": "mat", "overhead": "mat", "precision": "mat-",
    "table1": "speedup_over_hf", "budget": "budget", "temperature": "temperature", "paper": "speedup_over_hf",
    "batch": "batch",
}  # fmt: skip
FEW = {
    "tree_shape": ["tree.depth=1,2,3"],
    "tree_size": ["tree.nodes=0,4,8"],
    "budget": ["method=vanilla,recycling,suffix_recycling", "tree.nodes=4,8,12", "method.max_draft=4,8,12"],
    "temperature": ["method=hf,vanilla,recycling"],
    "order": ["bench.order=file,interleaved"],
    "table1": ["method=hf,vanilla,pld,recycling"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FIGURE))
def test_every_experiment_runs_and_draws_its_figure(evaluate, drawn, tmp_path, name):
    words = ("preset=smoke", "max_new_tokens=12", "model.context=256")
    outcome = evaluate(f"experiment={name}", *words, *FEW.get(name, []))
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "results" / (f"{name}-toy-file" if name in ("batch", "paper") else name)
    assert [*folder.glob(f"figures/{FIGURE[name]}*.svg")]
    assert (folder / "tables/audit.csv").exists() and (folder / "tables/main.csv").exists()
    sweep = json.loads((folder / "sweep.json").read_text())
    assert all(job[0] == "repeat=0" for job in sweep["jobs"]) and not missing_jobs(folder)


def test_the_papers_setting_has_a_folder_for_each_model_and_bench():
    """A sweep over models had one folder, named after the default model."""
    words = ["model=vicuna-7b,embedded", "bench=sample,mbpp", "method=hf,vanilla"]
    folders = Counter(job.folder.name for job in compose(["experiment=paper", *words]).jobs)
    names = [f"paper-{m}-{b}" for m in ("vicuna-7b", "embedded") for b in ("sample", "mbpp")]
    assert folders == dict.fromkeys(names, 6)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", "quickstart"),
        ("model=vicuna-7b bench=spec_bench method=hf", "quickstart-vicuna-7b-spec_bench"),
        ("model=path model.path=../a/b-1.3", "quickstart-b-1.3-sample"),
        ("experiment=paper model=vicuna-7b bench=mbpp", "paper-vicuna-7b-mbpp"),
        ("-m model=vicuna-7b", "default"),
    ],
)
def test_where_eval_sh_writes(tmp_path, words, name):
    """Another model's figures had been mixed into results/quickstart."""
    echo = tmp_path / "python"
    echo.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    echo.chmod(0o755)
    command = ["bash", str(ROOT / "eval.sh"), *words.split()]
    environment = os.environ | {"PYTHON": str(echo)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    given = [word for word in said.stdout.splitlines() if "=" in word]
    jobs = compose([*given, "method=vanilla", "start=cold"]).jobs
    assert {str(job.config.name) for job in jobs} == {name}
    assert ("preset=full" in given) is name.startswith("quickstart-")
