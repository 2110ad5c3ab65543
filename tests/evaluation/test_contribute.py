"""Records that ship: the same tables and figures as the results they come from, and nobody's name or folder in them."""

import getpass
import json
import lzma
import platform
import re
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from evaluation import contribute, report
from evaluation.records import compact
from evaluation.records.runs import read_runs
from evaluation.statistics.audits import GAPS
from evaluation.statistics.pools import pools
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
        more = {"output_ids": [[5, 6, 7]], "step_nodes": [[3] * len(lengths)], "step_paths": [[[]] * len(lengths)]}
        finished(made(label, [answer(1, "qa", [(lengths, 0.25)], **more)]), folder)
    return folder


def text_of(folder):
    return lzma.decompress((folder / compact.FILE).read_bytes()).decode()


def files_in(folder, *kinds):
    return {path.relative_to(folder): path.read_bytes() for kind in kinds for path in folder.rglob(f"*.{kind}")}


def test_tables_and_figures_are_the_same_as_from_full_records(drawn, evaluate, call, tmp_path, reference):
    outcome = evaluate("-m", "method=vanilla,pld,recycling", "start=cold,hot", "tree=best", "tree.nodes=8", "repeats=2")
    assert outcome.code == 0, outcome.err
    full = tmp_path / "results/default"
    outcome = call(contribute.main, full, "toy")
    assert outcome.code == 0, outcome.err
    assert call(report.main, reference / "toy").code == 0
    drawn_from = [files_in(folder, "csv", "md", "json", "svg", "tex") for folder in (reference / "toy", full)]
    for files in drawn_from:
        for path in [path for path in files if path.parts[0] in ("runs", "jobs") or len(path.parts) == 1]:
            del files[path]
    assert drawn_from[0] == drawn_from[1]
    assert {"tables/main.csv", "tables/audit.csv", "tables/acceptance_by_depth.csv"} <= set(map(str, drawn_from[0]))
    assert any(path.suffix == ".svg" for path in drawn_from[0])
    runs = read_runs(reference / "toy")
    assert [pool.name for pool in pools(runs)] == [pool.name for pool in pools(read_runs(full))]
    assert {len(pool.repeats) for pool in pools(runs)} == {2} and {run.has_texts for run in runs} == {False}
    page = (reference / "toy" / "report.html").read_text()
    assert "hold token ids and no text" in page
    assert "hold token ids and no text" not in (full / "report.html").read_text()


def test_folders_of_several_machines_make_one_table(results, reference, call, tmp_path):
    contribute.contribute(results, "study")
    other = tmp_path / "other"
    for label, seconds in (("vanilla", 0.5), ("recycling (hot)", 0.1)):
        finished(made(label, [answer(1, "qa", [([1, 1, 1], seconds)])], device="a GPU"), other)
    contribute.contribute(other, "study-gpu")
    out = tmp_path / "both"
    outcome = call(report.main, reference / "study", reference / "study-gpu", "--out", out)
    assert outcome.code == 0 and "toy, file, a machine, overall (" in outcome.out and "a GPU, overall (" in outcome.out
    table = pd.read_csv(out / "tables/main.csv").query("category == 'overall' and method == 'recycling (hot)'")
    assert dict(zip(table.device, table.speedup_vanilla, strict=True)) == {"a machine": 1.0, "a GPU": 5.0}
    assert "--out: with" in call(report.main, reference / "study", "--out", out).err


def test_the_same_results_give_the_same_bytes(results, reference):
    first = (contribute.contribute(results, "study") / compact.FILE).read_bytes()
    assert (contribute.contribute(results, "again") / compact.FILE).read_bytes() == first


def test_no_string_names_a_person_a_host_or_a_folder(results, reference, monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "jane")
    monkeypatch.setattr(platform, "node", lambda: "fastbox.lab.example")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/jane"))
    private = {
        "command": [
            "/home/jane/env/bin/python",
            "/home/jane/code/evaluation/run.py",
            "model.path=/home/jane/m/vicuna-7b",
        ],
        "config": {
            "start": "hot",
            "results_dir": "/scratch/jane/results",
            "model": {"path": "~/m/vicuna-7b"},
            "bench": {"path": "../jane-notes/question.jsonl", "url": "https://example.org/a/b.jsonl"},
        },
        "execution_why": "its graph failed (see '/scratch/tmp 1/log.txt' and C:\\Users\\jane\\log.txt)",
    }
    run = made("pld", [answer(1, "qa", [([1], 1.0)], output_ids=[[3]])], model={"path": "/data/x/toy/"}, **private)
    row = run.answers[0]
    row |= {"answer_id": "77aa", "tstamp": 1234.5, "model_id": "fastbox-model"}
    row["choices"][0]["turns"] = ["a text by jane"]
    finished(run, results, drafter={"table": "/home/jane/tables/t.bin"})
    text = text_of(contribute.contribute(results, "study"))
    for word in ("jane", "fastbox", "/home", "scratch", "77aa", "1234.5", "a text", "env/bin"):
        assert word not in text, word
    kept = next(run for run in read_runs(reference / "study") if run.label == "pld")
    assert kept.settings["model"]["path"].rstrip("/") == "toy"
    assert kept.metadata["command"] == ["python", "-m", "evaluation.run", "model.path=vicuna-7b"]
    bench = {"path": "question.jsonl", "url": "https://example.org/a/b.jsonl"}
    assert kept.metadata["config"] == {"start": "hot", "model": {"path": "vicuna-7b"}, "bench": bench}
    assert kept.summary["drafter"] == {"table": "t.bin"}


@pytest.mark.parametrize("name", ["jane", "Jane", "fastbox"])
def test_a_name_that_is_left_is_refused_with_its_place(results, reference, call, monkeypatch, name):
    monkeypatch.setattr(getpass, "getuser", lambda: "jane")
    monkeypatch.setattr(platform, "node", lambda: "fastbox.lab")
    monkeypatch.setattr(Path, "home", lambda: Path("/root"))
    finished(made("pld", [answer(1, f"questions of {name}", [([1], 1.0)])]), results)
    outcome = call(contribute.main, results, "study")
    assert outcome.code == 2 and f"'{name}' is a user's or host's name" in outcome.err and "questions of" in outcome.err
    assert len(outcome.err.splitlines()) == 1 and not (reference / "study").exists()
    assert call(contribute.main, results, "study", "--public", name).code == 0


@pytest.mark.parametrize(
    ("path", "why", "name"),
    [
        ("/home/kim/toy", "asked by kim", "kim"),
        ("C:\\Users\\kim\\toy", "asked by\nkim", "kim"),  # JSON doubles the one and writes the other as \\n
        ('{"path": "c:\\\\users\\\\kim\\\\toy"}', "see kim_logs", "kim"),  # doubled already
        ("C:\\Users\\jürgen\\toy", "asked by JÜRGEN", "JÜRGEN"),
        ("/Users/jürgen/toy", "/scratch/of/jürgen-2", "jürgen"),  # of a path the last part stays
    ],
)
def test_the_user_whose_home_the_records_name_is_found_on_another_machine(results, reference, call, path, why, name):
    named = {"model": {"name": "toy", "path": path}, "execution_why": why}
    finished(made("pld", [answer(1, "qa", [([1], 1.0)])], **named), results)
    outcome = call(contribute.main, results, "study")
    assert outcome.code == 2 and f"'{name}' is a user's" in outcome.err and '"execution_why":"' in outcome.err
    assert call(contribute.main, results, "study", "--public", name).code == 0
    assert not re.search(r"home|users", text_of(reference / "study"), flags=re.I)


@pytest.mark.parametrize("login", ["kim:secret", "kim:s@secret", "kim:s'secret", ":secret", "hf_secret"])
def test_a_url_is_kept_without_user_and_password(results, reference, login):
    bench = {"url": f"https://{login}@example.org/a/b.jsonl"}
    command = ["x.py", f"bench.url={bench['url']}"]
    more = {"config": {"bench": bench}, "command": command, "execution_why": f"'git+ssh://{login}@h.org/x.git' is old"}
    finished(made("pld", [answer(1, "qa", [([1], 1.0)])], bench=bench, **more), results)
    text = text_of(contribute.contribute(results, "study"))
    assert text.count("https://example.org/a/b.jsonl") == 3 and "git+ssh://h.org/x.git" in text
    assert "secret" not in text and "kim" not in text


@pytest.mark.parametrize(
    "value",
    [
        *("data/embedded", "HuggingFaceTB/SmolLM2-135M", "tokens/s", "and/or", "a: 1 / 2", "./x/y"),
        *("https://x.org/a/r@main", "https://x.org?by=a@b", '{"url":"https://x.org","mail":"a@b"}'),
    ],
)
def test_what_is_no_private_path_stays(value):
    assert compact.without_folders(value) == value


def test_what_is_not_finished_is_refused(results, reference, call):
    path = finished(made("pld", [answer(1, "qa", [([1], 1.0)])], questions=3), results)
    outcome = call(contribute.main, results, "study")
    assert outcome.code == 2 and f"1 of 3 runs are not finished (runs/{path.name}: 1 of 3 answers)" in outcome.err
    assert not (reference / "study").exists()
    assert call(contribute.main, results, "study", "--incomplete", "--note", "a lab").code == 0
    notes = {run.metadata["note"] for run in read_runs(reference / "study")}
    assert len(notes) == 1 and notes.pop().startswith("a lab; incomplete: 1 of 3 runs")


def test_missing_jobs_and_runs_of_another_version_are_refused(results, reference, call):
    (results / "sweep.json").write_text(json.dumps({"command": "c", "jobs": [["method=pld"], ["method=sps"]]}))
    outcome = call(contribute.main, results, "study")
    assert outcome.code == 2 and "2 of 2 jobs are missing" in outcome.err
    (results / "sweep.json").unlink()
    old = finished(made("pld", [answer(1, "qa", [([1], 1.0)])]), results)
    metadata = json.loads((old / "metadata.json").read_text())
    metadata["settings"]["schema"] = 1
    (old / "metadata.json").write_text(json.dumps(metadata))
    outcome = call(contribute.main, results, "study")
    assert outcome.code == 2 and f"runs/{old.name} has no answers that this version reads" in outcome.err


def test_what_was_not_available_and_measured_gaps_come_along(results, reference, call, monkeypatch):
    (results / "jobs").mkdir()
    mark = {"job": ["companions.medusa=/home/x/heads"], "model": "toy", "bench": "file", "method": "medusa"}
    (results / "jobs" / "1.json").write_text(json.dumps(mark | {"not_available": "no heads in /data/secret/heads"}))
    (results / "jobs" / "2.json").write_text(json.dumps({"job": ["method=pld"], "runs": []}))
    (results / GAPS).write_text("[]")
    target = contribute.contribute(results, "study")
    assert "not available: no heads in heads" in call(report.main, target).out + (target / "tables/main.md").read_text()
    assert [path.name for path in target.glob("jobs/*")] == ["1.json"] and (target / GAPS).read_text() == "[]"
    assert "job" not in json.loads((target / "jobs/1.json").read_text())
    (results / "jobs" / "1.json").unlink()
    (results / GAPS).unlink()
    contribute.contribute(results, "study")
    assert not [*target.glob("jobs/*")] and not (target / GAPS).exists()


@pytest.mark.parametrize("name", ["", "..", "a/b", "/abs", "-x y"])
def test_names_that_are_no_folder(results, reference, name):
    with pytest.raises(contribute.UserError, match="must be one folder's name"):
        contribute.contribute(results, name)


def test_the_command_wants_a_name_and_full_records(results, reference, call):
    assert "name the folder" in call(contribute.main, results).err
    target = contribute.contribute(results, "study")
    outcome = call(contribute.main, target, "copy")
    assert outcome.code == 2 and "holds compact records already" in outcome.err


@pytest.mark.parametrize("damage", [b"", b"no xz", None])
def test_broken_records_are_named(results, reference, call, damage):
    file = contribute.contribute(results, "study") / compact.FILE
    file.write_bytes(file.read_bytes()[:-20] if damage is None else damage)
    outcome = call(report.main, file.parent)
    assert outcome.code == 2 and f"{file}: not compact records" in outcome.err and len(outcome.err.splitlines()) == 1


def test_the_overview_says_what_ran_on_what_and_when(results, reference, call):
    more = {"started": "2026-02-03T04:05:06+0000", "git": {"commit": "f" * 40, "modified": True}}
    finished(made("pld", [answer(1, "qa", [([1], 1.0)])], **more), results)
    assert call(contribute.main, results, "study", "--note", "one | two").code == 0
    (line,) = [x for x in (reference.parent / "README.md").read_text().splitlines() if x.startswith("| `study`")]
    for words in (
        "toy (float32)",
        "file, 1",
        "3, 3",
        "a machine",
        "2026-02-03",
        "2, 5",
        "f" * 12 + ", with",
        "one \\| two",
    ):
        assert words in line, words
    assert contribute.overview(reference) == (reference.parent / "README.md").read_text()


def test_results_readme_is_what_the_records_say():
    assert (ROOT / "results/README.md").read_text() == contribute.overview(contribute.REFERENCE), (
        "run: python -m evaluation.contribute"
    )


def test_everything_that_ships_is_read_and_small():
    files = sorted((ROOT / "results/reference").glob(f"*/{compact.FILE}"))
    for file in files:
        held = [line for line in lzma.decompress(file.read_bytes()).decode().split("\n") if line.startswith('{"run":')]
        assert len(read_runs(file.parent)) == len(held), f"{file}: runs of another schema"
    assert sum(file.stat().st_size for file in files) < 20 * 2**20


def test_git_keeps_the_records_and_nothing_else_below_results():
    kept = ["README.md", f"reference/x/{compact.FILE}", f"reference/x/{GAPS}", "reference/x/jobs/1.json"]
    ignored = ["x/runs/y/answers.jsonl", ".hydra/z", "reference/x/report.html", "reference/x/tables/main.csv"]
    names = [f"results/{name}" for name in [*kept, *ignored]]
    found = subprocess.run(["git", "check-ignore", "--no-index", *names], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.split() == [f"results/{name}" for name in ignored]
