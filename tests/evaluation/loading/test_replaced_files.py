"""Other files behind an unchanged path are another run: nobody's answers are taken for another model's."""

import hashlib
import json
import os
import shutil
import time

import pytest
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file

from evaluation.configuration.config import checked_config
from evaluation.records.provenance import sha256_of
from evaluation.records.runs import read_runs
from evaluation.running.scheduling import Job, run_jobs
from model.errors import UserError
from model.files import ROOT
from tests.evaluation.made_runs import on_paper


@pytest.fixture
def model(checkpoint, tmp_path):
    """A model's folder that may be written to."""
    return shutil.copytree(checkpoint, tmp_path / "model")


@pytest.fixture
def again(model, bench_file, tmp_path):
    """A run of this model, without a report; gives the runs there are."""
    base = ["model=path", f"model.path={model}", "model.name=toy", "bench=file", "bench.end=2"]
    base += [f"bench.path={bench_file}", "max_new_tokens=8", "timed=false"]
    base += [f"results_dir={tmp_path / 'results'}"]

    def running(*overrides):
        with initialize_config_dir(str(ROOT / "configs"), version_base=None):
            run_jobs([Job(checked_config(compose("config", [*base, *overrides])))])
        return read_runs(tmp_path / "results/default")

    return running


def other_weights(model):
    """Weights of the same shapes, under the same names."""
    for path in model.glob("*.safetensors"):
        tensors = {name: tensor.flip(0) for name, tensor in load_file(path).items()}
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_run_is_not_taken_for_one_of_the_files_that_lie_there_now(again, model, kind):
    """The old answers were returned as this model's."""
    (old,) = again("method=vanilla")
    KINDS[kind](model)
    runs = again("method=vanilla")
    (new,) = [run for run in runs if run.folder != old.folder]
    differ = dict(old.files.items() ^ new.files.items()).keys()
    assert differ == {kind if kind != "chat template" else "tokenizer"}
    assert old.comparable != new.comparable, "they are not compared"
    if kind == "weights":
        ids = [[row["choices"][0]["output_ids"] for row in run.answers] for run in (old, new)]
        assert ids[0] != ids[1], "the weights of the job before are not used again"
    text = on_paper(runs)
    named = all(f"files={run.loading['files']}" in text for run in runs)
    assert named or (kind == "chat template" and "template=chat" in text)
    assert len(again("method=vanilla")) == len(runs)


def test_a_saved_state_is_of_the_same_files(again, model):
    recycling = ("method=recycling", "tree=best", "tree.nodes=6")
    again(*recycling, "start=hot")
    assert len(again(*recycling, "start=saved")) == 2
    other_weights(model)
    with pytest.raises(
        UserError, match=r"start=saved: .*with start=hot, these settings and these files"
    ):
        again(*recycling, "start=saved")


def test_replaced_companions_are_another_run(again, checkpoint, tmp_path):
    draft = shutil.copytree(checkpoint, tmp_path / "draft")
    tree = tmp_path / "tree.yaml"
    tree.write_text("[[0], [1]]")
    of_tree = ("method=recycling", "tree=file", f"tree.path={tree}")
    (hot,) = again(*of_tree, "start=hot")
    state = shutil.copy(hot.folder / "state.safetensors", tmp_path / "state.safetensors")
    commands = [
        ("method=sps", f"method.draft_path={draft}"),
        of_tree,
        ("method=recycling", "tree=best", "tree.nodes=4", f"start={state}"),
    ]
    assert [len(again(*command)) for command in commands] == [2, 3, 4]
    other_weights(draft)
    tree.write_text("[[0], [0, 0]]")
    save_file({name: tensor + 1 for name, tensor in load_file(state).items()}, state)
    assert [len(again(*command)) for command in commands] == [5, 6, 7]


def test_a_file_is_hashed_once_until_it_is_another(tmp_path, monkeypatch):
    file = tmp_path / "weights"
    file.write_bytes(b"one weight")
    assert sha256_of(file) == hashlib.sha256(b"one weight").hexdigest()
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert sha256_of(file) == hashlib.sha256(b"one weight").hexdigest()
    monkeypatch.undo()
    times = file.stat()
    time.sleep(0.02)  # more than a clock tick of the file system
    file.write_bytes(b"two weight")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert sha256_of(file) == hashlib.sha256(b"two weight").hexdigest(), "of the same size and time"
