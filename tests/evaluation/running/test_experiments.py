"""Experiments: each composes, runs, and draws the figure that its question asks for."""

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from evaluation.configuration.jobs import compose as compose_words
from evaluation.records.sweeps import missing_jobs
from model.engine import Drafter
from model.methods import FIRST_IN_TABLES, METHODS, method_class

ROOT = Path(__file__).resolve().parents[3]
EXPERIMENTS = sorted(p.stem for p in (ROOT / "configs/experiment").glob("*.yaml"))


METHOD_FILES = [*(ROOT / "configs/method").glob("*.yaml")]


@pytest.mark.parametrize(
    "name", [name for name in EXPERIMENTS if name not in ("quickstart", "real")]
)
def test_every_experiment_composes_for_vicuna_and_states_its_command(name):
    lines = (ROOT / f"configs/experiment/{name}.yaml").read_text().splitlines()
    assert lines[1] == f"# bash eval.sh experiment={name}"
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        cfg = compose(
            "config",
            overrides=[f"experiment={name}", "model=vicuna-7b", "model.path=here"],
            return_hydra_config=True,
        )
        smoke = compose(
            "config", overrides=[f"experiment={name}", "preset=smoke"], return_hydra_config=True
        )
    # in their names
    suffixes = {
        "paper": "vicuna-7b-sample",
        "curves": "vicuna-7b-spec_bench",
    }
    suffixes |= dict.fromkeys(
        ("batch", "dynamic_tree", "headline", "rivals", "speed", "whole"), suffixes["curves"]
    )
    folder = f"{name}-{suffixes[name]}" if name in suffixes else name
    assert (cfg.name, cfg.repeats, cfg.model.name, cfg.model.path) == (
        folder,
        3,
        "vicuna-7b",
        "here",
    )
    assert cfg.model.weights is None, "which only a GGUF file takes"
    assert (smoke.repeats, smoke.bench.per_category, smoke.max_new_tokens) == (1, 1, 48)
    params = OmegaConf.to_container(cfg.hydra.sweeper.params, resolve=False)
    assert next(iter(params)) == "repeat" and "vanilla" in params["method"]


def test_the_library_names_the_methods_that_the_harness_configures():
    drafters = {path.stem: yaml.safe_load(path.read_text())["drafter"] for path in METHOD_FILES}
    assert drafters == {"hf": None, "server": "server"} | {name: name for name in METHODS} and {
        *FIRST_IN_TABLES
    } <= {*drafters}
    assert all(issubclass(method_class(name), Drafter) for name in METHODS)


def test_table1_goes_through_every_method_there_is():
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        cfg = compose("config", overrides=["experiment=table1"], return_hydra_config=True)
    methods = str(OmegaConf.to_container(cfg.hydra.sweeper.params, resolve=False)["method"]).split(
        ","
    )
    assert sorted([*methods, "server"]) == sorted(path.stem for path in METHOD_FILES)


FIGURE = {
    "tree_size": "tree_size", "tree_shape": "tree_shape", "topk": "topk", "start": "mat", "update": "mat",
    "order": "mat", "overhead": "overhead", "novelty": "novelty", "precision": "mat-",
    "table1": "speedup_over_hf", "budget": "budget", "temperature": "temperature", "paper": "speedup_over_hf",
    "batch": "batch",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FIGURE))
def test_every_experiment_runs_and_draws_its_figure(evaluate, drawn, tmp_path, name):
    few = {"tree_shape": ["tree.depth=1,2,3"], "tree_size": ["tree.nodes=0,4,8"]}
    few |= {
        "budget": [
            "method=vanilla,recycling,suffix_recycling",
            "tree.nodes=4,8,12",
            "method.max_draft=4,8,12",
        ]
    }
    few |= {"temperature": ["method=hf,vanilla,recycling"]}
    few |= {
        "order": ["bench.order=file,interleaved"],
        "table1": ["method=hf,vanilla,pld,recycling"],
    }
    outcome = evaluate(
        f"experiment={name}",
        "preset=smoke",
        "max_new_tokens=12",
        "model.context=256",
        *few.get(name, []),
    )
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "results" / (f"{name}-toy-file" if name in ("batch", "paper") else name)
    made = sorted(p.name for p in (folder / "figures").iterdir() if p.stem.startswith(FIGURE[name]))
    assert made and {Path(p).suffix for p in made} == {".svg"}, made
    assert (folder / "tables/audit.csv").exists() and (folder / "tables/main.csv").exists()
    sweep = json.loads((folder / "sweep.json").read_text())
    assert all(job[0] == "repeat=0" for job in sweep["jobs"]) and not missing_jobs(folder)
    if name == "budget":
        hybrid = [job[3:5] for job in sweep["jobs"] if "method=suffix_recycling" in job]
        assert hybrid == [[f"tree.nodes={n}", f"method.max_draft={n}"] for n in (4, 8, 12)], (
            "one budget, not nine"
        )


def test_the_papers_setting_has_a_folder_for_each_model_and_bench():
    """A sweep over models had one folder, named after the default model; its jobs wrote to others without a report."""
    words = [
        "experiment=paper",
        "model=vicuna-7b,embedded",
        "bench=sample,novelty",
        "method=hf,vanilla",
    ]
    folders = Counter(job.folder.name for job in compose_words(words).jobs)
    assert folders == {
        f"paper-{m}-{b}": 6 for m in ("vicuna-7b", "embedded") for b in ("sample", "novelty")
    }


def test_the_quickstart_is_short_and_preset_full_has_every_method():
    """A method that is added is one line in configs/preset/full.yaml, too."""
    short, full = (
        [job.config for job in compose_words(["experiment=quickstart", f"preset={preset}"]).jobs]
        for preset in ("default", "full")
    )
    assert len(short) == 10 and {cfg.bench.per_category for cfg in short} == {4}
    assert {cfg.method.name for cfg in full} | {"server"} == {path.stem for path in METHOD_FILES}
    assert {cfg.start for cfg in full} == {"cold", "hot"} and {
        cfg.bench.per_category for cfg in full
    } == {None}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((), "quickstart"),
        (
            ("model=vicuna-7b", "bench=spec_bench", "method=hf,vanilla"),
            "quickstart-vicuna-7b-spec_bench",
        ),
        (("model=path", "model.path=../a/b-1.3"), "quickstart-a_b-1.3-sample"),
        (("experiment=paper", "model=vicuna-7b", "bench=mbpp"), "paper-vicuna-7b-mbpp"),
        (("-m", "model=vicuna-7b"), "default"),
    ],
)
def test_where_eval_sh_writes(tmp_path, arguments, name):
    """Another model's figures had been mixed into results/quickstart, with more jobs than were asked for."""
    echo = tmp_path / "python"
    echo.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    echo.chmod(0o755)
    shell = ["bash", str(ROOT / "eval.sh"), *arguments]
    done = subprocess.run(
        shell, env=os.environ | {"PYTHON": str(echo)}, capture_output=True, text=True, check=True
    )
    given = [word for word in done.stdout.splitlines() if "=" in word]
    assert {
        str(job.config.name) for job in compose_words(given, multirun="-m" in arguments).jobs
    } == {name}
    assert ("preset=full" in given) is name.startswith("quickstart-"), (
        "of another bench every question is asked"
    )
