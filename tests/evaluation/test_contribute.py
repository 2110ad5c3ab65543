"""Records that ship: the same tables as the results they come from, and nobody's name or folder."""

import json
import lzma

import pytest

from evaluation import contribute, report
from evaluation.records import compact
from evaluation.records.compact import without_folders
from evaluation.records.runs import read_runs
from model.errors import UserError
from model.files import ROOT
from tests.evaluation.made_runs import answer, made, write


@pytest.fixture
def reference(tmp_path, monkeypatch):
    """Where contributed folders go in a test."""
    folder = tmp_path / "shipped" / "reference"
    folder.mkdir(parents=True)
    monkeypatch.setattr(contribute, "REFERENCE", folder)
    monkeypatch.setattr(report, "REFERENCE", folder)
    return folder


def finished(run, folder):
    """A run on disk with its summary."""
    path = write(run, folder)
    (path / "summary.json").write_text('{"steps": 3}')
    return path


@pytest.fixture
def results(tmp_path):
    """Two finished runs by hand."""
    folder = tmp_path / "study"
    for label, lengths in (("vanilla", [1, 1, 1]), ("recycling (hot)", [2, 1])):
        steps = len(lengths)
        more = {"step_nodes": [[3] * steps], "step_paths": [[[]] * steps]}
        row = answer(1, "qa", [(lengths, 0.25)], output_ids=[[5, 6, 7]], **more)
        finished(made(label, [row], started="2026-02-03T04:05:06+0000"), folder)
    return folder


def text_of(folder):
    return lzma.decompress((folder / compact.FILE).read_bytes()).decode()


def tables_of(folder):
    return {path.name: path.read_bytes() for path in (folder / "tables").iterdir()}


def test_tables_are_the_same_as_from_full_records(evaluate, call, tmp_path, reference):
    settings = ("start=cold,hot", "tree=best", "tree.nodes=8", "repeats=2", "bench.end=3")
    outcome = evaluate("-m", "method=vanilla,recycling", *settings)
    assert outcome.code == 0, outcome.err
    full = tmp_path / "results/default"
    outcome = call(contribute.main, full, "toy", "--note", "a lab | 2")
    assert outcome.code == 0, outcome.err
    assert call(report.main, reference / "toy").code == 0
    tables = tables_of(reference / "toy")
    assert tables == tables_of(full)
    assert {"main.csv", "main.tex", "audit.csv", "acceptance_by_depth.csv"} <= set(tables)
    again = contribute.contribute(full, "again", "a lab | 2").parent
    assert text_of(again) == text_of(reference / "toy"), "the same results give the same records"


PRIVATE = {
    "command": [
        "/home/jane/env/bin/python",
        "/home/jane/code/evaluation/run.py",
        "-m",
        "model.path=/home/jane/m/vicuna-7b",
        "bench.url=https://h.org/a?signature=77",
        "results_dir=~/jane/results",
        "method.k=4,8",
        "model.path=lmsys/vicuna-7b-v1.3",
    ],
    "config": {
        "start": "hot",
        "results_dir": "/scratch/jane/results",
        "model": {"path": "~/m/vicuna-7b"},
        "bench": {
            "path": "data/sample/question.jsonl",
            "url": "https://kim:pass@h.org/a?signature=77",
        },
    },
    "execution_why": "its graph failed (see '/scratch/tmp 1/log.txt' and C:\\Users\\jane\\log.txt)",
    "environment": {"TOKEN": "hf_77"},
}
WORDS = ["jane", "fastbox", "/home", "scratch", "hf_77", "77aa", "vault", "secret", "h.org"]


@pytest.mark.parametrize(
    ("private", "public"),
    [
        ("http://gpu7.corp:8000?key=abc", ""),
        ("file:///home/alice/s", ""),
        ("see https://h/x?key=abc now", "see  now"),
        ("../alice/models/m", "m"),
        ("~alice/q.jsonl", "q.jsonl"),
        ("C:\\Users\\a\\m", "m"),
        ('/home/al"ice/my models/x', "x"),
        ("model.path=/home/a b/c", "model.path=c"),
        ("read /home/alice/a and /b/c", "read "),
        ("host gpu7:/srv/x: bad", "host gpu7:"),
        ("H200 / 16 cores / driver 550, tokens/s", "H200 / 16 cores / driver 550, tokens/s"),
        ("data/spec_bench/question.jsonl", "data/spec_bench/question.jsonl"),
    ],
)
def test_folders_and_addresses_are_private(private, public):
    assert without_folders({"values": [private]}) == {"values": [public]}


def test_what_is_published_is_a_list_of_fields_without_folders_or_links(results, reference):
    model = {"path": "/data/my [secret] models/toy", "name": "/data/secret/toy"}
    row = answer(1, "qa", [([1], 1.0)], output_ids=[[3]])
    row |= {"answer_id": "77aa", "model_id": "fastbox-model"}
    row["choices"][0]["turns"] = ["a text by jane"]
    path = finished(made("pld", [row], model=model, started="2026", **PRIVATE), results)
    path.rename(path.with_name("_data_secret_toy-file-pld-0123abcd"))
    text = text_of(contribute.contribute(results, "study").parent)
    assert not [word for word in WORDS if word in text]
    kept = next(run for run in read_runs(reference / "study") if run.label == "pld")
    assert kept.folder.name == "run-0123abcd"
    assert (kept.settings["model"]["path"], kept.settings["model"]["name"]) == ("toy", "toy")
    words = ["-m", "model.path=vicuna-7b", "method.k=4,8"]
    words.append("model.path=lmsys/vicuna-7b-v1.3")
    assert kept.metadata["command"] == ["python", "-m", "evaluation.run", *words]
    bench = {"path": "data/sample/question.jsonl"}
    assert kept.config == {"start": "hot", "model": {"path": "vicuna-7b"}, "bench": bench}
    assert kept.metadata["execution_why"] == "its graph failed (see '"


def test_what_is_not_finished_is_refused(results, reference, call):
    finished(made("pld", [answer(1, "qa", [([1], 1.0)])], questions=3), results)
    outcome = call(contribute.main, results, "study")
    assert outcome.code == 2
    assert "incomplete: pld, repeat 0: 1 of 3 questions" in outcome.err
    assert not (reference / "study").exists()
    jobs = [["k=1", "method=pld"], ["k=1", "method=sps"]]
    (results / "sweep.json").write_text(json.dumps({"command": "c", "jobs": jobs}))
    outcome = call(contribute.main, results, "study")
    assert "missing: 2 of 2 jobs (method=pld; method=sps)" in outcome.err


def test_shipped_records_are_not_written_over(results, reference):
    first = contribute.contribute(results, "study").read_bytes()
    with pytest.raises(UserError, match="must be new, in a folder"):
        contribute.contribute(results, "study", "another")
    assert (reference / "study" / compact.FILE).read_bytes() == first


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x y"])
def test_wrong_names_are_refused(name, results, reference):
    with pytest.raises(UserError, match="must be new, in a folder"):
        contribute.contribute(results, name)


@pytest.mark.parametrize("data", ["cut", b"no xz", b""])
def test_broken_records_are_named(data, results, reference, call):
    file = contribute.contribute(results, "study")
    file.write_bytes(file.read_bytes()[:-20] if data == "cut" else data)
    outcome = call(report.main, file.parent)
    assert outcome.code == 2 and f"{file}: not compact records" in outcome.err


def test_what_ships_is_small():
    files = sorted((ROOT / "results/reference").glob(f"*/{compact.FILE}"))
    assert sum(file.stat().st_size for file in files) < 20 * 2**20
