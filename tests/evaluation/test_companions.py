"""What a method needs next to the model: found by model, refused before anything is loaded, fetched beforehand."""

import shutil
from pathlib import Path

import pytest

from evaluation import prefetch, run
from evaluation.configuration.jobs import compose
from evaluation.records.store import missing_jobs
from evaluation.running import runner
from tests.evaluation.test_errors import check

ROOT = Path(__file__).resolve().parents[2]

COMPANIONS = [
    ("model=embedded method=eagle2", "head_path", "data/embedded/eagle"),
    ("model=llama-3.1-8b method=eagle3", "eagle3_path", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
    ("model=vicuna-7b method=hydra", "hydra_path", "ankner/hydra-vicuna-7b-v1.3"),
    ("model=vicuna-7b method=rest", "datastore_path", None),
    ("model=path model.path=../a.b/c method=medusa", "heads_path", None),
    ("model=path model.path=x companions=vicuna-7b method=sps", "draft_path", "double7/vicuna-68m"),
    ("model=vicuna-7b method=medusa method.heads_path=mine", "heads_path", "mine"),
]


def test_a_models_companions_are_found_by_its_choice():
    for words, key, path in COMPANIONS:
        (job,) = compose(words.split()).jobs
        assert job.config.method[key] == path, words


def test_a_job_without_its_companion_fails_before_the_model_is_loaded(evaluate, monkeypatch):
    """The target had been loaded first, minutes for nothing."""
    monkeypatch.setattr(runner, "load_model", None)
    check(evaluate("method=medusa"), "medusa: no Medusa heads for toy")
    check(evaluate("method=sps", "method.draft_path=owner/name"), "owner/name", "not in reach")
    check(
        evaluate("-m", "method=rest,medusa"),
        "none of the 2 jobs can run",
        "no datastore",
        "no Medusa heads",
    )


def test_a_sweep_names_all_that_is_lacking_and_goes_on(call, checkpoint, tmp_path):
    """A job that could never run had made the sweep a failure, after its target was loaded."""
    configs = tmp_path / "configs/model"
    configs.mkdir(parents=True)  # a second model, without companions
    text = f"defaults: [embedded, _self_]\nname: toy\npath: {checkpoint}\ncontext: 512\n"
    (configs / "toy.yaml").write_text(text)
    sweep = ["experiment=table1", "preset=smoke", "model=toy,embedded", "max_new_tokens=8"]
    sweep += ["method=hf,vanilla,medusa,eagle", "bench.categories=[qa]"]
    places = [f"--config-dir={configs.parent}", f"results_dir={tmp_path / 'results'}"]
    outcome = call(run.main, *places, *sweep)
    assert outcome.code == 0, outcome.err
    lines = [line.strip() for line in outcome.err.splitlines()]
    at = lines.index("not available, 2 of 8 jobs are left out:")
    assert [line.split(" (")[0] for line in lines[at + 1 : at + 3]] == [
        "medusa: no Medusa heads for toy",
        "eagle: no EAGLE head for toy",
    ]

    folder = tmp_path / "results/table1"
    assert not missing_jobs(folder)
    why = "not available: medusa of toy on sample: no Medusa heads for toy"
    assert why in (folder / "tables/main.md").read_text()


def test_weights_that_are_not_whole_are_missing(call, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    outcome = call(prefetch.main, "model=path", f"model.path={folder}", "method=vanilla")
    assert outcome.code == 2 and f"{shard.name} is missing" in outcome.out


@pytest.mark.parametrize(
    ("words", "code", "lines"),
    [
        ("experiment=table1 preset=smoke", 0, ["here"] * 8),  # all of it ships
        (
            "model=vicuna-7b method=medusa",
            2,
            ["missing  model", "missing  Medusa heads Fast", "here"],
        ),
        ("method=rest companions.datastore=null", 0, ["here", "missing  datastore: ", "here"]),
    ],
)
def test_prefetching_without_a_network(call, tmp_path, words, code, lines):
    outcome = call(prefetch.main, *words.split(), f"results_dir={tmp_path / 'results'}")
    printed = outcome.out.splitlines()
    assert outcome.code == code and len(printed) == len(lines)
    assert all(line.startswith(begin) for line, begin in zip(printed, lines, strict=True)), printed
    assert not (tmp_path / "results").exists(), "no sweep was begun"
