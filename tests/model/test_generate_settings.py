"""Inside transformers' generate: every setting is honoured, has no effect, or is refused by name."""

import pickle

import pytest
import torch
from transformers import (
    AutoTokenizer,
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

from model import generate as generate_module
from model.decoder import Decoder
from model.engine.attention.checks import CACHE_NAMES
from model.errors import UserError
from model.files import ROOT
from model.generate import Generate, refuse
from model.generation_config import SETTINGS, undecided
from tests.conftest import greedy, toy_model

FIELDS = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
PROMPT = [5, 9, 53, 9, 5]
IDS = torch.tensor([PROMPT])
DEFAULTS = dict(max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=[])


def answer(settings, model=None, **more):
    return (model or toy_model("llama")).generate(IDS, **DEFAULTS | settings, **more)


def test_every_field_of_the_installed_version_is_known():
    assert SETTINGS.keys() >= FIELDS


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"do_sample": True, "num_return_sequences": 2}, "supported: num_return_sequences; leave"),
        ({"position_ids": torch.arange(5)[None] + 3}, "position_ids"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "padding"),
    ],
)
def test_what_is_not_done_is_refused_by_name(settings, says):
    with pytest.raises(UserError, match=says):
        answer(settings, custom_generate=Generate())


def test_every_setting_of_the_table_is_refused_by_name():
    model = toy_model("llama")
    for name in [name for name, allowed in SETTINGS.items() if isinstance(allowed, tuple)]:
        config = GenerationConfig(max_length=20)
        setattr(config, name, 7)
        with pytest.raises(UserError, match=name):
            refuse(model, IDS, config, {})


def test_a_field_that_nobody_knows_is_refused_as_soon_as_it_is_used(monkeypatch):
    monkeypatch.delitem(SETTINGS, "no_repeat_ngram_size")
    assert answer({}, custom_generate=Generate()).equal(answer({})), "not where it is as ever"
    with pytest.raises(UserError, match="no_repeat_ngram_size"):
        answer({"no_repeat_ngram_size": 2}, custom_generate=Generate())


def test_a_cache_is_refused_by_its_name_once_it_holds_a_text():
    name = CACHE_NAMES[0]
    model = toy_model("llama")
    config = GenerationConfig(max_length=20)
    cache = DynamicCache(config=model.config)
    refuse(model, IDS, config, {name: cache})  # `generate` prepares an empty one
    cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    with pytest.raises(UserError, match=f"not supported: {name}; leave it out"):
        refuse(model, IDS, config, {name: cache})


class Stop(StoppingCriteria):
    """After a given token was seen a second time."""

    def __call__(self, ids, scores, **kwargs):
        return torch.tensor([(row == row[-1]).sum() >= 3 for row in ids])


class Odd(LogitsProcessor):
    """Odd tokens only, behind an even one: looks at each row's own text."""

    def __call__(self, ids, scores):
        odd = torch.arange(scores.shape[1]) % 2 == 1
        return scores.masked_fill((ids[:, -1:] % 2 == 0) & ~odd, -1e9)


GREEDY = {
    "max_new_tokens": {"max_new_tokens": 7},
    "min_new_tokens": {"min_new_tokens": 20, "eos_token_id": [35, 54]},
    "eos_token_id": {"eos_token_id": 54},
    "several of a tensor": {"eos_token_id": torch.tensor([35, 54])},
    "max_time": {"max_time": 0.0},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[36], [54, 53]]},
    "forced_eos_token_id": {"forced_eos_token_id": 8},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (3, 3.0),
        "eos_token_id": 9,
    },
    "criteria": {"stopping_criteria": StoppingCriteriaList([Stop()])},
    "eos by criterion": {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(16)])},
    "own processor": {"logits_processor": [Odd()], "repetition_penalty": 1.4},
    "of one row": {
        "prefix_allowed_tokens_fn": lambda row, text: [[int(text[-1]) % 50 + 3, 7, 11, 20]][row]
    },
}
WITHOUT_EFFECT = {
    "remove_invalid_values": True,
    "use_cache": False,
    "cache_implementation": "static",
    "chat_format": "chatml",  # a note of a checkpoint
}


def test_what_is_honoured_does_what_it_does_in_generate():
    model = toy_model("llama")
    ours = Generate()
    plain = answer({}, model)
    for name, settings in GREEDY.items():
        expected = answer(settings, model)
        assert answer(settings, model, custom_generate=ours).equal(expected), name
        assert not expected.equal(plain), name
    for name, value in WITHOUT_EFFECT.items():
        config = GenerationConfig(**DEFAULTS, **{name: value})
        out = model.generate(IDS, generation_config=config, custom_generate=ours)
        assert out.equal(plain), name


DRAWN = {
    "temperature": 0.5,
    "top_k": 2,
    "top_p": 0.3,
    "top_h": 0.2,
    "min_p": 0.9,
    "typical_p": 0.2,
    "epsilon_cutoff": 0.3,
    "eta_cutoff": 0.9,
}


def drawn(seed, method, **settings):
    torch.manual_seed(seed)
    settings = {"do_sample": True, "temperature": 20.0, "top_k": 0} | settings
    model = toy_model("llama")
    torch.manual_seed(seed)
    return answer(settings, model, custom_generate=Generate(method)).tolist()


def test_a_draw_follows_torchs_seed_and_what_narrows_it_and_not_the_method():
    plain = drawn(3, "vanilla")
    for name in DRAWN.keys() & FIELDS:
        assert drawn(3, "vanilla", **{name: DRAWN[name]}) != plain, name
    assert plain == drawn(3, "recycling") == drawn(3, "dynamic") != drawn(2, "vanilla")


class Noted(BaseStreamer):
    def __init__(self):
        self.tokens = []
        self.ended = 0

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


HUB = dict(custom_generate=str(ROOT), trust_remote_code=True)


def test_a_streamer_gets_every_token_once_by_every_way():
    """transformers gave the prompt to `streamer` and hid it from a callable: no token, no end."""
    model = toy_model("llama")
    expected = answer({}, model)
    for way in (HUB, HUB | dict(method="pld"), dict(custom_generate=Generate())):
        streamer = Noted()
        assert answer({}, model, **way, streamer=streamer).equal(expected)
        assert (streamer.tokens, streamer.ended) == (expected[0].tolist(), 1)

    both = Noted()
    tokens = Noted()
    for streamer in (both, tokens):
        answer({}, model, **way, streamer=both, token_streamer=streamer)
    assert (both.tokens, both.ended) == (2 * expected[0].tolist(), 2)
    assert (tokens.tokens, tokens.ended) == (expected[0, len(PROMPT) :].tolist(), 1)


class Breaks(LogitsProcessor):
    def __call__(self, ids, scores):
        raise RuntimeError("a user's own")


@pytest.mark.parametrize(
    ("name", "settings"),
    [("streamer", {"logits_processor": [Breaks()]}), ("token_streamer", {"guidance_scale": 2.0})],
)
def test_the_consumer_of_a_streamer_ends_after_an_error_too(name, settings):
    """It waited for ever, as the iterator ends with `end` alone."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/embedded")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=5)
    with pytest.raises((RuntimeError, UserError)):
        answer(settings, custom_generate=Generate(), **{name: streamer})
    assert "".join(streamer) == ""


def test_copies_of_a_model_that_decoded_and_of_the_method_decode():
    model = toy_model("llama-grouped")
    expected = answer({}, model)
    ours = Generate("recycling", start="cold", nodes=6, context=100, linear="torch")
    for decoding in (dict(custom_generate=ours), HUB):
        answer({}, model, **decoding)
        other, method = pickle.loads(pickle.dumps((model, ours)))
        assert answer({}, other, **decoding).equal(expected)
        assert answer({}, model, custom_generate=method).equal(expected)
        assert method.settings == ours.settings and method.context == 100


def test_what_was_learnt_outlives_a_longer_text_and_other_ends(monkeypatch):
    """On a GPU each target makes a trial and captures: few are made as texts grow."""
    monkeypatch.setattr(generate_module, "DEFAULT_CONTEXT", 32)
    model = toy_model("llama")
    ours = Generate("recycling")
    answer({"max_new_tokens": 20}, model, custom_generate=ours)
    none = frozenset()
    seen = ours.decoder(model, 25, none).method.state_dict()["candidates"].any(-1)
    decoders = {ours.decoder(model, length, none) for length in range(8, 257, 8)}
    assert {decoder.target.context for decoder in decoders} == {32, 64, 128, 256}
    last = ours.decoder(model, 10, frozenset({7}))
    kept = last.method.state_dict()["candidates"].any(-1)
    assert bool(seen.any()) and bool(kept[seen].all())


def test_answers_end_by_the_ids_of_each_call():
    """Methods do not draft below an end, so they are made for it."""
    model = toy_model("llama")
    ours = Generate("dynamic", nodes=8)
    free = greedy(model, PROMPT, 30)
    early, late = sorted(set(free), key=free.index)[-4::3]
    for eos in (early, [late], early):
        out = answer({"eos_token_id": eos}, model, custom_generate=ours)
        assert out.equal(answer({"eos_token_id": eos}, model))
    for eos in ({early}, torch.tensor([early]), [torch.tensor(early)]):
        ids = Decoder(model, eos=eos).generate(PROMPT, max_new_tokens=30).ids
        assert ids == greedy(model, PROMPT, 30, [early])


def test_an_answer_ends_at_the_models_positions_or_the_context(monkeypatch):
    """Stock `generate` goes on."""
    said = []
    monkeypatch.setattr(generate_module.logger, "warning_once", said.append)
    model = toy_model("llama")
    own = greedy(model, PROMPT, 251)
    long = {"max_new_tokens": 5000}
    assert answer(long, model, custom_generate=Generate(nodes=8))[0, 5:].tolist() == own
    assert len(said) == 1
    short = answer({}, model, custom_generate=Generate(nodes=8, context=12))
    assert short[0, 5:].tolist() == own[:7] and "12" in said[1]


def test_a_criterion_is_asked_only_where_the_loop_does_not_decide():
    """Each question is a wait for a GPU, for every token."""
    lengths = [MaxLengthCriteria(40), MaxLengthCriteria(20)]
    ends = [EosTokenCriteria([2, 3]), EosTokenCriteria(16)]
    assert undecided([*lengths, *ends], 40, {2, 3}) == [lengths[1], ends[1]]
