"""Prefetching: exactly what the jobs need, known or fetched or missing; no network is touched."""

import hashlib
import io
import json
import shutil
import urllib.error
from pathlib import Path

import pytest

from evaluation import prefetch
from evaluation.configuration.jobs import compose
from evaluation.loading import bench, hub
from evaluation.prefetch import needs
from tests.evaluation.configuration.test_companions import a_hub, files, out_of_reach  # noqa: F401  (fixtures)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", refuse)


def words(*arguments):
    return [need.words for need in needs(job.config for job in compose(list(arguments)).jobs)]


def test_table1_needs_exactly_what_its_jobs_name():
    wanted = words(
        "experiment=table1", "model=vicuna-7b,vicuna-33b", "bench=spec_bench", "method=vanilla,medusa,rest,sps"
    )
    assert wanted == [
        "model lmsys/vicuna-7b-v1.3",
        "model lmsys/vicuna-33b-v1.3",
        "Medusa heads FasterDecoding/medusa-vicuna-7b-v1.3",
        "Medusa heads FasterDecoding/medusa-vicuna-33b-v1.3",
        "draft model double7/vicuna-68m",
        "datastore for vicuna-7b",
        "datastore for vicuna-33b",
        "bench spec_bench",
    ]
    assert words("model=vicuna-13b", "method=eagle2") == [
        "model lmsys/vicuna-13b-v1.3",
        "EAGLE head yuhuili/EAGLE-Vicuna-13B-v1.3",
        "bench sample",
    ]


def test_what_is_shipped_is_known_without_a_network(call, out_of_reach, tmp_path):  # noqa: F811
    arguments = ("experiment=table1", "preset=smoke", f"results_dir={tmp_path / 'results'}")
    outcome = call(prefetch.main, *arguments)
    assert outcome.code == 0, outcome.out
    lines = outcome.out.splitlines()
    assert [line.split()[0] for line in lines] == ["known"] * 6
    size = (ROOT / "data/embedded/datastore.bin").stat().st_size
    assert f" {size / 1e3:.0f} kB  datastore data/embedded/datastore.bin\n" in outcome.out
    assert not (tmp_path / "results").exists(), "nothing is written down: no sweep was begun"


def test_what_nobody_has_published_is_told_and_no_error(call, checkpoint, out_of_reach):  # noqa: F811
    arguments = ["-m", "model=path", f"model.path={checkpoint}", "model.name=toy", "method=vanilla,rest"]
    outcome = call(prefetch.main, *arguments)
    assert outcome.code == 0
    assert (
        "missing" in outcome.out
        and "datastore for toy: no datastore for toy (`python -m tools.datastore`" in outcome.out
    )
    outcome = call(prefetch.main, *arguments, "companions.datastore=no.bin")
    assert outcome.code == 2 and "no.bin: no such file" in outcome.out, "one that is named is wanted"


def test_out_of_reach_is_missing(call, out_of_reach):  # noqa: F811
    outcome = call(prefetch.main, "model=vicuna-7b", "method=medusa")
    assert outcome.code == 2
    model, heads, bench = outcome.out.splitlines()
    assert model.startswith("missing") and "not in reach" in model and "lmsys/vicuna-7b-v1.3" in model
    assert heads.startswith("missing") and "FasterDecoding/medusa-vicuna-7b-v1.3" in heads
    assert bench.startswith("known")


def test_the_hub_is_asked_once(call, a_hub, monkeypatch):  # noqa: F811
    found = a_hub(model=files("data/embedded"), eagle=files("data/embedded/eagle"))
    arguments = ["model=path", "model.path=owner/model", "method=eagle", "method.head_path=owner/eagle"]
    outcome = call(prefetch.main, *arguments)
    assert outcome.code == 0, outcome.out
    assert [line.split()[0] for line in outcome.out.splitlines()] == ["fetched", "fetched", "known"]
    assert "owner/model/tokenizer.json" in found.fetched and "owner/model/datastore.bin" not in found.fetched
    once = list(found.fetched)
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    outcome = call(prefetch.main, *arguments)
    assert [line.split()[0] for line in outcome.out.splitlines()] == ["known"] * 3 and found.fetched == once
    (found.cache / "owner/eagle/model.safetensors").write_bytes(b"half")
    outcome = call(prefetch.main, *arguments)
    assert outcome.code == 2 and "owner/eagle: no EAGLE head for owner/model (" in outcome.out


def test_a_local_model_that_is_not_whole_is_missing(call, checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    sorted(folder.glob("*.safetensors"))[1].unlink()
    outcome = call(prefetch.main, "model=path", f"model.path={folder}", "method=vanilla")
    assert outcome.code == 2 and "-00002-of-" in outcome.out and "is missing" in outcome.out


def test_a_bench_is_fetched_once_and_its_hash_checked(call, bench_file, monkeypatch, tmp_path):
    data = bench_file.read_bytes()
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: io.BytesIO(data))
    arguments = ["method=vanilla", "bench=mbpp", f"model.path={ROOT / 'data/embedded'}"]
    outcome = call(prefetch.main, *arguments)
    assert outcome.code == 2 and "expected 4ef443d46893" in outcome.out and not list(tmp_path.rglob("*.jsonl"))
    good = f"bench.sha256={hashlib.sha256(data).hexdigest()}"
    assert call(prefetch.main, *arguments, good).out.splitlines()[-1].startswith("fetched")
    assert call(prefetch.main, *arguments, good).out.splitlines()[-1].startswith("known")
    (file,) = tmp_path.rglob("*.jsonl")
    file.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["x"]}) + "\n")
    outcome = call(prefetch.main, *arguments, good)
    assert outcome.code == 2 and "delete it to fetch it again" in outcome.out


def test_a_wrong_argument_is_told_in_one_line(call):
    for argument, says in (("experiment=nonesuch", "nonesuch"), ("model=nonesuch", "model/nonesuch"), ("x", "x")):
        outcome = call(prefetch.main, argument)
        assert outcome.code == 2 and outcome.err.startswith("error: ") and says in outcome.err
        assert len(outcome.err.strip().splitlines()) == 1
