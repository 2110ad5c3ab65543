"""Records that ship: the same tables and figures as the results they come from, and nobody's name or folder in them."""

import json
import lzma
import subprocess
from pathlib import Path

import pytest

from evaluation import contribute, report
from evaluation.records import compact
from evaluation.records.runs import read_runs
from evaluation.statistics.agreement import GAPS
from evaluation.statistics.pools import pools
from model.errors import UserError
from tests.evaluation.made_runs import answer, made, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def reference(tmp_path, monkeypatch):
    """Where contributed folders go in a test."""
    folder = tmp_path / "shipped" / "reference"
    monkeypatch.setattr(contribute, "REFERENCE", folder)
    monkeypatch.setattr(report, "REFERENCE", folder)
    return folder


def finished(run, folder, **summary):
    """A run on disk with its summary."""
    path = write(run, folder)
    (path / "summary.json").write_text(json.dumps({"steps": 3} | summary))
    return path


@pytest.fixture
def results(tmp_path):
    """Two finished runs by hand."""
    folder = tmp_path / "study"
    for label, lengths in (("vanilla", [1, 1, 1]), ("recycling (hot)", [2, 1])):
        more = {
            "output_ids": [[5, 6, 7]],
            "step_nodes": [[3] * len(lengths)],
            "step_paths": [[[]] * len(lengths)],
        }
        finished(made(label, [answer(1, "qa", [(lengths, 0.25)], **more)]), folder)
    return folder


def text_of(folder):
    return lzma.decompress((folder / compact.FILE).read_bytes()).decode()


def test_tables_are_the_same_as_from_full_records(evaluate, call, tmp_path, reference):
    sweep = (
        "method=vanilla,recycling",
        "start=cold,hot",
        "tree=best",
        "tree.nodes=8",
        "repeats=2",
        "bench.end=3",
    )
    outcome = evaluate("-m", *sweep)
    assert outcome.code == 0, outcome.err
    full = tmp_path / "results/default"
    outcome = call(contribute.main, full, "toy")
    assert outcome.code == 0, outcome.err
    assert call(report.main, reference / "toy").code == 0
    full_tables, tables = (
        {path.name: path.read_bytes() for path in (folder / "tables").iterdir()}
        for folder in (full, reference / "toy")
    )
    assert tables == full_tables and {"main.csv", "audit.csv", "acceptance_by_depth.csv"} <= set(
        tables
    )
    runs = read_runs(reference / "toy")
    assert [pool.name for pool in pools(runs)] == [pool.name for pool in pools(read_runs(full))]
    assert {len(pool.repeats) for pool in pools(runs)} == {2} and {
        run.has_texts for run in runs
    } == {False}
    again = contribute.contribute(full, "again")
    assert text_of(again) == text_of(reference / "toy"), "the same results give the same records"
    pages = [(folder / "report.html").read_text() for folder in (reference / "toy", full)]
    assert ["hold token ids and no text" in page for page in pages] == [True, False]


PRIVATE = {
    "command": [
        "/home/jane/env/bin/python",
        "/home/jane/code/evaluation/run.py",
        "-m",
        *(
            "model.path=/home/jane/m/vicuna-7b",
            "results_dir=file:///scratch/jane",
            "run_dir=results/mine",
        ),
        *(
            "bench.path=nas:/vault/q.jsonl",
            "bench.url=https://h.org/a?signature=77",
            "note=a [secret] b",
        ),
        *(
            "method.k=4,8",
            "bench.categories=[qa,rag]",
            "model.path=vault/toy",
            "--config-dir=/scratch",
        ),
        *(
            "+memo=vault",
            "name=vault",
            "bench.path=data/vault/q.jsonl",
            "model.path=lmsys/vicuna-7b-v1.3",
        ),
    ],
    "config": {
        "start": "hot",
        "results_dir": "/scratch/jane/results",
        "model": {"path": "~/m/vicuna-7b"},
        "bench": {
            "path": "vault/question.jsonl",
            "url": "https://kim:pass@h.org/a?signature=77",
            "layout": "speed_bench",
        },
    },
    "execution_why": "its graph failed (see '/scratch/tmp 1/log.txt' and C:\\Users\\jane\\log.txt)",
    "environment": {"TOKEN": "hf_77"},
}


def test_what_is_published_is_a_list_of_fields_without_folders_or_links(results, reference):
    """Signatures of links, folders with spaces or brackets and a model's path in a run's name had been published."""
    model = {"path": "/data/my [secret] models/toy/", "name": "/data/secret/toy"}
    run = made("pld", [answer(1, "qa", [([1], 1.0)], output_ids=[[3]])], model=model, **PRIVATE)
    row = run.answers[0]
    row |= {"answer_id": "77aa", "tstamp": 1234.5, "model_id": "fastbox-model"}
    row["choices"][0] |= {"turns": ["a text by jane"], "notes": "hf_77"}
    path = finished(run, results, drafter={"table": "/home/jane/tables/t.bin"})
    path.rename(path.with_name("_data_secret_toy-file-pld-0123abcd"))
    text = text_of(contribute.contribute(results, "study"))
    for word in (
        "jane",
        "fastbox",
        "/home",
        "scratch",
        "hf_77",
        "77aa",
        "1234.5",
        "a text",
        "vault",
        "secret",
        "h.org",
    ):
        assert word not in text, word
    for value in ("data/embedded", "lmsys/vicuna-7b-v1.3", "float16", "AMD EPYC, 1 thread"):
        assert compact.without_paths([value]) == [value], "what configs/ names stays"
    hub = compact.published(
        {"settings": {"model": {"files": {"commit": "f"}}}, "config": {"model": {"path": "a/b"}}}
    )
    assert hub["config"]["model"]["path"] == "a/b", "read from the hub"
    kept = next(run for run in read_runs(reference / "study") if run.label == "pld")
    assert kept.folder.name == "run-0123abcd"
    assert (kept.settings["model"]["path"], kept.settings["model"]["name"]) == ("toy", "toy")
    words = ["-m", "method.k=4,8", "bench.categories=[qa,rag]", "model.path=lmsys/vicuna-7b-v1.3"]
    assert kept.metadata["command"] == ["python", "-m", "evaluation.run", *words]
    config = {
        "start": "hot",
        "model": {"path": "vicuna-7b"},
        "bench": {"path": "question.jsonl", "layout": "speed_bench"},
    }
    assert kept.metadata["config"] == config and kept.summary["drafter"] == {"table": "t.bin"}
    assert kept.metadata["execution_why"] == "its graph failed (see"


def test_what_is_not_finished_is_refused(results, reference, call):
    more = {"started": "2026-02-03T04:05:06+0000", "git": {"commit": "f" * 40, "modified": True}}
    path = finished(made("pld", [answer(1, "qa", [([1], 1.0)])], questions=3, **more), results)
    outcome = call(contribute.main, results, "study")
    assert (
        outcome.code == 2
        and f"1 of 3 runs are not finished (runs/{path.name}: 1 of 3 answers)" in outcome.err
    )
    assert not (reference / "study").exists()
    metadata = json.loads((path / "metadata.json").read_text())
    (path / "metadata.json").write_text(json.dumps(metadata | {"questions": 1}))
    summary = (path / "summary.json").rename(results / "summary.json")
    assert "1 of 3 runs are not finished" in call(contribute.main, results, "study").err
    summary.rename(path / "summary.json")
    assert call(contribute.main, results, "study", "--note", "a lab | 2").code == 0
    (line,) = [
        x
        for x in (reference.parent / "README.md").read_text().splitlines()
        if x.startswith("| `study`")
    ]
    words = (
        "toy (float32)",
        "file, 1",
        "3, 3",
        "a machine",
        "2026-02-03",
        "2, 5",
        f"{'f' * 12}, with",
        "a lab \\| 2",
    )
    assert all(word in line for word in words), line
    (results / "sweep.json").write_text(
        json.dumps({"command": "c", "jobs": [["k=1", "method=pld"], ["k=1", "method=sps"]]})
    )
    assert (
        "missing: 2 of 2 jobs (method=pld; method=sps)"
        in call(contribute.main, results, "study").err
    )
    (results / "sweep.json").unlink()
    metadata["settings"]["schema"] = 1
    (path / "metadata.json").write_text(json.dumps(metadata))
    outcome = call(contribute.main, results, "study")
    assert (
        outcome.code == 2
        and f"runs/{path.name} has no answers that this version reads" in outcome.err
    )


def test_what_was_not_available_and_measured_gaps_come_along(results, reference):
    (results / "jobs").mkdir()
    mark = {
        "job": ["companions.medusa=/home/x/heads"],
        "model": "toy",
        "bench": "file",
        "method": "medusa",
    }
    (results / "jobs" / "1.json").write_text(
        json.dumps(mark | {"not_available": "no heads in /data/secret/heads"})
    )
    (results / "jobs" / "2.json").write_text(json.dumps({"job": ["method=pld"], "runs": []}))
    run = next((results / "runs").iterdir()).name
    (results / GAPS).write_text(
        json.dumps([{"at": [run, "1", "0", "0", "2"], "gap": 0.5, "picked": 0.1}])
    )
    target = contribute.contribute(results, "study")
    kept = {"model": "toy", "bench": "file", "method": "medusa", "not_available": "no heads in"}
    assert {path.name: json.loads(path.read_text()) for path in target.glob("jobs/*")} == {
        "1.json": kept
    }
    (gap,) = json.loads((target / GAPS).read_text())
    assert gap["at"][0] in {run.folder.name for run in read_runs(target)} and gap["gap"] == 0.5
    (results / "jobs" / "1.json").unlink()
    (results / GAPS).unlink()
    contribute.contribute(results, "study")
    assert not [*target.glob("jobs/*")] and not (target / GAPS).exists()


def test_an_experiment_is_contributed_in_several_sittings(results, reference, tmp_path, call):
    whole = sorted(text_of(contribute.contribute(results, "whole")).splitlines())
    second = tmp_path / "second"
    (second / "runs").mkdir(parents=True)
    later = next((results / "runs").iterdir()).rename(second / "runs" / "moved-01234567")
    contribute.contribute(results, "study")
    (reference / "study" / GAPS).write_text(
        json.dumps([{"at": ["run-76543210", "1", "0", "0", "2"], "gap": 0.5}])
    )
    for _ in range(2):  # what is added again is replaced
        assert call(contribute.main, second, "study", "--add").code == 0
    parts = sorted(text_of(reference / "study").splitlines())
    answers, runs = (
        [line for line in parts if line.startswith('{"run"') is named] for named in (False, True)
    )
    assert (
        answers == [line for line in whole if not line.startswith('{"run"')]
        and len(answers) == len(runs) == 2
    )
    assert json.loads((reference / "study" / GAPS).read_text())[0]["gap"] == 0.5
    assert (
        later.exists()
        and "not compact records" in call(contribute.main, second, "nothing", "--add").err
    )


def test_broken_records_and_wrong_folders_are_named(results, reference, call):
    for name in ("", "..", "a/b", "/abs", "-x y"):
        with pytest.raises(UserError, match="must be one folder's name"):
            contribute.contribute(results, name)
    assert "name the folder" in call(contribute.main, results).err
    file = contribute.contribute(results, "study") / compact.FILE
    assert "holds compact records already" in call(contribute.main, file.parent, "copy").err
    for damaged in (file.read_bytes()[:-20], b"no xz", b""):
        file.write_bytes(damaged)
        outcome = call(report.main, file.parent)
        assert outcome.code == 2 and f"{file}: not compact records" in outcome.err
        assert len(outcome.err.splitlines()) == 1


@pytest.mark.slow
def test_what_ships_is_read_small_and_as_its_readme_says():
    text = contribute.overview(contribute.REFERENCE)  # reads all of it
    assert (ROOT / "results/README.md").read_text() == text, "run: python -m evaluation.contribute"
    for file in sorted((ROOT / "results/reference").glob(f"*/{compact.FILE}")):
        begun = lzma.decompress(file.read_bytes()).count(b'\n{"run":') + 1
        (line,) = [
            line for line in text.splitlines() if line.startswith(f"| `{file.parent.name}` |")
        ]
        assert f", {begun} | " in line, f"{file}: runs of another schema"
    assert (
        sum(file.stat().st_size for file in (ROOT / "results/reference").glob(f"*/{compact.FILE}"))
        < 20 * 2**20
    )


def test_git_keeps_the_records_and_nothing_else_below_results():
    kept = [
        "README.md",
        f"reference/x/{compact.FILE}",
        f"reference/x/{GAPS}",
        "reference/x/jobs/1.json",
    ]
    ignored = [
        "x/runs/y/answers.jsonl",
        ".hydra/z",
        "reference/x/report.html",
        "reference/x/tables/main.csv",
    ]
    names = [f"results/{name}" for name in [*kept, *ignored]]
    checked = subprocess.run(
        ["git", "check-ignore", "--no-index", *names], cwd=ROOT, capture_output=True, text=True
    )
    assert checked.stdout.split() == [f"results/{name}" for name in ignored]
