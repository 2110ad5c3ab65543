"""What tells runs apart, and what does not."""

import json
import shutil

from evaluation.configuration.config import changed_sampling
from evaluation.records.identity import fingerprint
from evaluation.running.runner import recorded_method
from evaluation.statistics.pools import pools
from tests.evaluation.made_runs import made

SPS = {"name": "sps", "drafter": "sps", "draft_tokens": 4}


def test_shared_noise_counts_where_there_is_noise_to_share():
    for share, sampling, kept in (
        (True, {"temperature": 0.0}, False),
        (True, {}, False),
        (True, {"temperature": 0.7}, True),
        (False, {"temperature": 0.7}, False),
        (None, {"temperature": 0.7}, False),
    ):
        now = recorded_method(SPS | {"share_noise": share}, {"sampling": sampling})
        assert ("share_noise" in now) == kept and (now == recorded_method(SPS, {"sampling": sampling})) != kept


def test_another_seed_is_another_run_and_a_moved_model_is_not(evaluate, checkpoint, tmp_path):
    few = ("method=vanilla", "bench.end=1", "max_new_tokens=4", "timed=false")
    moved = shutil.copytree(checkpoint, tmp_path / "elsewhere")
    for more in ("seed=0", "seed=1", "seed=1", f"model.path={moved}", "num_choices=2"):
        assert evaluate(*few, more).code == 0
    assert len(list((tmp_path / "results/default/runs").iterdir())) == 3, (
        "and so is another number of answers"
    )


def test_arguments_of_the_chat_template_count_where_they_are_given(evaluate, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "toy")
    own = "{% for m in messages %}{{ m.content }}{% endfor %}{% if loud %} LOUD{% endif %}"
    (folder / "chat_template.jinja").write_text(own)
    few = (
        f"model.path={folder}",
        "model.template=chat",
        "method=vanilla",
        "bench.end=1",
        "max_new_tokens=4",
        "timed=false",
    )
    for more in ((), ("model.chat_template_kwargs={loud:true}",)):
        assert evaluate(*few, *more).code == 0
    found = [
        json.loads(file.read_text())
        for file in (tmp_path / "results/default/runs").glob("*/metadata.json")
    ]
    given = [run["settings"]["model"].get("chat_template_kwargs", "absent") for run in found]
    assert sorted(map(str, given)) == ["absent", "{'loud': True}"], (
        "records without it stay what they were"
    )
    assert len({run["template_sha256"] for run in found}) == 2


def test_a_file_is_known_by_its_digest_and_not_by_its_path(evaluate, tmp_path, monkeypatch):
    """A saved start under results_dir=results had been another run than under its absolute path: two repeats."""
    monkeypatch.chdir(tmp_path)
    for results_dir in (tmp_path / "results", "results"):
        few = ("bench.end=1", "max_new_tokens=4", "timed=false", f"results_dir={results_dir}")
        assert evaluate("-m", "start=hot,saved", *few).code == 0
    assert len(list((tmp_path / "results/default/runs").iterdir())) == 2
    assert (
        fingerprint({"method": (tree := {"tree": "best", "tree_sha256": "a"})})["method"] == tree
    ), "no path"
    drafts = [
        {"draft_path": path, "draft_path_sha256": "a"}
        for path in ("here/draft", "/elsewhere/draft")
    ]
    ((_, _),) = (
        pool.runs for pool in pools([made("sps", [], method=draft, repeat=0) for draft in drafts])
    )
    states = [{"start": f"{repeat}/state", "start_sha256": f"{repeat}"} for repeat in (0, 1)]
    saved = [
        made("x (saved)", [], repeat=r, method=states[r], config={"start": "saved"}) for r in (0, 1)
    ]
    assert len(pools(saved)) == 1, "each repeat starts from its own hot run's state"


def test_sampling_settings_count_if_they_change_the_text():
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 0}
    assert changed_sampling({"sampling": settings}) == {"temperature": 0.7, "top_p": 0.9}
    assert changed_sampling({"sampling": settings | {"temperature": 0.0}}) == {}
