"""transformers' own generate with its static cache: compiling is timed in no answer, and texts are generate's."""

import json
import weakref
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
)

from evaluation.configuration.config import checked_config
from evaluation.configuration.jobs import compose
from evaluation.loading import stock
from evaluation.loading.answerers import build_answerer
from evaluation.loading.models import LoadedModel, ModelSettings, load_model
from evaluation.loading.stock import StockSettings, stock_drafts, stock_generate
from evaluation.records.runs import GENERATE
from model.engine import Request, Target, exhaust
from model.engine.loop.batch import decode_batch
from model.errors import UserError
from model.files import ROOT
from model.methods.vanilla import Vanilla
from tests.model.families import toy

EMBEDDED = ROOT / "data/embedded"
SHAPE = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=128
)
WINDOWS = dict(head_dim=8, sliding_window=48, layer_types=["sliding_attention"])
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, num_key_value_heads=2),
    "windows": Gemma3TextConfig(**SHAPE, **WINDOWS, num_key_value_heads=2),
}


def loaded_model(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()
    settings = ModelSettings(kind, "random weights")
    target = SimpleNamespace(device=torch.device("cpu"))
    return SimpleNamespace(stock=model, target=target, settings=settings, static_caches={})


def config(new, **more):
    return GenerationConfig(max_new_tokens=new, pad_token_id=0, do_sample=False, **more)


@pytest.fixture
def compiling():
    """Settings with which transformers compiles on a CPU, too, as it does by itself on a GPU."""
    own = CompileConfig(backend="eager", mode=None)
    own._compile_all_devices = True
    return {"compile_config": own}


@pytest.mark.slow
def test_a_cache_stays_where_it_is_and_an_attempt_samples_as_the_one_before(compiling):
    """Captured graphs read the cache by its address."""
    loaded = loaded_model("windows")
    addresses = []
    drawn = dict(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=60, pad_token_id=0)
    expected, _ = stock_generate(loaded, [[5, 6, 7]], GenerationConfig(**drawn), seed=3)
    for _ in range(2):
        settings = GenerationConfig(**drawn, **compiling)
        assert stock_generate(loaded, [[5, 6, 7]], settings, compiled=True, seed=3)[0] == expected
        addresses.append([layer.keys.data_ptr() for layer in loaded.static_caches[1, 64].layers])
    assert addresses[0] == addresses[1]


def test_static_caches_and_a_batchs_are_freed_by_release():
    """Of a 7B model and 16 sequences they are 12 GB."""
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    target = Target(model)
    settings = ModelSettings("toy", "")
    loaded = LoadedModel(settings, target, None, "chat", frozenset())
    stock_generate(loaded, [[5, 6, 7]], config(3), compiled=True)
    asked = [([5, 6], Request(max_new_tokens=3))]
    exhaust(decode_batch(target, Vanilla(target.device), asked, 2))
    caches = [*loaded.static_caches.values(), target.idle_batch]
    kept = [*map(weakref.ref, caches)]
    del caches
    loaded.release()
    assert len(kept) == 2 and not any(cache() for cache in kept)


def test_what_transformers_cannot_do_is_one_line(monkeypatch):
    def fail(**settings):
        raise ValueError("no static\ncache")

    monkeypatch.setattr(stock, "StaticCache", fail)
    loaded = loaded_model("llama")
    with pytest.raises(
        UserError, match="^method.compiled=true: transformers fails on llama .*: no static cache$"
    ):
        stock_generate(loaded, [[5, 6, 7]], config(4), compiled=True)
    assert len(stock_generate(loaded, [[5, 6, 7]], config(4))[0][0]) == 4, "without it, it works"


def test_stock_drafts_give_stock_text_and_each_forward_is_a_step():
    """A model that drafts for itself is right in every draft."""
    loaded = load_model(ModelSettings("embedded", str(EMBEDDED), device="cpu"))
    question = (ROOT / "data/sample/question.jsonl").read_text().splitlines()[16]
    words = json.loads(question)["turns"][0]
    prompt = loaded.tokenizer(f"USER: {words} ASSISTANT:").input_ids

    def answer(**options):
        method = {"name": "hf", "drafter": None, **options}
        return build_answerer(loaded, method, {}, "cold", GENERATE).answer(prompt, 48)

    plain = answer()
    lookup = answer(lookup_tokens=3)
    assisted = answer(draft_path=str(EMBEDDED))
    for drafted in (lookup, assisted):
        assert drafted.tokens == plain.tokens and drafted.stop == plain.stop
        assert sum(drafted.accept_lengths) == len(plain.tokens)
        assert len(drafted.steps) == drafted.forwards < plain.forwards
    assert {step.nodes for step in lookup.steps} <= {1, 2, 3, 4}
    assert max(step.accepted for step in lookup.steps) == 4
    assert all(step.accepted == step.nodes for step in assisted.steps[:-1])


def test_models_that_transformers_cannot_draft_for_are_refused(tmp_path):
    settings = ModelSettings("toy", "")
    recurrent = LoadedModel(settings, Target(toy("qwen3_next")), None, "chat", frozenset())
    with pytest.raises(UserError, match="toy: has a recurrent state"):
        stock_drafts(recurrent, StockSettings(lookup_tokens=3))
    small = LlamaConfig(**SHAPE | {"vocab_size": 64}, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path)
    target = Target(AutoModelForCausalLM.from_config(CONFIGS["llama"]))
    loaded = LoadedModel(settings, target, None, "chat", frozenset())
    with pytest.raises(UserError, match="has a vocabulary of 64, the target of 128"):
        stock_drafts(loaded, StockSettings(draft_path=str(tmp_path)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["method=hf_lookup", "method.lookup_tokens=0"],
            "method.lookup_tokens=0: must be at least 1",
        ),
        (["method=hf_lookup", "+method.compiled=true"], "exclude each other"),
        (["method=hf_lookup", "method.lookup_tokens=null"], "makes it another method"),
        (["method=hf", "+method.lookup_tokens=3"], "makes it another method"),
        (["method=hf_assisted", "batch=2"], "hf_assisted: transformers drafts for one sequence"),
    ],
)
def test_wrong_settings_of_stock_drafts_are_a_line(words, message):
    with pytest.raises(UserError, match=message):
        checked_config(compose(words).jobs[0].config)
