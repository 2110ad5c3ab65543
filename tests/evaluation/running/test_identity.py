"""What decides an answer is in a run's identity, by value: the prompt's date, the model's files."""

import shutil
import time
from itertools import chain

import pandas as pd
import pytest

from evaluation import audit
from evaluation import run as run_module
from evaluation.records.runs import read_runs
from model.cli import main as command
from tests.evaluation.loading.test_replaced_files import other_weights
from tests.evaluation.running.conftest import core

# the first and the last zone of the earth are 26 hours apart, so they never have the same day
ZONES = "EAST-14", "WEST+12"
TEMPLATE = (
    '{{ bos_token }}{{ strftime_now("%d %B %Y") }}{% for m in messages %}'
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)


@pytest.fixture
def clock():
    """Set the machine's clock to a zone's."""
    with pytest.MonkeyPatch.context() as patched:

        def to(zone):
            patched.setenv("TZ", zone)
            time.tzset()

        yield to
    time.tzset()


@pytest.fixture
def dated(checkpoint, tmp_path):
    """A model whose chat template begins with today's date."""
    folder = shutil.copytree(checkpoint, tmp_path / "models/dated")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def running(call, bench_file, tmp_path):
    """`evaluation.run` with a model's path alone; gives the output and the experiment's runs."""

    def run(path, *words):
        base = ["model=path", f"model.path='{path}'", "bench=file", f"bench.path={bench_file}"]
        base += ["bench.end=3", "max_new_tokens=12", f"results_dir={tmp_path / 'results'}"]
        outcome = call(run_module.main, *base, *words)
        assert outcome.code == 0, outcome.err
        return outcome.out, {run.label: run for run in read_runs(tmp_path / "results/default")}

    return run


def stop(run):
    """Leave what a run has that was stopped after its first answer."""
    (run.folder / "summary.json").unlink()
    answers = run.folder / "answers.jsonl"
    answers.write_text(answers.read_text().splitlines(keepends=True)[0])


def test_an_experiment_keeps_the_date_of_its_first_answer(clock, dated, running):
    """A run resumed on another day had two prompts, and next to vanilla's it was "Not identical"."""
    clock(ZONES[0])
    _, runs = running(dated, "method=vanilla")
    whole = core(runs["vanilla"].answers)
    stop(runs["vanilla"])
    clock(ZONES[1])
    _, runs = running(dated, "method=vanilla")
    assert core(runs["vanilla"].answers) == whole
    printed, runs = running(dated, "method=pld")
    assert "Lossless in float32: all 4 turns equal vanilla's" in printed
    assert runs["pld"].metadata["date"] == runs["vanilla"].metadata["date"]
    hashes = [row["choices"][0]["prompt_sha256"] for row in runs["pld"].answers]
    assert hashes == [row["choices"][0]["prompt_sha256"] for row in runs["vanilla"].answers]
    assert len({*chain(*hashes)}) == 4, "each turn has its own"


def test_a_file_of_another_day_is_audited_by_the_prompts_that_were_answered(
    clock, dated, running, call, capsys, bench_file, tmp_path
):
    clock(ZONES[0])
    command(["generate", str(dated), "--jsonl", "--quiet", "--prompt=hello", "--max-new-tokens=9"])
    file = tmp_path / "answers.jsonl"
    file.write_text(capsys.readouterr().out)
    _, runs = running(dated, "method=vanilla")

    clock(ZONES[1])
    recorded = runs["vanilla"].folder / "answers.jsonl"
    bench = ("--bench", bench_file)
    for path, more in ((file, ()), (recorded, bench)):
        outcome = call(audit.main, "--answers", path, "--model", dated, *more)
        assert outcome.code == 0 and "Lossless in float32" in outcome.out, outcome
    shutil.copy(recorded, file)  # without metadata nobody knows the day
    outcome = call(audit.main, "--answers", file, "--model", dated, *bench)
    assert outcome.code == 2 and "its prompt, made again, is another one" in outcome.err


def test_a_folder_is_its_files_however_its_path_is_spelled(
    checkpoint, running, tmp_path, monkeypatch
):
    """Each spelling was a run of its own, and no baseline of the others."""
    folder = shutil.copytree(checkpoint, tmp_path / "models/m")
    shutil.copytree(checkpoint, tmp_path / "models/copy")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    _, runs = running(folder, "method=vanilla", "timed=false")
    for path in (f"{folder}/", "link", "~/models/copy"):
        stop(runs["vanilla"])
        _, runs = running(path, "method=vanilla", "timed=false")
        assert len(runs["vanilla"].answers) == 3
        assert runs["vanilla"].folder.name.startswith("m-file-vanilla")
        assert len(list((tmp_path / "results/default/runs").iterdir())) == 1
    printed, _ = running(tmp_path / "link", "method=pld", "timed=false")
    table = pd.read_csv(tmp_path / "results/default/tables/main.csv")
    assert "Lossless in float32: all 4 turns equal" in printed and {*table["model"]} == {"m"}


def test_two_models_of_one_name_are_told_apart_by_their_paths(checkpoint, running, tmp_path):
    for place in ("a", "b"):
        folder = shutil.copytree(checkpoint, tmp_path / place / "m")
        if place == "b":
            other_weights(folder)
        printed, _ = running(folder, "method=vanilla,pld", "timed=false")
    assert "all 8 turns equal vanilla's, token for token (2 configurations" in printed
    table = pd.read_csv(tmp_path / "results/default/tables/main.csv")
    overall = table[table["category"] == "overall"]
    assert overall["model"].tolist() == ["m"] * 4
    for place in ("a", "b"):
        assert overall["variant"].str.contains(f"path={tmp_path / place / 'm'}").sum() == 2
