"""Layers with windows, chunks, shared keys or recurrent states; and models that the trial at load time refuses."""

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import AutoModelForImageTextToText as AutoMultimodal
from transformers import AutoModelForSeq2SeqLM as AutoSeq2Seq
from transformers import (
    BertConfig,
    DogeConfig,
    FalconConfig,
    GPTNeoConfig,
    Llama4TextConfig,
    LlavaConfig,
    MambaConfig,
    MllamaConfig,
    Qwen2VLConfig,
    T5Config,
)

from evaluation.running.shared_text import generate_together
from model.decoder import Decoder
from model.engine import Target, generate
from model.errors import UserError
from model.generate import Generate, refuse
from model.methods import make_method
from tests.conftest import CONFIGS, NARROW, SIZES, greedy, sharpened, toy_model
from tests.model.families import toy

HEADS = dict(num_key_value_heads=2, head_dim=8)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
LLAMA4 = (
    SIZES
    | NARROW
    | HEADS
    | EXPERTS
    | dict(num_hidden_layers=4, intermediate_size_mlp=48, attention_chunk_size=8)
)
# mistral: one mask for all of its layers; gemma2: two types of layers, a mask each; gpt_oss: sinks;
# gemma3n: two layers read another one's keys
WINDOWED = ("mistral", "gemma2", "gpt_oss", "llama4_text", "gemma3n_text")
# falcon_h1: states and keys in one layer; mamba2: no attention
RECURRENT = ("lfm2", "qwen3_next", "bamba", "falcon_h1", "mamba2")
GROUPED = SIZES | NARROW | dict(num_hidden_layers=4, num_key_value_heads=2)
PICTURES = dict(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    image_size=16,
    patch_size=8,
)
MULTIMODAL = {
    "llava": LlavaConfig(text_config=GROUPED | dict(model_type="llama"), vision_config=PICTURES, image_token_index=60),
    "qwen2_vl": Qwen2VLConfig(  # positions of three kinds
        text_config=GROUPED | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])),
        vision_config=dict(depth=1, embed_dim=32, hidden_size=32, num_heads=2, patch_size=8),
    ),
    "mllama": MllamaConfig(  # layers that look at pictures alone
        text_config=GROUPED | dict(cross_attention_layers=[1, 3]),
        vision_config=PICTURES | dict(
            num_global_layers=1, attention_heads=2, max_num_tiles=1, intermediate_layers_indices=[0],
            vision_output_dim=64, supported_aspect_ratios=[[1, 1]],
        ),
    ),
}  # fmt: skip
METHODS = {"dynamic": {"nodes": 10}, "recycling": {"tree": "best:16"}}
PROMPT = [5, 9, 13, 7, 5, 9, 13, 8, 5, 9, 13, 7, 20, 21, 22, 5, 9, 13, 5, 9, 13, 7]


def made(config):
    """A random model, sharpened so that its text depends on all that it sees."""
    torch.manual_seed(0)
    kind = AutoMultimodal if hasattr(config, "vision_config") else Auto
    kind = AutoSeq2Seq if config.is_encoder_decoder else kind
    return sharpened(kind.from_config(config).eval(), 3.0)


@pytest.mark.parametrize("family", WINDOWED)
def test_text_behind_a_window_is_the_models_own(family):
    model = toy(family)
    own = greedy(model, PROMPT, 24)
    target = Target(model)
    for name, settings in METHODS.items():
        drafter = make_method(name, target, **settings)
        for execution in ("eager", "static"):  # the second one hot
            out = generate(target, drafter, PROMPT, max_new_tokens=24, execution=execution)
            assert out.tokens == own, (name, execution)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4), "encoder-decoder"),
        # its scan forgets the state
        (MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2), "drafts would change what the model says"),
        (BertConfig(**SIZES, intermediate_size=48), "drafts would change what the model says"),  # in both directions
        (GPTNeoConfig(vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, window_size=136,
                      attention_types=[[["global", "local"], 1]]), "set the context to 8 or less"),
        (DogeConfig(**SIZES, intermediate_size=48, keep_window_size=192), "set the context to 64 or less"),
        (FalconConfig(**SIZES, alibi=True, new_decoder_architecture=False), "drafts would|does not work"),
        (Llama4TextConfig(**LLAMA4, floor_scale=228), "set the context to 100 or less"),  # its temperature
    ],
)  # fmt: skip
def test_attention_that_a_tree_would_change_is_refused(config, why):
    with pytest.raises(UserError, match=why):
        Target(made(config))


def test_a_context_or_kernel_that_cannot_be_is_refused():
    with pytest.raises(UserError, match="context=9999 is more than the 256 positions"):
        Target(toy_model("llama"), context=9999)
    config = CONFIGS["llama"].from_dict(CONFIGS["llama"].to_dict())
    with pytest.raises(UserError, match="flex_attention.*sdpa"):
        Target(Auto.from_config(config, attn_implementation="flex_attention"))


@pytest.mark.parametrize("family", RECURRENT)
def test_chains_leave_a_recurrent_models_text_as_it_is(family):
    model = toy(family)
    target = Target(model)
    own = greedy(model, PROMPT, 24)
    steps = []
    for name, settings in METHODS.items():
        drafter = make_method(name, target, **settings)
        for _ in range(2):  # the second one hot
            out = generate(target, drafter, PROMPT, max_new_tokens=24)
            assert out.tokens == own and sum(out.accept_lengths) == 24, name
            steps += out.steps
    drafted = sum(step.nodes - 1 for step in steps)
    accepted = sum(step.accepted - 1 for step in steps)
    assert drafted > accepted > 5, "drafts are accepted and taken back"


def test_conversations_and_open_answers_of_recurrent_models():
    """States serve a prompt that continues all that they have read."""
    model = toy("lfm2")
    decoder = Decoder(model, eos=())
    prompt = list(PROMPT)
    for turn in range(2):
        answer = decoder.generate(prompt, max_new_tokens=12).ids
        assert answer == greedy(model, prompt, 12)
        prompt = [*prompt, *answer, 40 + turn, 6]
    prompts = [PROMPT, PROMPT[:3]]
    streams = [decoder.stream(prompt, max_new_tokens=12) for prompt in prompts]
    firsts = [next(stream) for stream in streams]  # all are open
    for prompt, stream, first in zip(prompts, streams, firsts, strict=True):
        tokens = [token for step in (first, *stream) for token in step.tokens]
        assert tokens == greedy(model, prompt, 12)
    drafters = [make_method(name, decoder.target, nodes=8) for name in ("recycling", "dynamic")]
    outs = generate_together(decoder.target, drafters, PROMPT, max_new_tokens=12)
    assert [out.tokens for out in outs] == [greedy(model, PROMPT, 12)] * 2


def test_what_recurrent_states_exclude_is_refused(tmp_path):
    target = Target(toy("lfm2"))
    target.model.save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match="keeps recurrent states, which cannot take back its drafts"
    ):
        make_method("sps", target, draft_path=str(tmp_path))
    for name in ("lookahead", "goose"):
        with pytest.raises(UserError, match="needs its tree"):
            generate(target, make_method(name, target), PROMPT, max_new_tokens=4)
    with pytest.raises(UserError, match="execution=static: this model keeps recurrent states"):
        generate(
            target, make_method("vanilla", target), PROMPT, max_new_tokens=4, execution="static"
        )


@pytest.mark.parametrize("family", MULTIMODAL)
def test_models_that_see_pictures_are_driven_with_text(family):
    model = made(MULTIMODAL[family])
    ids = torch.tensor([PROMPT])
    settings = dict(max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    own = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, custom_generate=Generate(nodes=8), **settings), own)
    decoder = Decoder(model)
    decoder.eos = frozenset()
    assert [*PROMPT, *decoder.generate(PROMPT, max_new_tokens=16).ids] == own[0].tolist()
    for picture in ({"pixel_values": ids}, {"mm_encoder_outputs": {"image": ids}}):
        with pytest.raises(UserError, match=f"not supported: {next(iter(picture))}"):
            refuse(model, ids, model.generation_config, picture)
