"""Other files behind an unchanged path are another run: nobody's answers are taken for another model's."""

import hashlib
import json
import os
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from evaluation.configuration.config import checked_config
from evaluation.loading import models
from evaluation.loading.settings import ModelSettings
from evaluation.records.provenance import sha256_of
from evaluation.records.runs import read_runs
from evaluation.running.scheduling import Job, run_jobs
from model.errors import UserError
from model.files import ROOT
from tests.evaluation.loading.test_gguf import cache, write  # noqa: F401  (a fixture)
from tests.evaluation.made_runs import on_paper


@pytest.fixture
def model(checkpoint, tmp_path):
    """A model's folder that may be written to."""
    return shutil.copytree(checkpoint, tmp_path / "model")


@pytest.fixture
def again(model, bench_file, tmp_path):
    """A run of this model, without a report; gives the runs there are."""

    def running(*overrides):
        base = [
            "model=path",
            f"model.path={model}",
            "model.name=toy",
            "bench=file",
            f"bench.path={bench_file}",
        ]
        base += [
            "bench.end=2",
            "max_new_tokens=8",
            "timed=false",
            f"results_dir={tmp_path / 'results'}",
        ]
        with initialize_config_dir(str(ROOT / "configs"), version_base=None):
            run_jobs([Job(checked_config(compose("config", [*base, *overrides])))])
        return read_runs(tmp_path / "results/default")

    return running


def other_weights(model):
    """Weights of the same shapes, under the same names."""
    for path in model.glob("*.safetensors"):
        torch.manual_seed(1)
        tensors = {
            name: tensor + torch.randn_like(tensor) for name, tensor in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})


def changed(name, **keys):
    def change(model):
        settings = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(settings | keys))

    return change


def own_template(model):
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")


KINDS = {
    "weights": other_weights,
    "config": changed("generation_config.json", eos_token_id=[2, 50]),
    "tokenizer": changed("tokenizer_config.json", add_bos_token=False),
    "chat template": own_template,
}


def test_a_finished_run_is_not_taken_for_one_of_the_files_that_lie_there_now(again, model):
    """The old answers were returned as this model's."""
    (last,) = again("method=vanilla")
    before = {path: path.read_bytes() for path in last.folder.iterdir()}
    runs = [last]
    for kind, change in KINDS.items():
        change(model)
        again_runs = again("method=vanilla")
        assert len(again_runs) == len(runs) + 1
        (new,) = [run for run in again_runs if run.folder not in {run.folder for run in runs}]
        differ = dict(last.files.items() ^ new.files.items()).keys()
        assert differ == {kind if kind != "chat template" else "tokenizer"}
        assert last.comparable != new.comparable, "they are not compared"
        if kind == "weights":
            ids = [[row["choices"][0]["output_ids"] for row in run.answers] for run in (last, new)]
            assert ids[0] != ids[1], "the weights of the job before are not used again"
        runs, last = [*runs, new], new
    assert {path: path.read_bytes() for path in runs[0].folder.iterdir()} == before
    text = on_paper(runs)
    assert all(f"files={run.loading['files']}" in text for run in runs)
    assert len(again("method=vanilla")) == len(runs)


def test_a_run_of_another_schema_is_left_alone_and_named(again, capsys):
    (one,) = again("method=vanilla")
    old = one.folder.rename(one.folder.with_name("toy-file-vanilla-00000000"))
    one.metadata["settings"]["schema"] = 2
    (old / "metadata.json").write_text(json.dumps(one.metadata))
    (run,) = again("method=vanilla")
    assert (
        run.folder != old
        and f"left out: {old}: recorded by another version" in capsys.readouterr().err
    )
    with pytest.raises(
        UserError, match=r"another version of this project \(schema 2, this one reads 4\); "
    ):
        again("method=vanilla", f"run_dir={old}")


def test_a_saved_state_is_of_the_same_files(again, model):
    recycling = ("method=recycling", "tree=best", "tree.nodes=6")
    again(*recycling, "start=hot")
    assert len(again(*recycling, "start=saved")) == 2
    other_weights(model)
    with pytest.raises(
        UserError, match=r"start=saved: .*with start=hot, these settings and these files"
    ):
        again(*recycling, "start=saved")


def test_a_replaced_gguf_file_is_another_model(tmp_path, cache):  # noqa: F811
    settings = ModelSettings("toy", str(tmp_path / "toy.gguf"), device="cpu")
    write(tmp_path / "toy.gguf")
    one = models.load_model(settings)
    assert models.load_model(settings) is one and set(one.files) == {
        "weights",
        "config",
        "tokenizer",
    }
    write(tmp_path / "toy.gguf", theta=20000.0)
    other = models.load_model(settings)
    assert other.target.model.config.rope_parameters["rope_theta"] == 20000.0, (
        "not the one in memory"
    )
    assert (
        one.files["weights"] == other.files["weights"]
        and one.files["config"] != other.files["config"]
    )


def test_a_hub_model_is_its_commit(checkpoint, monkeypatch):
    """Tokenizer and weights are read from one commit, which a run records."""
    reads = []

    def reading(kind):
        def from_pretrained(path, revision, **more):
            reads.append((path, revision))
            loaded = kind.from_pretrained(checkpoint, **more)
            config = (
                loaded
                if kind is AutoConfig
                else loaded[0].config
                if kind is AutoModelForCausalLM
                else loaded
            )
            config._commit_hash = commit
            return loaded

        return SimpleNamespace(from_pretrained=from_pretrained)

    for kind in (AutoConfig, AutoTokenizer, AutoModelForCausalLM):
        monkeypatch.setattr(f"transformers.{kind.__name__}", reading(kind))
    monkeypatch.setattr("model.pretrained.answers", lambda *_: True)
    for commit in ("a" * 40, "b" * 40):
        loaded = models._load(
            ModelSettings("toy", "owner/toy", revision="main", device="cpu", dtype="float32")
        )
        assert loaded.files == {"commit": commit} and reads[-3][1] == "main"
        assert reads[-2:] == [("owner/toy", commit)] * 2


def test_replaced_companions_are_another_run(again, checkpoint, tmp_path):
    draft, tree = shutil.copytree(checkpoint, tmp_path / "draft"), tmp_path / "tree.yaml"
    tree.write_text("[[0], [1]]")
    (hot,) = again("method=recycling", "tree=file", f"tree.path={tree}", "start=hot")
    state = shutil.copy(hot.folder / "state.safetensors", tmp_path / "state.safetensors")
    commands = {
        "sps": ("method=sps", f"method.draft_path={draft}"),
        "tree": ("method=recycling", "tree=file", f"tree.path={tree}"),
        "start": ("method=recycling", "tree=best", "tree.nodes=4", f"start={state}"),
    }
    count = [len(again(*command)) for command in commands.values()][-1]
    assert count == 4 == len(again(*commands["sps"]))
    other_weights(draft)
    tree.write_text("[[0], [0, 0]]")
    save_file({name: tensor + 1 for name, tensor in load_file(state).items()}, state)
    assert [len(again(*command)) for command in commands.values()] == [5, 6, 7]


def test_a_file_is_hashed_once_until_it_is_another(tmp_path, monkeypatch):
    hashed, digest_of = [], hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda *given: (hashed.append(given), digest_of(*given))[1]
    )

    def is_right(file):
        return sha256_of(file) == hashlib.sha256(file.read_bytes()).hexdigest()

    file = tmp_path / "weights"
    file.write_bytes(b"one weight")
    assert all(is_right(file) for _ in range(3)) and len(hashed) == 1
    times = file.stat()
    time.sleep(0.02)  # more than a clock tick of the file system
    file.write_bytes(b"two weight")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert is_right(file), "of the same size and time"
    (tmp_path / "other").write_bytes(b"any weight")
    (tmp_path / "other").replace(file)
    assert is_right(file)
