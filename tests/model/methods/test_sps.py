"""A small draft model against transformers' assisted generation: same tokens, same target forwards.

And drafting by the noise that the target draws by: a draft model that is the target then drafts
nothing wrong.
"""

import copy
import random

import pytest
import torch

from evaluation.running.shared_text import generate_together
from model.engine import Sampling, Target, generate
from model.errors import UserError
from model.methods.trained.sps import Speculative
from model.methods.vanilla import Vanilla
from tests.conftest import generated, greedy, toy_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target and a draft model that is the target with noise on it: some drafts are rejected."""
    model = toy_model("llama-grouped")
    noisy = toy_model("llama-grouped")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in noisy.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.06)
    # or generate() stops its drafts there whatever the call says
    noisy.generation_config.eos_token_id = None
    folder = tmp_path_factory.mktemp("draft")
    noisy.save_pretrained(folder)
    return model, noisy, folder


def assisted(model, draft, prompt, limit, gamma, eos):
    """Tokens and target forwards of generate(assistant_model=...) at a fixed draft length."""
    draft.generation_config.num_assistant_tokens = gamma
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    # no token of the text is padding, as generate() would hide it from the draft model
    return generated(model, prompt, limit, eos, assistant_model=draft, pad_token_id=1000)


@pytest.mark.parametrize("seed, gamma", [(0, 1), (1, 2), (2, 5)])
def test_same_tokens_and_forwards_as_transformers(pair, seed, gamma):
    model, noisy, folder = pair
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 61) for _ in range(rng.choice([1, 2, 9, 30]))]
    free = greedy(model, prompt, 40)
    for limit, eos in ((40, []), (7, []), (1, []), (40, [free[25], free[11]])):
        sizes = dict(draft_path=str(folder), draft_tokens=gamma, eos=eos)
        drafter = Speculative(target=Target(model), **sizes)
        out = generate(Target(model), drafter, prompt, max_new_tokens=limit, eos=eos)
        expected = assisted(model, noisy, prompt, limit, gamma, eos or None)
        assert (out.tokens, out.forwards) == expected


def test_a_draft_model_of_shorter_context_stops_drafting(pair, tmp_path):
    model, noisy, _ = pair
    short = copy.deepcopy(noisy)
    short.config.max_position_embeddings = 24
    short.save_pretrained(tmp_path)
    target = Target(model)
    drafter = Speculative(target=target, draft_path=str(tmp_path), draft_tokens=4)
    for prompt in ([9] * 10, [9] * 23, [9] * 24, [9] * 40):
        out = generate(target, drafter, prompt, max_new_tokens=30)
        assert out.tokens == greedy(model, prompt, 30)
        assert [s.nodes for s in out.steps[-3:-1]] == [1, 1]


@pytest.mark.parametrize(
    ("rows", "sampling"), [(64, Sampling()), (48, Sampling(temperature=1.0, seed=3))]
)
def test_a_vocabulary_padded_otherwise_is_no_other_tokenizer(pair, tmp_path, rows, sampling):
    model, noisy, _ = pair
    draft = copy.deepcopy(noisy)
    draft.resize_token_embeddings(rows)
    draft.save_pretrained(tmp_path)
    target = Target(model)
    how = dict(max_new_tokens=30, sampling=sampling)
    drafter = Speculative(target=target, draft_path=str(tmp_path))
    prompt = [60, 9, 2, 60]
    out = generate(target, drafter, prompt, **how)
    assert out.tokens == generate(target, Vanilla(device=target.device), prompt, **how).tokens
    assert len(out.steps) < 30


def test_what_does_not_fit_is_refused(pair, tmp_path):
    model, noisy, _ = pair
    draft = copy.deepcopy(noisy)
    draft.resize_token_embeddings(573)
    draft.save_pretrained(tmp_path)
    for folder, says in (
        (tmp_path / "absent", "absent: no such folder"),
        (tmp_path, "vocabulary of 573 tokens, the target of 61"),
    ):
        with pytest.raises(UserError, match=says):
            Speculative(target=Target(model), draft_path=str(folder))


PROMPT = [5, 9, 2, 7]
DRAWN = [Sampling(temperature=1.0, seed=3), Sampling(temperature=1.6, top_p=0.9, seed=4)]


@pytest.fixture(scope="module")
def itself(tmp_path_factory):
    """A target and the folder of its draft model, which is the same one.

    What is drawn is often not its arg-max.
    """
    model = toy_model("llama-grouped")
    folder = tmp_path_factory.mktemp("draft")
    with torch.no_grad():
        model.lm_head.weight.mul_(0.1)
    model.save_pretrained(folder)
    return Target(model), str(folder)


@pytest.mark.parametrize("sampling", DRAWN, ids=["plain", "top-p"])
def test_the_target_as_its_own_draft_model(sampling, itself):
    """Drafts are drawn as the target draws, at the right places."""
    target, folder = itself
    how = dict(max_new_tokens=40, sampling=sampling)
    sizes = dict(draft_path=folder, draft_tokens=3)
    sharing = Speculative(target=target, **sizes)
    apart = Speculative(target=target, share_noise=False, **sizes)
    shared = generate(target, sharing, PROMPT, **how)
    assert shared.accept_lengths == [4] * 10
    other = generate(target, apart, PROMPT, **how)
    assert other.tokens == shared.tokens
    assert len(other.steps) > 2 * len(shared.steps)
    together = generate_together(target, [sharing, apart], PROMPT, **how)
    lengths = [out.accept_lengths for out in together]
    assert lengths == [shared.accept_lengths, other.accept_lengths]
