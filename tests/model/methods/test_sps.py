"""A small draft model against transformers' assisted generation: same tokens by the same number of target forwards.

And drafting by the noise that the target draws by: a draft model that is the target then drafts nothing wrong.
"""

import copy
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from evaluation.running.shared_text import generate_together
from model.engine import Target, decode, generate
from model.engine.sampling import Sampling
from model.errors import UserError
from model.methods.sps import Speculative
from model.methods.vanilla import Vanilla
from tests.conftest import CONFIGS, generated, greedy, toy_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target and a draft model that is the target with noise on it: drafts stand often, and not always."""
    model = toy_model("llama-grouped")
    noisy = toy_model("llama-grouped")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter.add_(
                torch.randn_like(parameter) * parameter.std() * 0.06 if parameter.dim() > 1 else 0.0
            )
    noisy.generation_config.eos_token_id = (
        None  # or generate() stops its drafts there whatever the call says
    )
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
    target, rng = Target(model), random.Random(seed)
    prompt = [rng.randrange(3, 61) for _ in range(rng.choice([1, 2, 9, 30]))]
    free = greedy(model, prompt, 40)
    for limit, eos in ((40, None), (7, None), (1, None), (40, [free[25], free[11]])):
        drafter = Speculative(
            target=target, draft_path=str(folder), draft_tokens=gamma, eos=eos or ()
        )
        out = generate(target, drafter, prompt, max_new_tokens=limit, eos=eos or ())
        assert (out.tokens, out.forwards) == assisted(model, noisy, prompt, limit, gamma, eos)
        assert out.tokens == greedy(model, prompt, limit, eos)


def test_a_draft_model_of_shorter_context_stops_drafting(pair, tmp_path):
    model, _, _ = pair
    torch.manual_seed(0)
    short = LlamaForCausalLM(
        LlamaConfig(**CONFIGS["llama"].to_diff_dict() | {"max_position_embeddings": 24})
    )
    short.save_pretrained(tmp_path)
    target = Target(model)
    drafter = Speculative(target=target, draft_path=str(tmp_path), draft_tokens=4)
    for prompt in ([9] * 10, [9] * 23, [9] * 24, [9] * 40):
        out = generate(target, drafter, prompt, max_new_tokens=30)
        assert out.tokens == greedy(model, prompt, 30)
        assert [s.nodes for s in out.steps[-3:-1]] == [1, 1]


@pytest.mark.parametrize("rows", [64, 48])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)])
def test_a_vocabulary_padded_otherwise_is_no_other_tokenizer(pair, tmp_path, rows, sampling):
    model, noisy, _ = pair
    draft = copy.deepcopy(noisy)
    draft.resize_token_embeddings(rows)
    draft.save_pretrained(tmp_path)
    target = Target(model)
    drafter = Speculative(target=target, draft_path=str(tmp_path))
    prompt = [60, 9, 2, 60]
    plain = generate(
        target, Vanilla(device=target.device), prompt, max_new_tokens=30, sampling=sampling
    )
    out = generate(target, drafter, prompt, max_new_tokens=30, sampling=sampling)
    assert out.tokens == plain.tokens and len(out.steps) < 30


def test_what_does_not_fit_or_cannot_be_trusted_is_refused(pair, tmp_path):
    model, _, folder = pair
    truncated, lacking, pickled = (shutil.copytree(folder, tmp_path / name) for name in "abc")
    other = LlamaForCausalLM(LlamaConfig(**CONFIGS["llama"].to_diff_dict() | {"vocab_size": 573}))
    other.save_pretrained(tmp_path / "other")
    file = truncated / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    weights = load_file(lacking / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, lacking / "model.safetensors", metadata={"format": "pt"})
    (pickled / "model.safetensors").unlink()
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    for draft, says in (
        (
            tmp_path / "absent",
            r"no draft model in .*absent; train .*python -m data.embedded.training.train --draft",
        ),
        (tmp_path / "other", "vocabulary of 573 tokens, the target of 61"),
        (truncated, "cannot be loaded"),
        (lacking, "1 of its weights are not in its files .*up_proj"),
        (pickled, "cannot be loaded"),
    ):
        with pytest.raises(UserError, match=says) as error:
            Speculative(target=Target(model), draft_path=str(draft))
        assert "\n" not in str(error.value)


PROMPT = [5, 9, 2, 7]
DRAWN = [Sampling(temperature=1.0, seed=3), Sampling(temperature=1.6, top_p=0.9, seed=4)]


@pytest.fixture(scope="module")
def itself(tmp_path_factory):
    """A target, and the folder of its draft model, which is the same one; what is drawn is often not its arg-max."""
    model, folder = toy_model("llama-grouped"), tmp_path_factory.mktemp("draft")
    with torch.no_grad():
        model.lm_head.weight.mul_(0.1)
    model.save_pretrained(folder)
    return Target(model), str(folder)


@pytest.mark.parametrize("execution", ["eager", "static"])
@pytest.mark.parametrize("sampling", DRAWN, ids=["plain", "top-p"])
def test_the_target_as_its_own_draft_model(sampling, execution, itself):
    target, folder = itself
    sharing, apart = (
        Speculative(target=target, draft_path=folder, draft_tokens=3, share_noise=share)
        for share in (True, False)
    )
    shared = generate(
        target, sharing, PROMPT, max_new_tokens=40, sampling=sampling, execution=execution
    )
    assert shared.accept_lengths == [4] * 10, (
        "drafts are drawn as the target draws, at the right places"
    )
    other = generate(
        target, apart, PROMPT, max_new_tokens=40, sampling=sampling, execution=execution
    )
    assert other.tokens == shared.tokens and len(other.steps) > 2 * len(shared.steps)
    if execution == "eager":
        together = generate_together(
            target, [sharing, apart], PROMPT, max_new_tokens=40, sampling=sampling
        )
        assert [out.accept_lengths for out in together] == [
            shared.accept_lengths,
            other.accept_lengths,
        ]


def test_sequences_of_several_seeds_in_turn(itself):
    """Static steps are shared by sequences, and so is their rule: each drafts by its own seed."""
    target, folder = itself
    drafter = Speculative(target=target, draft_path=folder, draft_tokens=3)
    streams = [
        decode(
            target,
            drafter.session(),
            PROMPT,
            max_new_tokens=20,
            sampling=sampling,
            execution="static",
        )
        for sampling in (Sampling(temperature=1.0, seed=seed) for seed in (1, 2, 3))
    ]
    lengths = [[step.accepted for step in steps] for steps in zip(*streams, strict=True)]
    assert lengths == [[4] * 3] * 5
