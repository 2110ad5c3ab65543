"""The harness on models and heads by their names: over HTTP from `tests.hub_server`, and from the cache that this fills."""

import shutil

import pytest

from evaluation import prefetch, run
from evaluation.loading.models import ModelSettings, forget_model, load_without_weights
from evaluation.records.runs import read_runs
from model.files import ROOT
from tests.evaluation.test_errors import check

EMBEDDED = ROOT / "data/embedded"


@pytest.fixture
def commits(hub, tmp_path):
    """A model, its EAGLE head and its draft model; each with a second copy of its weights."""
    shutil.copytree(EMBEDDED / "eagle", tmp_path / "eagle")
    shutil.copytree(EMBEDDED / "draft", tmp_path / "draft")
    shutil.copytree(
        EMBEDDED, tmp_path / "model", ignore=lambda _, names: [n for n in names if "." not in n]
    )
    (tmp_path / "eagle/pytorch_model.bin").write_bytes(b"older")
    (tmp_path / "model/consolidated.safetensors").write_bytes(b"of another library")
    forget_model()
    return {name: hub.add(f"owner/{name}", tmp_path / name) for name in ("model", "eagle", "draft")}


def test_a_model_and_companions_by_name_are_of_one_recorded_commit(hub, commits, call, tmp_path):
    model = ["model=path", "model.path=owner/model", "model.dtype=float32"]
    eagle = [*model, "method=eagle", "method.head_path=owner/eagle"]
    sps = [*model, "method=sps", "method.draft_path=owner/draft"]
    short = ["bench.end=1", "max_new_tokens=8", f"results_dir={tmp_path / 'results'}"]

    outcome = call(prefetch.main, *eagle)
    assert outcome.code == 0, outcome.out
    lines = outcome.out.splitlines()
    assert lines[0].startswith("here     model owner/model in ") and commits["model"] in lines[0]
    assert lines[1:] == ["here     EAGLE head owner/eagle", "here     bench sample"]
    fetched = sorted(hub.files)
    assert fetched[:2] == ["owner/eagle/config.json", "owner/eagle/model.safetensors"]
    assert "owner/model/tokenizer.json" in fetched
    assert not any("datastore.bin" in name or "consolidated" in name for name in fetched)
    assert call(run.main, *sps, *short).code == 0, "online, without prefetch"
    known = sorted(hub.files)

    hub.stop()
    assert call(prefetch.main, *eagle).code == 0
    outcome = call(run.main, *eagle, *short)
    assert outcome.code == 0, outcome.err
    runs = read_runs(tmp_path / "results/default")
    assert sorted(hub.files) == known and len(runs) == 2
    for done in runs:
        assert done.files == {"commit": commits["model"]}
    methods = {key: value for done in runs for key, value in done.settings["method"].items()}
    assert methods["head_path_commit"] == commits["eagle"]
    assert methods["draft_path_commit"] == commits["draft"]
    assert (methods["head_path"], methods["draft_path"]) == ("owner/eagle", "owner/draft")


def test_a_servers_tokenizer_needs_no_weights(hub, commits):
    loaded = load_without_weights(ModelSettings("toy", "owner/model"))
    assert loaded.files == {"commit": commits["model"]}
    assert loaded.tokenizer("Hello there.")["input_ids"]
    assert not any(name.endswith(".safetensors") for name in hub.files)


def test_what_the_hub_refuses_is_one_true_line(hub, commits, call, tmp_path):
    hub.repositories["owner/model"].gated = True
    few = ["model=path", "method=vanilla", f"results_dir={tmp_path}"]
    gated = "error: model.path=owner/model: no access: accept the terms at http"
    check(call(run.main, *few, "model.path=owner/model"), gated, "hf auth login")
    revised = call(run.main, *few, "model.path=owner/draft", "model.revision=v2")
    check(revised, "model.path=owner/draft", "has no revision v2")
    outcome = call(prefetch.main, *few, "model.path=owner/none")
    assert (
        outcome.code == 2
        and "model.path=owner/none: no such folder, and no such model" in outcome.out
    )
    head = [
        "model=embedded",
        "method=eagle",
        "method.head_path=owner/none",
        f"results_dir={tmp_path}",
    ]
    check(call(run.main, *head), "method.head_path=owner/none: no such folder, and no such model")
    hub.stop()
    check(
        call(run.main, *few, "model.path=owner/none"),
        "model.path=owner/none",
        "is not in reach",
        "give the folder of a copy",
    )
