"""What tells runs apart, and what does not."""

import pytest

from evaluation.configuration.fingerprint import recorded_method

SPS = {"name": "sps", "drafter": "model.methods.sps.Speculative", "draft_tokens": 4}


@pytest.mark.parametrize(
    "share, temperature, kept",
    [(True, 0.0, False), (True, None, False), (True, 0.7, True), (False, 0.7, False), (None, 0.7, False)],
)
def test_shared_noise_counts_where_there_is_noise_to_share(share, temperature, kept):
    sampling = {} if temperature is None else {"temperature": temperature}
    before = recorded_method(SPS, sampling)
    now = recorded_method(SPS | {"share_noise": share}, sampling)
    assert ("share_noise" in now) == kept and (now == before) != kept


def test_another_seed_is_another_run(evaluate, tmp_path):
    few = ("method=vanilla", "bench.end=1", "max_new_tokens=4", "timed=false")
    for seed in (0, 1, 1):
        assert evaluate(*few, f"seed={seed}").code == 0
    assert len(list((tmp_path / "results/default/runs").iterdir())) == 2
