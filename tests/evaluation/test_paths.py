"""Folders of any name, and those of the home folder, for every setting that is a path."""

import shutil

import pytest

from evaluation import audit, prefetch, report, run, sweep, tree_search
from evaluation.configuration.jobs import compose
from model import Decoder
from tools import datastore

ODD = "Téléchargements (1) & [it's] #2"


@pytest.fixture
def odd(checkpoint, bench_file, tmp_path, monkeypatch):
    """A folder below the home folder, with a model, questions and a tree; another one is current."""
    folder = tmp_path / ODD
    shutil.copytree(checkpoint, folder / "model")
    shutil.copy(bench_file, folder / "q.jsonl")
    (folder / "tree.yaml").write_text("[[0], [1]]")
    (folder / "text.txt").write_text("some text of a user")
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setenv("HOME", str(tmp_path))
    return folder


@pytest.fixture
def words():
    paths = {"model": "model", "bench": "q.jsonl", "tree": "tree.yaml"}
    chosen = ["model=path", "bench=file", "tree=file", "bench.end=1", "max_new_tokens=8"]
    return [*chosen, *(f"{group}.path=~/{ODD}/{name}" for group, name in paths.items())]


def test_typed_paths(odd, words, call, tmp_path):
    where = [f"results_dir=~/{ODD}/results", "name=1e3", "method=vanilla,recycling", "start=hot"]
    commands = [
        (prefetch.main, *words),
        (run.main, *words, *where),
        (run.main, *words, f"run_dir=~/{ODD}/run", f"start=~/{ODD}/state"),
        (report.main, f"~/{ODD}/results/1e3"),
        (report.main, "--answers", f"~/{ODD}/run/answ*.jsonl", "--out", f"~/{ODD}/table.csv"),
        (audit.main, f"~/{ODD}/results/1e3"),
        (tree_search.main, f"~/{ODD}/results/1e3", "--nodes", 1, "--output", f"~/{ODD}/best.yaml"),
    ]
    for main, *arguments in commands:
        if f"start=~/{ODD}/state" in arguments:  # what the hot run has saved
            (state,) = odd.glob("results/1e3/runs/*/state.safetensors")
            shutil.copy(state, odd / "state")
        outcome = call(main, *arguments)
        assert outcome.code == 0, (main, outcome.err)
    for name in ("results/1e3/report.html", "run/summary.json", "table.csv", "best.yaml"):
        assert (odd / name).is_file(), name
    assert not any((tmp_path / "current").iterdir())


def test_paths_in_python_and_of_tools(odd, checkpoint, tmp_path):
    files = {"model": f"~/{ODD}/model", "bench": f"~/{ODD}/q.jsonl", "method": "vanilla"}
    where = {"results_dir": f"~/{ODD}/results", "bench__end": 1, "max_new_tokens": 8}
    assert len(sweep.evaluate(**files, **where)) and (odd / "results/evaluate").is_dir()
    decoder = Decoder.from_pretrained(str(checkpoint), method="recycling")
    decoder.save_state(f"~/{ODD}/state")
    decoder.load_state(f"~/{ODD}/state")
    arguments = ("--model", "model", "--text", "text.txt", "--output", "data.bin")
    datastore.main([f"~/{ODD}/{word}" if word[0] != "-" else word for word in arguments])
    assert {"state", "data.bin"} <= {path.name for path in odd.iterdir()}
    assert not any((tmp_path / "current").iterdir())


def test_a_launchers_own_folder(odd):
    composed = compose([f"results_dir=~/{ODD}", "method=vanilla,pld"])
    assert composed.config.hydra.sweep.dir == f"{odd}/.hydra"
