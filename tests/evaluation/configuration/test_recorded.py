"""What tells runs apart, and what does not."""

from evaluation.configuration.config import changed_sampling
from evaluation.statistics.pools import pools
from tests.evaluation.made_runs import made

FEW = ("bench.end=1", "max_new_tokens=4", "timed=false")


def test_sampling_settings_count_if_they_change_the_text():
    settings = {"temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
    assert changed_sampling({"sampling": settings}) == {"temperature": 0.7, "top_p": 0.9}
    assert changed_sampling({"sampling": settings | {"temperature": 0.0}}) == {}


def test_another_seed_is_another_run(evaluate, tmp_path):
    for more in ("seed=0", "seed=1", "seed=1", "num_choices=2"):
        assert evaluate(*FEW, "method=vanilla", more).code == 0
    assert len(list((tmp_path / "results/default/runs").iterdir())) == 3


def test_a_file_is_known_by_its_digest_and_not_by_its_path(evaluate, tmp_path, monkeypatch):
    """A saved start under results_dir=results had been another run than under its absolute path: two repeats."""
    monkeypatch.chdir(tmp_path)
    for results_dir in (tmp_path / "results", "results"):
        assert evaluate("-m", "start=hot,saved", *FEW, f"results_dir={results_dir}").code == 0
    assert len(list((tmp_path / "results/default/runs").iterdir())) == 2
    drafts = [{"draft_path": path, "draft_path_sha256": "a"} for path in ("here", "/elsewhere")]
    assert len(pools([made("sps", [], method=draft, repeat=0) for draft in drafts])) == 1
    states = [{"start": f"{repeat}/state", "start_sha256": f"{repeat}"} for repeat in (0, 1)]
    saved = [
        made("x (saved)", [], repeat=repeat, method=state, config={"start": "saved"})
        for repeat, state in enumerate(states)
    ]
    assert len(pools(saved)) == 1, "each repeat starts from its own hot run's state"
