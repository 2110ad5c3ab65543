"""Drafting by the noise that the target draws by: a draft model that is the target then drafts nothing wrong."""

import pytest
import torch

from evaluation.running.shared_text import generate_together
from model.engine import Target, decode, generate
from model.engine.sampling import Sampling
from model.methods.sps import Speculative
from tests.conftest import toy_model

PROMPT = [5, 9, 2, 7]
DRAWN = [Sampling(temperature=1.0, seed=3), Sampling(temperature=1.6, top_p=0.9, seed=4)]


def flat_model():
    """A model whose text is well spread, so that its arg-max is often not what is drawn."""
    model = toy_model("llama-grouped")
    with torch.no_grad():
        model.lm_head.weight.mul_(0.1)
    return model


@pytest.fixture(scope="module")
def itself(tmp_path_factory):
    """A target, and the folder of its draft model, which is the same one."""
    model, folder = flat_model(), tmp_path_factory.mktemp("draft")
    model.save_pretrained(folder)
    return Target(model), str(folder)


@pytest.mark.parametrize("execution", ["eager", "static"])
@pytest.mark.parametrize("sampling", DRAWN, ids=["plain", "top-p"])
def test_the_target_as_its_own_draft_model(sampling, execution, itself):
    target, folder = itself
    sharing, apart = (
        Speculative(target=target, draft_path=folder, draft_tokens=3, share_noise=share) for share in (True, False)
    )
    shared = generate(target, sharing, PROMPT, max_new_tokens=40, sampling=sampling, execution=execution)
    assert shared.accept_lengths == [4] * 10, "drafts are drawn as the target draws, at the right places"
    other = generate(target, apart, PROMPT, max_new_tokens=40, sampling=sampling, execution=execution)
    assert other.tokens == shared.tokens and len(other.steps) > 2 * len(shared.steps)
    if execution == "eager":
        together = generate_together(target, [sharing, apart], PROMPT, max_new_tokens=40, sampling=sampling)
        assert [out.accept_lengths for out in together] == [shared.accept_lengths, other.accept_lengths]


def test_sequences_of_several_seeds_in_turn(itself):
    """Static steps are shared by sequences, and so is their rule: each drafts by its own seed."""
    target, folder = itself
    drafter = Speculative(target=target, draft_path=folder, draft_tokens=3)
    streams = [
        decode(target, drafter.session(), PROMPT, max_new_tokens=20, sampling=sampling, execution="static")
        for sampling in (Sampling(temperature=1.0, seed=seed) for seed in (1, 2, 3))
    ]
    lengths = [[step.accepted for step in steps] for steps in zip(*streams, strict=True)]
    assert lengths == [[4] * 3] * 5
