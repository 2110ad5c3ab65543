"""What a method needs beside the model: found by model, told before anything is loaded, listed where it is not."""

import html
import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from evaluation import report, run
from evaluation.configuration.companions import missing_companion
from evaluation.loading import hub, models
from evaluation.records.sweeps import missing_jobs
from evaluation.running import runner, scheduling
from tests.evaluation.test_errors import check

ROOT = Path(__file__).resolve().parents[3]


def composed(*overrides):
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        return compose("config", overrides=list(overrides))


@pytest.mark.parametrize(
    ("overrides", "key", "path"),
    [
        (["model=embedded", "method=eagle2"], "head_path", "data/embedded/eagle"),
        (["model=vicuna-7b", "method=medusa"], "heads_path", "FasterDecoding/medusa-vicuna-7b-v1.3"),
        (["model=vicuna-13b", "method=eagle"], "head_path", "yuhuili/EAGLE-Vicuna-13B-v1.3"),
        (["model=vicuna-33b", "method=eagle2"], "head_path", "yuhuili/EAGLE-Vicuna-33B-v1.3"),
        (["model=vicuna-33b", "method=sps"], "draft_path", "double7/vicuna-68m"),
        (["model=vicuna-7b", "method=rest"], "datastore_path", None),
        (["model=path", "model.path=../a.b/c", "method=medusa"], "heads_path", None),
        (["model=path", "companions=vicuna-7b", "method=sps"], "draft_path", "double7/vicuna-68m"),
        (["model=vicuna-7b", "method=medusa", "method.heads_path=mine"], "heads_path", "mine"),
    ],
)
def test_a_models_companions_are_found_by_its_choice(overrides, key, path):
    assert composed(*overrides).method[key] == path


@pytest.fixture
def out_of_reach(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (
            {"heads_path": None},
            "no Medusa heads for toy (`python -m tools.heads medusa` trains one; companions.medusa=PATH",
        ),
        ({"head_path": "no/such/head"}, "method.head_path=no/such/head: no such folder;"),
        ({"head_path": "./head"}, "method.head_path=./head: no such folder;"),
        ({"draft_path": "owner/name"}, "method.draft_path=owner/name: no such folder, and https://"),
        ({"datastore_path": "no.bin"}, "method.datastore_path=no.bin: no such file; `python -m tools.datastore`"),
        ({"head_path": "data/embedded/eagle", "tree_path": None}, ""),
        ({}, ""),
    ],
)
def test_what_is_lacking_in_words(out_of_reach, method, says):
    found = missing_companion({"name": "x"} | method, "toy")
    assert says in found and bool(says) == bool(found)


def test_a_job_without_its_companion_fails_before_the_model_is_loaded(evaluate, monkeypatch, out_of_reach):
    """The target had been loaded first, minutes for nothing."""
    monkeypatch.setattr(runner, "load_model", None)
    check(evaluate("method=medusa"), "medusa: not available: no Medusa heads for toy")
    check(evaluate("method=sps", "method.draft_path=owner/name"), "owner/name", "not in reach")
    check(evaluate("-m", "method=rest,medusa"), "none of the 2 jobs can run", "no datastore", "no Medusa heads")


@pytest.fixture
def two_models(checkpoint, tmp_path):
    """A folder of configs with a second model, which has no companions but `toy`'s own file says so."""
    (tmp_path / "configs/model").mkdir(parents=True)
    (tmp_path / "configs/model/toy.yaml").write_text(
        f"defaults: [embedded, _self_]\nname: toy\npath: {checkpoint}\ncontext: 512\n"
    )
    return tmp_path / "configs"


METHODS = "method=hf,vanilla,medusa,eagle"


def test_a_sweep_tells_all_that_is_lacking_and_goes_on(call, two_models, monkeypatch, tmp_path):
    """A job that could never run had made the sweep a failure, after its target was loaded."""
    loads, begun = [], []
    load = models._load
    monkeypatch.setattr(models, "_load", lambda settings: loads.append(settings.name) or load(settings))
    monkeypatch.setattr(models, "_loaded", None)

    class Noted(scheduling.Runner):
        def __init__(self, config, model, answer_file=None):
            begun.append((model.name, config["method"]["name"]))
            super().__init__(config, model, answer_file)

    monkeypatch.setattr(scheduling, "Runner", Noted)
    sweep = [f"--config-dir={two_models}", "experiment=table1", "preset=smoke", "model=toy,embedded", METHODS]
    sweep += ["max_new_tokens=8", f"results_dir={tmp_path / 'results'}", "bench.categories=[qa]"]
    outcome = call(run.main, *sweep)
    assert outcome.code == 0, outcome.err
    assert loads == ["toy", "embedded"]
    assert begun == [("toy", "hf"), ("toy", "vanilla")] + [("embedded", m) for m in METHODS[7:].split(",")]
    lines = [line.strip() for line in outcome.err.splitlines()]
    at = lines.index("not available, 2 of 8 jobs are left out:")
    assert [line.split(":")[0] for line in lines[at + 1 : at + 3]] == ["medusa", "eagle"]
    assert all("for toy (" in line for line in lines[at + 1 : at + 3])
    assert "left out" not in "".join(lines[at + 3 :]) and not any("question/s" in line for line in lines[:at])

    folder = tmp_path / "results/table1"
    assert missing_jobs(folder) is None and len(list((folder / "jobs").iterdir())) == 8
    why = "not available: no Medusa heads for toy"
    table = pd.read_csv(folder / "tables/main.csv")
    (row,) = table[(table["method"] == "medusa") & (table["model"] == "toy")].to_dict("records")
    assert row["note"].startswith(why) and row["questions"] == 0 and row["mat"] != row["mat"]
    assert table["note"].notna().sum() == 2 and table["device"].notna().all()
    markdown = (folder / "tables/main.md").read_text()
    blocks = dict(block.split("\n", 1) for block in markdown.split("\n## ")[1:])
    assert blocks["toy, sample"].count("not available: ") == 2 and "not available" not in blocks["embedded, sample"]
    assert outcome.out.count("not available: ") == 2
    page = html.unescape((folder / "report.html").read_text())
    assert f">{why}" in page and page.count(">not available: no EAGLE head for toy") == 1
    paper = (folder / "tables/table1.md").read_text()
    assert re.search(r"^\| Medusa \| not available: no Medusa heads for toy .*\| - \| - \|$", paper, flags=re.M)
    assert "& not available: no Medusa heads for toy" in (folder / "tables/table1.tex").read_text()
    assert call(report.main, folder).out.count("not available: ") == 2


def test_what_comes_to_be_available_runs_then(evaluate, tmp_path):
    """The mark of a job that could not run must not stand for its answers."""
    arguments = ("-m", "method=vanilla,rest", "name=later", "bench.end=1", f"companions.datastore={tmp_path / 'd'}")
    assert evaluate(*arguments).code == 0
    folder = tmp_path / "results/later"
    assert "not available" in (folder / "tables/main.md").read_text()
    shutil.copy(ROOT / "data/embedded/datastore.bin", tmp_path / "d")
    outcome = evaluate(*arguments)
    assert outcome.code == 2 and "vocabulary" in outcome.err, "of another model: a mistake, told as one"
    assert "missing: 1 of 2 jobs" in (folder / "tables/main.md").read_text()
    assert "not available" not in (folder / "tables/main.md").read_text()


class Hub:
    """A stand-in for the hub's client: repositories by name, each a dictionary of files, and a cache of snapshots."""

    def __init__(self, cache, **repositories):
        self.cache, self.repositories, self.fetched = cache, repositories, []

    def list_repo_files(self, name, revision=None):
        return list(self.repositories[name])

    def snapshot_download(self, name, revision=None, local_files_only=False, allow_patterns=None):
        folder = self.cache / name
        if local_files_only:
            if not folder.exists():
                raise FileNotFoundError(name)
            return str(folder)
        for file, source in self.repositories[name].items():
            if any(Path(file).match(pattern) for pattern in allow_patterns):
                self.fetched.append(f"{name}/{file}")
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, folder / file)
        return str(folder)


@pytest.fixture
def a_hub(monkeypatch, tmp_path):
    def made(**repositories):
        found = Hub(tmp_path / "cache", **{f"owner/{name}": files for name, files in repositories.items()})
        for name in ("list_repo_files", "snapshot_download"):
            monkeypatch.setattr(f"huggingface_hub.{name}", getattr(found, name))
        monkeypatch.setattr(hub, "is_reachable", lambda: True)
        return found

    return made


def files(folder, **more):
    return {path.name: path for path in sorted((ROOT / folder).iterdir())} | more


def test_a_head_by_hub_name_is_fetched_safetensors_first(call, a_hub, monkeypatch, tmp_path):
    other = ROOT / "README.md"
    eagle = files("data/embedded/eagle") | {"pytorch_model.bin": other, "figure.png": other}
    found = a_hub(eagle=eagle)
    arguments = ["bench.end=1", "method=eagle", "max_new_tokens=8", f"results_dir={tmp_path}"]
    assert call(run.main, *arguments, "method.head_path=owner/eagle").code == 0
    assert found.fetched == ["owner/eagle/config.json", "owner/eagle/model.safetensors"]
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    assert call(run.main, *arguments, "method.head_path=owner/eagle", "start=hot").code == 0, "from the copy here"
    assert len(found.fetched) == 2
    (metadata,) = (json.loads(path.read_text()) for path in tmp_path.rglob("metadata.json"))
    settings = metadata["settings"]["method"]
    assert settings["head_path"] == "owner/eagle" and len(settings["head_path_sha256"]) == 64


def test_weights_that_are_cut_short_are_no_weights(checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    assert hub.missing_weights(folder, ["*.safetensors"]) == ""
    shard = folder / "model-00002-of-00003.safetensors"
    shard = shard if shard.exists() else sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    assert f"{shard.name} is cut short" in hub.missing_weights(folder, ["*.safetensors"])
    shard.unlink()
    assert hub.missing_weights(folder, ["*.safetensors", "*.bin"]) == f"{shard.name} is missing"
    assert hub.missing_weights(folder, ["*.pt"]) == "no weights (*.pt)"
