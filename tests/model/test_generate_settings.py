"""Inside transformers' generate: every setting is honoured, decides nothing, or is refused by name."""

import copy
import io
import pickle

import pytest
import torch
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LogitsProcessor,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from model import generate as generate_settings
from model.decoder import Decoder
from model.engine import Target, generate
from model.engine.checks import CACHE_NAMES
from model.engine.linear import _copies, unpack_linears
from model.engine.sampling import Sampling
from model.errors import UserError
from model.files import ROOT
from model.generate import (
    ATTRIBUTE,
    DRAWS,
    IRRELEVANT,
    OUTPUTS,
    PROCESSORS,
    READ,
    REFUSED,
    Generate,
    undecided,
)
from model.methods import make_method
from model.tuning import Execution, choose_linear
from tests.conftest import greedy, toy_model
from tests.model.engine.fake_graphs import FakeGraphs
from tests.model.test_decoder import layer_types

FIELDS = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
PROMPT = [5, 9, 53, 9, 5]
IDS = torch.tensor([PROMPT])


def answer(settings, model=None, **more):
    settings = {
        "max_new_tokens": 30,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": [],
    } | settings
    return (model or toy_model("llama")).generate(IDS, **settings, **more)


def test_every_field_of_the_installed_version_is_in_one_list():
    lists = [set(names) for names in (DRAWS, PROCESSORS, READ, IRRELEVANT, REFUSED, OUTPUTS)]
    assert sum(map(len, lists)) == len(set.union(*lists)), "in one alone"
    assert not FIELDS - set.union(*lists), "a field that nobody has looked at"


def test_what_is_not_done_or_would_not_be_seen_is_refused_by_name():
    """A mask that hides nothing is no padding: transformers leaves it out by 5.23, and hands it on by 5.17."""
    model, ours = toy_model("llama"), Generate()

    def refuse(arguments=None, **fields):
        config = GenerationConfig(max_length=20, return_dict_in_generate=False)
        for name, value in fields.items():
            setattr(config, name, value)
        generate_settings.refuse(model, IDS, config, arguments or {})

    refuse({"attention_mask": torch.ones_like(IDS)})
    for name in REFUSED.keys() & FIELDS:
        with pytest.raises(UserError, match=name):
            refuse(**{name: 7})
    for name, value, says in (
        ("position_ids", torch.arange(5)[None] + 3, "position_ids"),
        ("token_type_ids", torch.zeros(1, 5), "token_type_ids"),
        ("attention_mask", torch.tensor([[1, 1, 1, 1, 0]]), "padding"),
    ):
        with pytest.raises(UserError, match=says):
            refuse({name: value})
    for settings, says in (
        *(({name: True, "return_dict_in_generate": True}, name) for name in OUTPUTS),
        ({"dola_layers": "low"}, "dola_layers"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        (
            {"do_sample": True, "num_return_sequences": 2},
            "not supported: num_return_sequences; leave",
        ),
        ({"position_ids": torch.arange(5)[None] + 3}, "position_ids"),
    ):
        with pytest.raises(UserError, match=says):
            answer(settings, custom_generate=ours)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_is_refused_by_its_name_once_it_holds_a_text(name):
    model = toy_model("llama")
    config, cache = GenerationConfig(max_length=20), DynamicCache(config=model.config)
    generate_settings.refuse(model, IDS, config, {name: cache})  # `generate` prepares an empty one
    cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    with pytest.raises(UserError, match=f"not supported: {name}; leave it out"):
        generate_settings.refuse(model, IDS, config, {name: cache})


def test_a_field_that_nobody_knows_is_refused_as_soon_as_it_is_used(monkeypatch):
    others = tuple(name for name in PROCESSORS if name != "no_repeat_ngram_size")
    monkeypatch.setattr(generate_settings, "PROCESSORS", others)
    assert answer({}, custom_generate=Generate()).equal(answer({})), "not where it is as ever"
    with pytest.raises(UserError, match="no_repeat_ngram_size"):
        answer({"no_repeat_ngram_size": 2}, custom_generate=Generate())


def test_remarks_of_a_checkpoint_are_no_settings():
    """Some publish fields of their own beside transformers'."""
    config = GenerationConfig(max_new_tokens=20, chat_format="chatml", pad_token_id=0)
    model = toy_model("llama")
    ours = model.generate(IDS, generation_config=config, custom_generate=Generate())
    assert ours.equal(model.generate(IDS, generation_config=config))


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
    "max_length": {"max_length": 12, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 7},
    "min_length": {"min_length": 25, "eos_token_id": [35, 54]},
    "min_new_tokens": {"min_new_tokens": 20, "eos_token_id": [35, 54]},
    "eos_token_id": {"eos_token_id": 54},
    "max_time": {"max_time": 0.0},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 5.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[36], [54, 53]]},
    "sequence_bias": {"sequence_bias": [[[7], 30.0], [[54], -30.0]]},
    "suppress_tokens": {"suppress_tokens": [54, 35]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [36, 54, 35]},
    "forced_bos_token_id": {"forced_bos_token_id": 7},
    "forced_eos_token_id": {"forced_eos_token_id": 8},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (3, 3.0),
        "eos_token_id": 9,
    },
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
    "criteria": {"stopping_criteria": StoppingCriteriaList([Stop()])},
    "eos by criterion": {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(16)])},
    "own processor": {"logits_processor": [Odd()], "repetition_penalty": 1.4},
    "of one row": {
        "prefix_allowed_tokens_fn": lambda row, text: [[int(text[-1]) % 50 + 3, 7, 11, 20]][row]
    },
    "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "static"},
    "length_penalty": {"length_penalty": 2.0},
}
WITHOUT_EFFECT = {"forced_bos_token_id", "remove_invalid_values", "renormalize_logits"}
WITHOUT_EFFECT |= {"use_cache", "cache_implementation", "length_penalty"}


def test_what_is_honoured_does_what_it_does_in_generate():
    model, ours, plain = toy_model("llama"), Generate(), answer({}).tolist()
    expected = {name: answer(settings, model) for name, settings in GREEDY.items()}
    for name, settings in GREEDY.items():
        assert answer(settings, model, custom_generate=ours).equal(expected[name]), name
    assert {name for name, text in expected.items() if text.tolist() == plain} == WITHOUT_EFFECT
    output = answer({"return_dict_in_generate": True}, model, custom_generate=ours)
    assert output.sequences.tolist() == plain
    (generation,) = output.generations
    assert generation.tokens == plain[0][-len(generation.tokens) :] and generation.forwards >= len(
        generation.steps
    )
    assert sum(generation.accept_lengths) == len(generation.tokens) > len(generation.steps), (
        "drafts were accepted"
    )


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
    model = toy_model("llama")
    torch.manual_seed(seed)
    settings = {"do_sample": True, "temperature": 20.0, "top_k": 0} | settings
    return answer(settings, model, custom_generate=Generate(method)).tolist()


def test_what_narrows_a_draw_is_among_the_processors():
    """So that the draw with it is another one than without. It follows torch's seed and not the method."""
    texts = {name: drawn(3, "vanilla", **{name: DRAWN[name]}) for name in DRAWN.keys() & FIELDS}
    plain = drawn(3, "vanilla")
    assert len(texts) > 5 and plain not in texts.values()
    assert plain == drawn(3, "recycling") == drawn(3, "dynamic") != drawn(2, "vanilla")


def test_a_processor_that_writes_into_the_scores_changes_nothing_else():
    def written(ids, scores):
        scores[:, 7] = 1e4
        return scores

    lengths = []
    for processor in (written, lambda ids, scores: written(ids, scores.clone())):
        target = Target(toy_model("llama"))
        drafter = make_method("recycling", target, tree="best:9")
        sampling = Sampling(processors=(processor,))
        out = generate(target, drafter, [5, 9, 5], max_new_tokens=12, sampling=sampling)
        lengths.append((out.accept_lengths, drafter.state_dict()["candidates"].tolist()))
    assert lengths[0] == lengths[1]


class Heard(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], 0

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


def test_a_streamer_hears_every_token_once_also_in_the_hubs_layout():
    """transformers loads custom_generate/generate.py of a local path, and runs it for whoever trusts it."""
    model = toy_model("llama")
    expected, hub = answer({}, model), dict(custom_generate=str(ROOT), trust_remote_code=True)
    for way in (
        hub,
        hub | dict(method="pld"),
        dict(custom_generate=Generate(), token_streamer=Heard()),
    ):
        streamer = way.get("token_streamer", Heard())
        assert answer({}, model, **way, streamer=streamer).equal(expected)
        assert streamer.tokens == expected[0].tolist() and streamer.ended == 1


@pytest.mark.parametrize("way", ["folder", "object"])
def test_a_copy_of_a_model_that_decoded_decodes(way):
    """pickle and torch.save met the object that a folder's call leaves with the model: cannot pickle a weakref."""
    model = toy_model("llama-grouped")
    expected = answer({}, model)
    ours = Generate(
        "recycling", start="cold", nodes=6, context=100, execution="eager", linear="torch"
    )
    folder = dict(custom_generate=str(ROOT), trust_remote_code=True, method="pld")
    decoding = folder if way == "folder" else dict(custom_generate=ours)
    answer({}, model, **decoding)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [
        torch.load(saved, weights_only=False),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
    ]
    if way == "object":
        same = [pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)]
        for one in same:
            assert vars(one) == vars(ours)
            assert answer({}, model, custom_generate=one).equal(expected)
    for another in copies:
        assert answer({}, another).equal(expected) and answer({}, another, **decoding).equal(
            expected
        )
    assert answer({}, model, **decoding).equal(expected)


def drafter_in(model, generate):
    return vars(model)[ATTRIBUTE].drafters[generate][-1]


def test_what_was_learnt_outlives_a_longer_text_and_another_model(monkeypatch):
    monkeypatch.setattr(generate_settings, "DEFAULT_CONTEXT", 32)
    first, second, ours = toy_model("llama"), toy_model("qwen3"), Generate("recycling")
    for model in (first, second):
        answer({"max_new_tokens": 20}, model, custom_generate=ours)
    learnt = drafter_in(first, ours).state_dict()["candidates"].clone()
    answer({"max_new_tokens": 100}, first, custom_generate=ours)
    kept = drafter_in(first, ours).state_dict()["candidates"]
    (target,) = vars(first)[ATTRIBUTE].targets.values()
    seen = learnt.any(-1)
    assert target.context > 32 and bool(seen.any()) and bool(kept.any(-1)[seen].all())


@pytest.mark.parametrize(
    ("settings", "captured"), [({"top_p": 0.9, "top_k": 20}, True), ({"typical_p": 0.9}, False)]
)
def test_what_models_mostly_sample_with_takes_captured_steps(settings, captured, monkeypatch):
    """Qwen's and Llama's own settings are such; what reads the text is eager."""
    graphs, model = FakeGraphs(monkeypatch), toy_model("llama")
    monkeypatch.setattr(
        generate_settings, "choose_execution", lambda target, name: Execution("graph", "a trial")
    )
    monkeypatch.setattr(Target, "check_execution", lambda target, name: name)
    answer(
        {"max_new_tokens": 20, "do_sample": True, **settings},
        model,
        custom_generate=Generate("vanilla"),
    )
    assert (len(graphs.captured), graphs.replays) == ((1, 19) if captured else (0, 0))


def test_longer_and_longer_texts_are_served_by_few_targets(monkeypatch):
    """On a GPU each makes a trial and captures of its own."""
    monkeypatch.setattr(generate_settings, "DEFAULT_CONTEXT", 32)
    model = toy_model("llama")
    targets = [generate_settings.target_of(model, length) for length in range(8, 257, 8)]
    assert [target.context for target in dict.fromkeys(targets)] == [32, 64, 128, 256]


def ends_of(drafter):
    """Of a dynamic drafter: below what it drafts nothing."""
    return set(drafter.rows.rows.ends.nonzero()[0].tolist())


def test_an_end_is_one_id_or_several_of_the_decoder_or_of_the_call():
    """Methods do not draft below an end: they are made for those of the call, and keep what they learnt."""
    model, ours = toy_model("llama"), Generate("dynamic", nodes=8)
    free = greedy(model, PROMPT, 30)
    early, late = sorted(set(free), key=free.index)[-4::3]
    for eos in (early, [early], {early, late}):
        decoder = Decoder(model, eos=eos, nodes=8)
        assert decoder.generate(PROMPT, max_new_tokens=30).ids == greedy(
            model, PROMPT, 30, [*decoder.eos]
        )
        assert early in ends_of(decoder.method) == decoder.eos
    learnt = 0
    for eos in (early, [late]):
        assert answer({"eos_token_id": eos}, model, custom_generate=ours).equal(
            answer({"eos_token_id": eos}, model)
        )
        drafter = drafter_in(model, ours)
        assert (
            ends_of(drafter) == ({eos} if isinstance(eos, int) else set(eos))
            and (drafter.rows.rows.keys >= 0).sum() > learnt
        )
        learnt = (drafter.rows.rows.keys >= 0).sum()


def copied(model):
    return any(copies.by_layer for copies in _copies[model].values())


def test_generate_packs_until_it_is_released_or_gone_where_it_does_not_fuse():
    model, plain = toy_model("llama-grouped"), {"Linear"}
    packed = {"PackedLinear"} if choose_linear(model).copy == "onednn" else plain
    expected = answer({}, model)
    for more, types in (
        ({}, packed),
        ({"linear": "torch"}, plain),
        ({"linear": "fused"}, {"PackedLinear", *plain}),
    ):
        ours = Generate(**more)
        for _ in range(2):
            assert answer({}, model, custom_generate=ours).equal(expected)
            assert layer_types(model) == types
            ours.release(model)
            assert layer_types(model) == plain
        answer({}, model, custom_generate=ours)
        assert copied(model) == (types != plain)
        del ours
        assert not copied(model) and bool(vars(model)[ATTRIBUTE].targets) == (types == plain)
        unpack_linears(model)


def test_generate_takes_more_tokens_than_the_model_has_positions(monkeypatch):
    """Stock `generate` does, and stops at the end of its answer; a model is driven for a longer text by one target."""
    said = []
    monkeypatch.setattr(generate_settings.logger, "warning_once", said.append)
    model, own = toy_model("llama"), greedy(toy_model("llama"), PROMPT, 251)
    for eos in (own[30], None):
        long = {"max_new_tokens": 5000, "eos_token_id": eos}
        text = answer(long, model, custom_generate=Generate(nodes=8))[0, 5:].tolist()
        assert text == (own if eos is None else own[: own.index(eos) + 1])
        assert len(said) == (eos is None)
    assert (
        answer({}, model, custom_generate=Generate(nodes=8, context=12))[0, 5:].tolist() == own[:7]
        and "12" in said[1]
    )
    with pytest.raises(UserError, match="context=1: must be"):
        Generate(context=1)


def test_a_context_is_set_where_a_model_asks_for_one():
    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, window_size=140)
    model = GPTNeoForCausalLM(
        GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 1]])
    ).eval()
    with pytest.raises(UserError, match="set the context to 12 or less"):
        answer({}, model, custom_generate=Generate())
    ours = answer({}, model, custom_generate=Generate(nodes=8, context=12))
    assert ours.equal(answer({"max_new_tokens": 7}, model))


def test_a_criterion_is_asked_only_where_the_loop_does_not_decide():
    """Each question is a wait for a GPU, for every token."""
    lengths, ends = (
        [MaxLengthCriteria(40), MaxLengthCriteria(20)],
        [EosTokenCriteria([2, 3]), EosTokenCriteria(16)],
    )
    stop = Stop()
    assert undecided([lengths[0], ends[0]], 40, {2, 3}) == []
    assert undecided([*lengths, *ends, stop], 40, {2, 3}) == [lengths[1], ends[1], stop]
