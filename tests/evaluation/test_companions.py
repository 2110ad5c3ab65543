"""What a method needs next to the model: found by model, refused before anything is loaded, fetched beforehand."""

import html
import json
import shutil
import urllib.error
from pathlib import Path

import pandas as pd
import pytest

from evaluation import prefetch, report, run
from evaluation.configuration.jobs import compose
from evaluation.loading import hub, models
from evaluation.loading.companions import KINDS, missing_companion
from evaluation.records.provenance import model_files
from evaluation.records.sweeps import missing_jobs
from evaluation.running import runner, scheduling
from tests.evaluation.test_errors import check

ROOT = Path(__file__).resolve().parents[2]

COMPANIONS = [
    ("model=embedded method=eagle2", "head_path", "data/embedded/eagle"),
    ("model=vicuna-7b method=medusa", "heads_path", "FasterDecoding/medusa-vicuna-7b-v1.3"),
    ("model=vicuna-13b method=eagle", "head_path", "yuhuili/EAGLE-Vicuna-13B-v1.3"),
    ("model=vicuna-13b method=eagle3", "eagle3_path", "yuhuili/EAGLE3-Vicuna1.3-13B"),
    ("model=llama-3.1-8b method=eagle3", "eagle3_path", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
    ("model=llama-3.1-8b method=eagle2", "head_path", None),
    ("model=vicuna-7b method=hydra", "hydra_path", "ankner/hydra-vicuna-7b-v1.3"),
    ("model=vicuna-7b method=samd", "head_path", "yuhuili/EAGLE-Vicuna-7B-v1.3"),
    ("model=vicuna-33b method=eagle2", "head_path", "yuhuili/EAGLE-Vicuna-33B-v1.3"),
    ("model=vicuna-33b method=sps", "draft_path", "double7/vicuna-68m"),
    ("model=vicuna-7b method=rest", "datastore_path", None),
    ("model=path model.path=../a.b/c method=medusa", "heads_path", None),
    ("model=path model.path=x companions=vicuna-7b method=sps", "draft_path", "double7/vicuna-68m"),
    ("model=vicuna-7b method=medusa method.heads_path=mine", "heads_path", "mine"),
]


def test_a_models_companions_are_found_by_its_choice():
    for words, key, path in COMPANIONS:
        (job,) = compose(words.split()).jobs
        assert job.config.method[key] == path, words


@pytest.fixture
def out_of_reach(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("model.pretrained.answers", lambda *_: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_what_is_lacking_in_words(out_of_reach):
    for method, says in [
        ({"heads_path": None}, "no Medusa heads for toy (`python -m tools.heads medusa` trains one; companions."),
        ({"hydra_path": None}, "no Hydra heads for toy (no command here trains one; configs/companions names public"),
        ({"head_path": "no/such/head"}, "method.head_path=no/such/head: no such folder;"),
        ({"head_path": "./head"}, "method.head_path=./head: no such folder;"),
        ({"draft_path": "owner/name"}, "method.draft_path=owner/name: no such folder, and https://"),
        ({"datastore_path": "no.bin"}, "method.datastore_path=no.bin: no such file; `python -m tools.datastore`"),
        ({"head_path": "data/embedded/eagle", "tree_path": None}, ""),
        ({}, ""),
    ]:  # fmt: skip
        reason = missing_companion({"name": "x"} | method, "toy")
        assert says in reason and bool(says) == bool(reason)


def test_a_job_without_its_companion_fails_before_the_model_is_loaded(
    evaluate, monkeypatch, out_of_reach
):
    """The target had been loaded first, minutes for nothing."""
    monkeypatch.setattr(runner, "load_model", None)
    check(evaluate("method=medusa"), "medusa: not available: no Medusa heads for toy")
    check(evaluate("method=sps", "method.draft_path=owner/name"), "owner/name", "not in reach")
    check(
        evaluate("-m", "method=rest,medusa"),
        "none of the 2 jobs can run",
        "no datastore",
        "no Medusa heads",
    )


METHODS = "method=hf,vanilla,medusa,eagle"


def test_a_sweep_names_all_that_is_lacking_and_goes_on(call, checkpoint, monkeypatch, tmp_path):
    """A job that could never run had made the sweep a failure, after its target was loaded."""
    (tmp_path / "configs/model").mkdir(parents=True)  # a second model, without companions
    text = f"defaults: [embedded, _self_]\nname: toy\npath: {checkpoint}\ncontext: 512\n"
    (tmp_path / "configs/model/toy.yaml").write_text(text)
    loads, begun = [], []
    load = models._load
    monkeypatch.setattr(
        models, "_load", lambda settings: loads.append(settings.name) or load(settings)
    )
    monkeypatch.setattr(models, "_loaded", None)

    class Noted(scheduling.Runner):
        def __init__(self, config, model, answer_file=None):
            begun.append((model.name, config["method"]["name"]))
            super().__init__(config, model, answer_file)

    monkeypatch.setattr(scheduling, "Runner", Noted)
    sweep = [
        f"--config-dir={tmp_path / 'configs'}",
        "experiment=table1",
        "preset=smoke",
        "model=toy,embedded",
        METHODS,
    ]
    sweep += ["max_new_tokens=8", f"results_dir={tmp_path / 'results'}", "bench.categories=[qa]"]
    outcome = call(run.main, *sweep)
    assert outcome.code == 0, outcome.err
    assert loads == ["toy", "embedded"], "no model is loaded only to check its jobs"
    of_embedded = [("embedded", method) for method in METHODS[7:].split(",")]
    of_toy = [("toy", "hf"), ("toy", "vanilla")]
    assert begun == [*of_toy, *of_embedded]
    lines = [line.strip() for line in outcome.err.splitlines()]
    at = lines.index("not available, 2 of 8 jobs are left out:")
    assert [line.split(":")[0] for line in lines[at + 1 : at + 3]] == ["medusa", "eagle"]
    assert all("for toy (" in line for line in lines[at + 1 : at + 3])

    folder = tmp_path / "results/table1"
    assert not missing_jobs(folder) and len(list((folder / "jobs").iterdir())) == 8
    why = "not available: no Medusa heads for toy"
    table = pd.read_csv(folder / "tables/main.csv")
    (row,) = table[(table["method"] == "medusa") & (table["model"] == "toy")].to_dict("records")
    assert row["note"].startswith(why) and row["questions"] == 0 and row["mat"] != row["mat"]
    assert table["note"].notna().sum() == 2 and table["device"].notna().all()
    assert (
        outcome.out.count("not available: ")
        == 2
        == call(report.main, folder).out.count("not available: ")
    )
    assert f">{why}" in html.unescape((folder / "report.html").read_text())
    assert "| not available: no Medusa heads for toy" in (folder / "tables/table1.md").read_text()


class Hub:
    """A stand-in for the hub's client: repositories by name, each a dictionary of files, and a cache of snapshots."""

    def __init__(self, cache, **repositories):
        self.cache, self.fetched = cache, []
        self.repositories = {f"owner/{name}": files for name, files in repositories.items()}

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


def test_a_model_and_a_head_by_hub_name_are_fetched_once_safetensors_first(
    call, monkeypatch, tmp_path
):
    embedded = ROOT / "data/embedded"
    model, eagle = (
        {path.name: path for path in folder.glob("*.*")}
        for folder in (embedded, embedded / "eagle")
    )
    client = Hub(
        tmp_path / "cache", model=model, eagle=eagle | {"pytorch_model.bin": ROOT / "README.md"}
    )
    for name in ("list_repo_files", "snapshot_download"):
        monkeypatch.setattr(f"huggingface_hub.{name}", getattr(client, name))
    monkeypatch.setattr("model.pretrained.answers", lambda *_: True)
    arguments = [
        "model=path",
        "model.path=owner/model",
        "method=eagle",
        "method.head_path=owner/eagle",
    ]
    outcome = call(prefetch.main, *arguments)
    assert outcome.code == 0, outcome.out
    first, *others = outcome.out.splitlines()
    assert first == "here     model owner/model (on a CPU it takes 0.5 GB of memory)"
    assert others == ["here     EAGLE head owner/eagle", "here     bench sample"]
    assert (
        "owner/model/tokenizer.json" in client.fetched
        and "owner/model/datastore.bin" not in client.fetched
    )
    assert sorted(client.fetched)[:2] == [
        "owner/eagle/config.json",
        "owner/eagle/model.safetensors",
    ]
    once = list(client.fetched)
    monkeypatch.setattr("model.pretrained.answers", lambda *_: False)
    assert call(prefetch.main, *arguments).code == 0 and client.fetched == once
    few = [
        "method=eagle",
        "method.head_path=owner/eagle",
        "bench.end=1",
        "max_new_tokens=8",
        f"results_dir={tmp_path}",
    ]
    assert call(run.main, *few).code == 0, "from the copy here"
    (metadata,) = (json.loads(path.read_text()) for path in tmp_path.rglob("metadata.json"))
    settings = metadata["settings"]["method"]
    assert settings["head_path"] == "owner/eagle" and len(settings["head_path_sha256"]) == 64
    (client.cache / "owner/eagle/model.safetensors").write_bytes(b"half")
    outcome = call(prefetch.main, *arguments)
    assert (
        outcome.code == 2
        and "no EAGLE head for owner/model (method.head_path=owner/eagle" in outcome.out
    )


def test_a_second_copy_of_the_weights_is_not_looked_at(checkpoint, monkeypatch, tmp_path):
    """Nor fetched, hashed or required: Mistral's repositories have consolidated.safetensors, which is not loaded."""
    files = {path.name: path for path in checkpoint.iterdir()}
    second = tmp_path / "consolidated.safetensors"
    second.write_bytes(b"half")
    index = tmp_path / "consolidated.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "consolidated-00001.safetensors"}}')
    client = Hub(tmp_path / "cache", model=files | {second.name: second, index.name: index})
    for name in ("list_repo_files", "snapshot_download"):
        monkeypatch.setattr(f"huggingface_hub.{name}", getattr(client, name))
    monkeypatch.setattr("model.pretrained.answers", lambda *_: True)
    for weights in (
        KINDS["draft_path"].weights,
        models.ModelSettings("m", "m", allow_pickle=True).weight_files,
    ):
        folder = hub.fetch_snapshot("owner/model", weights)
    assert "owner/model/consolidated.safetensors" not in client.fetched
    assert len([*folder.glob("*.safetensors")]) == len([*checkpoint.glob("*.safetensors")]) > 1
    before = model_files(folder, weights)
    shutil.copy(second, folder)
    assert model_files(folder, weights) == before and not hub.missing_weights(folder, weights)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert hub.missing_weights(folder, weights).startswith(
        "model.safetensors.index.json is cut short or broken"
    )


def test_weights_that_are_not_whole_are_missing(call, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    assert hub.missing_weights(folder, ["*.safetensors"]) == ""
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    assert f"{shard.name} is cut short" in hub.missing_weights(folder, ["*.safetensors"])
    shard.unlink()
    assert hub.missing_weights(folder, ["*.safetensors", "*.bin"]) == f"{shard.name} is missing"
    assert hub.missing_weights(folder, ["*.pt"]) == "no weights (*.pt)"
    outcome = call(prefetch.main, "model=path", f"model.path={folder}", "method=vanilla")
    assert outcome.code == 2 and f"{shard.name} is missing" in outcome.out


def test_prefetching_without_a_network(call, out_of_reach, tmp_path):
    outcome = call(
        prefetch.main, "experiment=table1", "preset=smoke", f"results_dir={tmp_path / 'results'}"
    )
    assert outcome.code == 0, outcome.out
    assert [line.split()[0] for line in outcome.out.splitlines()] == ["here"] * 8, "all of it ships"
    assert not (tmp_path / "results").exists(), "no sweep was begun"
    outcome = call(prefetch.main, "model=vicuna-7b", "method=medusa")
    model, heads, bench = outcome.out.splitlines()
    assert outcome.code == 2 and model.startswith("missing") and "not in reach" in model
    assert (
        heads.startswith("missing")
        and "FasterDecoding/medusa-vicuna-7b-v1.3" in heads
        and bench.startswith("here")
    )
    outcome = call(prefetch.main, "method=rest", "companions.datastore=null")
    assert (
        outcome.code == 0
        and "missing  no datastore for embedded (`python -m tools.datastore`" in outcome.out
    )
    outcome = call(prefetch.main, "method=rest", "companions.datastore=no.bin")
    assert outcome.code == 2 and "no.bin: no such file" in outcome.out, (
        "one that is named is wanted"
    )
