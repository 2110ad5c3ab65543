"""From lists of settings to jobs."""

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from evaluation.configuration.config import checked_config
from evaluation.configuration.jobs import as_typed, compose, quoted
from model.errors import UserError

TREES = ("tree=best", "tree.nodes=8,16")
BOTH = "method=suffix_recycling tree=best tree.nodes={0} method.max_draft={1}"
ALSO = 'hydra.sweeper.also=["method=dynamic method.nodes=4,8","method=recycling tree.nodes=63"]'
JOBS = {  # words, and the jobs' overrides
    # a job has the settings of its method alone, and none comes twice
    ("method=vanilla,recycling,dynamic", *TREES, "method.nodes=8"): [
        "method=vanilla",
        "method=recycling tree=best tree.nodes=8",
        "method=recycling tree=best tree.nodes=16",
        "method=dynamic method.nodes=8",
    ],
    ("method=vanilla,pld", "method.max_ngram=2"): ["method=vanilla", "method=pld method.max_ngram=2"],
    ("method=vanilla,recycling", "tree=file,best", "tree.path=a.yaml"): [
        "method=vanilla",
        "method=recycling tree=file tree.path=a.yaml",
        "method=recycling tree=best",
    ],
    ("method=recycling,dynamic", "tree=best", "tree.nodes=8", "method.nodes=6,auto:8", "k=4"): [
        "method=recycling tree=best tree.nodes=8 method.k=4",
        "method=dynamic method.nodes=6 method.k=4",
        r"method=dynamic method.nodes=auto\:8 method.k=4",
    ],
    # equal keys have one value in each job
    ("method=suffix_recycling", *TREES, "method.max_draft=8,16"): [
        BOTH.format(8, 8),
        BOTH.format(8, 16),
        BOTH.format(16, 8),
        BOTH.format(16, 16),
    ],
    (
        "hydra.sweeper.equal=[tree.nodes,method.max_draft]",
        "method=suffix_recycling",
        *TREES,
        "method.max_draft=8,16",
    ): [BOTH.format(8, 8), BOTH.format(16, 16)],
    # further runs are as the grid but for what they name, and keep to the command line
    (ALSO, "tree=best"): [
        "tree=best",
        "method=dynamic method.nodes=4",
        "method=dynamic method.nodes=8",
        "tree=best method=recycling tree.nodes=63",
    ],
    (ALSO, "method=vanilla,dynamic", "method.nodes=8"): [
        "method=vanilla",
        "method=dynamic method.nodes=8",
    ],
}  # fmt: skip


@pytest.mark.parametrize("words", JOBS)
def test_jobs_of_a_sweep(words):
    jobs = compose(words).jobs
    assert [" ".join(job.overrides[1:]) for job in jobs] == JOBS[words]
    assert {job.overrides[0] for job in jobs} == {"repeat=0"}
    (composed_anew,) = compose(jobs[-1].overrides).jobs  # as a launcher does
    assert composed_anew.config == jobs[-1].config


def test_the_jobs_of_a_repeat_are_together_in_the_order_of_their_numbers():
    """Further runs had come last, all their repeats in a row: minutes later, on a slower machine."""
    jobs = compose(["repeats=11", 'hydra.sweeper.also=["method=pld"]']).jobs
    assert [(job.config.repeat, job.config.method.name) for job in jobs] == [
        (repeat, method) for repeat in range(11) for method in ("recycling", "pld")
    ]


def test_a_setting_may_follow_a_swept_one():
    words = ["tree=shape", "tree.branching=${method.k}", "method.k=2,4"]
    _, job = compose(words).jobs
    assert job.config.tree.branching == 4 and "hydra" not in job.config


def test_a_size_is_no_fault_of_a_method_without_one():
    """vanilla was left out, as auto came first in the list."""
    words = ["method=vanilla,dynamic", "method.nodes=auto,8", "timed=false"]
    plain, auto, _ = compose(words).jobs
    assert checked_config(plain.config)["method"]["name"] == "vanilla"
    with pytest.raises(UserError, match="method.nodes=auto: sizes follow"):
        checked_config(auto.config)


@pytest.mark.parametrize(
    ("gpu", "words", "found"), [(True, [], 3), (True, ["model.device=cpu"], 0), (False, [], 0)]
)
def test_runs_for_cuda_alone_are_left_out_elsewhere(monkeypatch, gpu, words, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    jobs = compose(["experiment=headline", *words]).jobs
    compiled = [job.config.method.compiled for job in jobs if job.config.method.name == "hf"]
    assert sum(compiled) == found and len(compiled) == 6 + found


def test_a_folder_of_ones_own_adds_methods_and_comes_before_the_shipped_one(tmp_path):
    (tmp_path / "method").mkdir()
    (tmp_path / "method/echo.yaml").write_text("name: echo\ndrafter: pld\nmax_ngram: 2\n")
    (tmp_path / "method/pld.yaml").write_text("name: mine\ndrafter: pld\n")
    words = ["method=echo,pld,recycling", "method.k=8,9", "tree=2.2.2,best"]
    jobs = compose(words, str(tmp_path)).jobs
    assert [job.config.method.name for job in jobs] == ["echo", "mine", *["recycling"] * 4]


QUOTED = ("2024_06_01", "1e3", "null", "true", "it's", "a\\", "\\'", "a, [b] = {c: d}", " x ", "~")


def test_text_stays_text():
    """Hydra read a bare 2024_06_01 as 20240601, and null as none."""
    categories = quoted([*QUOTED, 7])
    (job,) = compose(
        ["name='null'", f"model.name={quoted(' x ')}", f"bench.categories={categories}"]
    ).jobs
    assert (job.config.name, job.config.model.name) == ("null", " x ")
    assert [*job.config.bench.categories] == [*QUOTED, 7]


TYPED = (
    *("83e2010", "1e3", "1_000", "0x10", "007", "true", "nan", "null", "[a]", "{a}", "~/m (1)"),
    *("é", "it's", "a & b", "m[1]", "m(1)", "a#1", "a=b", "C:\\x"),
)


def test_typed_text_needs_no_quotes():
    """83e2010 was infinity, 1e3 and 1000.0 one folder, and a path with brackets an error."""
    for text in TYPED:
        for key in ("name", "model.name", "model.path", "results_dir"):
            typed = OverridesParser.create().parse_override(as_typed(f"{key}={text}"))
            assert typed.value() == text
    (job,) = compose(["name=83e2010", "model.path=m[1]"]).jobs
    assert (job.config.name, job.config.model.path) == ("83e2010", "m[1]")


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("name=a,1e3", "name=a,'1e3'"),
        ("name=choice(~/a,'b,c',1e3)", "name=choice('~/a','b,c','1e3')"),
        ("name=x-${subject}", "name=x-${subject}"),
        ("name=x (1)/${f:a,b}", "name='x (1)/${f:a,b}'"),
        ('name="x"', 'name="x"'),
        ("name=a\\,b", "name=a\\,b"),
        ("run_dir=null", "run_dir=null"),
        ("method.k=1e3", "method.k=1e3"),
        ("method.k=range(2,4)", "method.k=range(2,4)"),
        ("bench.categories=[qa,é]", "bench.categories=[qa,'é']"),
        ("+own=~/x", "+own='~/x'"),
    ],
)
def test_hydras_own_grammar_stays(word, read):
    assert as_typed(word) == read
