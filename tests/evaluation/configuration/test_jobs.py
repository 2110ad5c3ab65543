"""From lists of settings to jobs, by hand."""

import pytest
import torch
from omegaconf import OmegaConf

from evaluation.configuration.jobs import compose, expand, quoted
from model.errors import UserError

METHODS = {
    "plain": {"drafter": None},
    "tree": {"drafter": "model.recycling.TokenRecycling", "k": 8},
    "sized": {"drafter": "model.methods.spine.Spine", "nodes": 24},
    "both": {"drafter": "model.recycling.TokenRecycling", "nodes": 1},
}
GRID = {"repeat": ["0"], "method": ["plain", "tree", "sized"]}
BUDGETS = {"tree.nodes": ["8", "16"], "method.nodes": ["8", "16"]}


def composed(words):
    """A job's method, and a tree."""
    (method,) = [word.removeprefix("method=") for word in words if word.startswith("method=")]
    return OmegaConf.create(
        {"method": METHODS[method], "tree": {"name": "best", "nodes": 24, "depth": None}}
    )


def jobs(grid, also=(), given=None, equal=()):
    return [
        " ".join(job).replace("method=", "")
        for job in expand(grid, also, given or {}, equal, composed)
    ]


def test_a_job_has_the_settings_of_its_method_alone_and_none_comes_twice():
    assert jobs(GRID | BUDGETS) == [
        "repeat=0 plain",
        "repeat=0 tree tree.nodes=8",
        "repeat=0 tree tree.nodes=16",
        "repeat=0 sized method.nodes=8",
        "repeat=0 sized method.nodes=16",
    ]
    assert jobs({"repeat": ["0"], "method": ["tree"], "tree.depth": ["2"]}) == ["repeat=0 tree"], (
        "null: it has none"
    )


def test_a_setting_that_nothing_in_the_sweep_has_is_refused():
    assert jobs(GRID | {"method.k": ["4"]}), "of an experiment that a narrower command line left"
    with pytest.raises(
        UserError, match="method.max_ngram=2: none of the methods or trees of this sweep has this"
    ):
        jobs(GRID, given={"method.max_ngram": ["2"]})


def test_equal_keys_have_one_value_in_each_job():
    grid = GRID | BUDGETS | {"method": ["both"]}
    assert len(jobs(grid)) == 4, "every combination"
    both = [f"repeat=0 both tree.nodes={n} method.nodes={n}" for n in (8, 16)]
    assert jobs(grid, equal=["tree.nodes", "method.nodes"]) == both


def test_further_runs_are_as_the_grid_but_for_what_they_name_and_keep_to_the_command_line():
    also = [{"method": ["both"], "tree.nodes": [n], "method.nodes": [n]} for n in ("8", "63")]
    both = [
        "repeat=0 both tree.nodes=8 method.nodes=8",
        "repeat=0 both tree.nodes=63 method.nodes=63",
    ]
    assert jobs(GRID | BUDGETS, also)[5:] == both
    assert jobs(GRID | BUDGETS, also, {"method": ["plain"]}) == ["repeat=0 plain"]
    assert jobs(GRID | BUDGETS, also, {"method": ["plain", "both"], "tree.nodes": ["8"]})[3:] == []
    assert both[0] in jobs(GRID | BUDGETS, also, {"method": ["plain", "both"], "tree.nodes": ["8"]})
    assert jobs(
        GRID, [{"method": ["sized", "both"], "method.nodes": ["4", "8"]}], {"method": ["sized"]}
    ) == [
        "repeat=0 sized",
        "repeat=0 sized method.nodes=4",
        "repeat=0 sized method.nodes=8",
    ], "lists are narrowed"


def test_the_jobs_of_a_repeat_are_together():
    """Further runs had come last, all their repeats in a row: one of three minutes later, on a slower machine."""
    found = jobs(
        {"repeat": ["0", "1"], "method": ["plain", "tree"]},
        [{"method": ["sized"], "method.nodes": ["8"]}],
    )
    own = ["plain", "tree", "sized method.nodes=8"]
    assert found == [f"repeat={repeat} {job}" for repeat in (0, 1) for job in own]


def test_jobs_of_the_shipped_methods_and_trees():
    """tree.nodes is the budget of a method that follows the machine."""

    def expanded(*words):
        jobs = compose(words, multirun=True).jobs
        assert not any(job.not_available for job in jobs), "best takes what ranks there are"
        return [" ".join(job.overrides[1:]) for job in jobs]

    words = (
        "method=vanilla,recycling,dynamic,spine",
        "tree=best,auto",
        "tree.nodes=8",
        "method.nodes=6",
        "k=4",
    )
    assert expanded(*words) == [
        "method=vanilla",
        "method=recycling tree=best tree.nodes=8 method.k=4",
        "method=recycling tree=auto tree.nodes=8 method.k=4",
        "method=dynamic method.nodes=6 method.k=4",
        "method=dynamic tree=auto tree.nodes=8 method.k=4",
        "method=spine method.nodes=6 method.k=4",
        "method=spine tree=auto tree.nodes=8 method.k=4",
    ]
    own = [
        "method=recycling tree=file tree.path=a.yaml",
        "method=recycling tree=file tree.path=b.yaml",
    ]
    words = ("method=vanilla,recycling", "tree=file,best", "tree.path=a.yaml,b.yaml")
    assert expanded(*words) == ["method=vanilla", *own, "method=recycling tree=best"], (
        "dropped, as its default is null"
    )
    job = compose(["tree=shape", "tree.branching=${method.k}", "method.k=2,4"], multirun=True).jobs[
        1
    ]
    assert job.config.tree.branching == 4 and job.config.repeat == 0 and "hydra" not in job.config


@pytest.mark.parametrize(
    "gpu, words, found", [(True, [], 3), (True, ["model.device=cpu"], 0), (False, [], 0)]
)
def test_runs_for_cuda_alone_are_left_out_elsewhere(monkeypatch, gpu, words, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    jobs = compose(["experiment=headline", *words]).jobs
    compiled = [job.config.method.compiled for job in jobs if job.config.method.name == "hf"]
    assert sum(compiled) == found and len(compiled) == 6 + found, (
        "in float32 and bfloat16, three repeats"
    )


def test_settings_that_only_some_methods_have(tmp_path):
    """They were looked for in the default method, and in configs/ alone: one that a method lacks ended the sweep."""
    jobs = compose(["method=vanilla,pld", "method.max_ngram=2"], multirun=True).jobs
    assert [job.overrides[1:] for job in jobs] == [
        ["method=vanilla"],
        ["method=pld", "method.max_ngram=2"],
    ]
    (tmp_path / "method").mkdir()
    (tmp_path / "method/echo.yaml").write_text(
        "name: echo\ndrafter: pld\nmax_ngram: 2\nmax_draft: 4\n"
    )
    words = ["method=echo,recycling", "method.k=8,9", "tree=2.2.2,best"]
    jobs = compose(words, multirun=True, config_dir=str(tmp_path)).jobs
    assert ["method=echo" in job.overrides for job in jobs] == [True] + [False] * 4, (
        "it has no k and no tree"
    )


def test_a_launcher_starts_what_was_typed(tmp_path):
    """Without -m its only job had been the default one."""
    (tmp_path / "hydra/launcher").mkdir(parents=True)
    (tmp_path / "hydra/launcher/mine.yaml").write_text("_target_: mine")
    composed = compose(["hydra/launcher=mine", "method=pld"], config_dir=str(tmp_path))
    assert composed.is_sweep and [job.overrides for job in composed.jobs] == [
        ["repeat=0", "method=pld"]
    ]


ODD = [
    "2024_06_01",
    "1e3",
    "null",
    "true",
    "it's",
    "a\\",
    "\\'",
    "a, [b] = {c: d}",
    "${seed}",
    "\\${seed}",
]


@pytest.mark.parametrize("text", [*ODD, '"', " x ", "~"])
def test_text_stays_text(text):
    """Hydra read a bare 2024_06_01 as 20240601, null as none and ${seed} as another setting."""
    words = [
        f"{key}={quoted(text)}"
        for key in ("name", "results_dir", "model.name", "run_dir", "model.path")
    ]
    (job,) = compose([*words, f"bench.categories={quoted([text, 'qa', 7])}"], multirun=True).jobs
    assert [job.config[key] for key in ("name", "results_dir", "run_dir")] == [text] * 3
    assert job.config.model.name == text and [*job.config.bench.categories] == [text, "qa", 7]


def test_repeats_go_in_the_order_of_their_numbers():
    repeats = [str(n) for n in range(12)]
    assert jobs({"repeat": repeats, "method": ["plain"]}) == [
        f"repeat={n} plain" for n in range(12)
    ]
