"""The loop: greedy identity with transformers' own generate, counts, stops, refusals."""

import gc
import os
import random
import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import AutoModelForSeq2SeqLM as AutoSeq2Seq
from transformers import LlamaConfig, MambaConfig, MistralConfig, T5Config

from model.engine import Draft, Drafter, Needs, Session, Target, generate
from model.errors import UserError
from model.methods.goose import Goose
from model.methods.logitspec import LogitSpec
from model.methods.pld import PromptLookup
from model.methods.vanilla import Vanilla
from model.recycling import TokenRecycling, build_template
from tests.conftest import CONFIGS, greedy, toy_model
from tests.model.engine.test_tree import random_tree
from tests.model.sessions import each_session


class Oracle(Drafter):
    """Knows the answer and drafts it on a random path of a random tree, from the first step on."""

    max_nodes = 31

    def __init__(self, answer: list[int], seed: int) -> None:
        super().__init__(torch.device("cpu"))
        self.answer, self.seed = answer, seed

    def session(self):
        return OracleSession(self)


class OracleSession(Session):
    def __init__(self, method: Oracle) -> None:
        super().__init__(method)
        self.answer, self.at, self.rng = method.answer, 0, random.Random(method.seed)

    def begin(self, prompt):
        return None

    def observe(self, verification):
        self.at += len(verification.tokens)

    def draft(self, root):
        tree = random_tree(30, self.rng)
        tokens = torch.tensor([root] + [self.rng.randrange(61) for _ in range(30)])
        path = tree.chain_of[self.rng.randrange(31)][1:]
        for node, token in zip(path, self.answer[self.at :], strict=False):
            tokens[node] = token
        return Draft(tree, tokens)


class NeedsHidden(Vanilla):
    needs = Needs(hidden=True)


def drafters(eos=()):
    tree = build_template("2.2.2")
    return {
        "vanilla": Vanilla(torch.device("cpu")),
        "pld": PromptLookup(eos=eos),
        "goose": Goose(61, history_pairs=0),
        "logitspec": LogitSpec(61, history_tokens=0),
        "recycling": TokenRecycling(61, tree),
        "recycling-prompt": TokenRecycling(61, tree, recycle_prompt=True, dtype=torch.int32),
        "recycling-best": TokenRecycling(61, build_template("best", nodes=120, k=16), k=16),
        "recycling-chain": TokenRecycling(61, build_template("chain", depth=5, k=1), k=1),
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_identity_for_every_architecture_and_drafter(name):
    model, rng = toy_model(name), random.Random(1)
    target = Target(model)
    for turn in range(2):
        prompt = [rng.randrange(3, 61) for _ in range(9 + turn)] * 2
        expected = greedy(model, prompt, 60)
        everyone = drafters() | {"oracle": Oracle(greedy(model, prompt, 90), seed=turn)}
        for label, drafter in everyone.items():
            out = generate(target, drafter, prompt, max_new_tokens=60)
            assert out.tokens == expected, (name, label)
            assert sum(out.accept_lengths) == len(out.tokens) == 60, label
            assert out.stop == "length"
            assert all(len(s.rank_path) == s.accepted - 1 for s in out.steps[:-1]), label
            assert out.steps[-1].accepted - 1 <= len(out.steps[-1].rank_path) <= out.steps[-1].accepted
            if label == "vanilla":
                assert out.accept_lengths == [1] * 60 and out.forwards == 60
            else:
                # of the others the prompt's tokens but the last have a forward of their own
                alone = label not in ("pld", "goose", "logitspec")
                assert out.forwards == len(out.steps) + alone <= 60
        assert len(out.steps) < 40, "the oracle must get paths accepted"


def test_a_prompt_of_one_token_has_no_forward_of_its_own():
    target = Target(toy_model("llama"))
    for label, drafter in drafters().items():
        out = generate(target, drafter, [5], max_new_tokens=8)
        assert out.forwards == len(out.steps), label


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_attention_kernels_read_the_tree_mask(kernel, dtype):
    """A draft that is accepted whole must give the logits that plain decoding gives at each node."""
    model = toy_model("llama-grouped", dtype=dtype)
    model.set_attn_implementation(kernel)
    target, rng = Target(model), random.Random(2)
    prompt = [rng.randrange(3, 61) for _ in range(7)]
    tree = random_tree(30, rng)
    tokens = torch.tensor([prompt[-1]] + [rng.randrange(61) for _ in range(30)])
    with target.cache(40) as cache:
        target.prefill(cache, prompt)
        node_logits = target.forward(cache, Draft(tree, tokens))
    for node in range(31):
        text = prompt[:-1] + tokens[tree.chain_of[node]].tolist()
        with torch.inference_mode():
            plain = model(torch.tensor([text])).logits[0, -1]
        tolerance = 2e-4 if dtype is torch.float32 else 0.25
        torch.testing.assert_close(node_logits[node], plain, rtol=tolerance, atol=tolerance * plain.abs().max().item())


def test_what_a_drafter_begins_with_is_a_chain_or_nothing(llama):
    drafter = Oracle([5], seed=0)

    def make_impatient(session):
        session.begin = lambda prompt: session.draft(prompt[-1])

    each_session(drafter, make_impatient)
    with pytest.raises(UserError, match="begins with is a chain, or None"):
        generate(Target(llama), drafter, [5, 6, 7], max_new_tokens=5)


def test_any_of_several_eos_ids_ends_the_answer(llama):
    target, prompt = Target(llama), [5, 6, 7, 8, 5, 6]
    free = greedy(llama, prompt, 50)
    for eos in ({free[20], 60}, {free[0]}, {free[-1], free[33]}):
        end = next(i for i, t in enumerate(free) if t in eos)
        for label, drafter in (drafters(eos) | {"oracle": Oracle(free, 3)}).items():
            out = generate(target, drafter, prompt, max_new_tokens=50, eos=eos)
            assert out.tokens == free[: end + 1], label
            assert out.stop == "eos" and sum(out.accept_lengths) == end + 1
            if label == "vanilla":
                assert out.forwards == end + 1 and out.accept_lengths == [1] * (end + 1)


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_the_limit_is_never_passed(llama, limit):
    prompt = [5, 6, 7, 8]
    free = greedy(llama, prompt, 40)
    for label, drafter in (drafters() | {"oracle": Oracle(free, 4)}).items():
        out = generate(Target(llama), drafter, prompt, max_new_tokens=limit)
        assert out.tokens == free[:limit], label
        assert sum(out.accept_lengths) == limit and out.stop == "length"


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # gpt2: learned positions, a table that ends at the context
def test_the_context_ends_an_answer_with_a_reason(name):
    model = toy_model(name)
    prompt = [5, 6, 7, 8] * 60
    expected = greedy(model, prompt, 256 - 240)
    for label, drafter in drafters().items():
        out = generate(Target(model), drafter, prompt, max_new_tokens=100)
        assert out.tokens == expected, label
        assert out.stop == "context"


def test_a_prompt_or_limit_that_leaves_no_room_is_refused(llama):
    target, drafter = Target(llama), Vanilla(torch.device("cpu"))
    with pytest.raises(UserError, match="prompt of 256 tokens.*context 256"):
        generate(target, drafter, [5] * 256, max_new_tokens=4)
    with pytest.raises(UserError, match="prompt of 0 tokens"):
        generate(target, drafter, [], max_new_tokens=4)
    with pytest.raises(UserError, match="max_new_tokens=0"):
        generate(target, drafter, [5], max_new_tokens=0)


def test_models_that_cannot_take_back_tokens_are_refused_with_the_reason():
    small = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, intermediate_size=48)
    windowed = Auto.from_config(MistralConfig(**small, num_attention_heads=4, num_key_value_heads=2, sliding_window=64))
    with pytest.raises(UserError, match="sliding window of 64.*set the context to 64 or less"):
        Target(windowed)
    assert Target(windowed, context=64).context == 64
    with pytest.raises(UserError, match="recurrent state"):
        Target(Auto.from_config(MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2)))
    t5 = T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    with pytest.raises(UserError, match="encoder-decoder"):
        Target(AutoSeq2Seq.from_config(t5))
    flex = Auto.from_config(LlamaConfig(**small, num_attention_heads=4), attn_implementation="flex_attention")
    with pytest.raises(UserError, match="flex_attention.*sdpa"):
        Target(flex)
    with pytest.raises(UserError, match="context=9999 is more than the 256 positions"):
        Target(toy_model("llama"), context=9999)


def test_positions_that_change_with_the_longest_are_refused():
    """longrope takes other frequencies for a whole forward once one position, a draft's too, passes the threshold."""
    torch.manual_seed(0)
    rope = dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=16)
    rope |= dict(short_factor=[1.0] * 4, long_factor=[3.0, 1.5, 4.0, 2.0], factor=16.0)
    small = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=4)
    model = Auto.from_config(LlamaConfig(**small, max_position_embeddings=256, rope_parameters=rope)).eval()
    with pytest.raises(UserError, match="longrope.*passes 16 tokens.*set the context to 16 or less"):
        Target(model)
    target, prompt = Target(model, context=16), [5, 6, 7, 8, 9]
    free = greedy(model, prompt, 11)
    for label, drafter in (drafters() | {"oracle": Oracle(free, 3)}).items():  # drafts pass the end, and change nothing
        assert generate(target, drafter, prompt, max_new_tokens=40).tokens == free, label


def overflowing(model, token):
    """The model with one token whose states overflow float16 wherever it stands: keys and values become infinite."""
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.inf
    return model


@pytest.mark.parametrize("execution", ["eager", "static"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_draft_that_overflows_float16_harms_nobody(execution, kernel):
    """No mask silences an infinite state: in the same step its neighbours were lost, in static steps all later ones."""
    plain = toy_model("llama", dtype=torch.float16)
    plain.set_attn_implementation(kernel)
    prompt = [5, 6, 7, 8]
    expected = generate(Target(plain), Vanilla(torch.device("cpu")), prompt, max_new_tokens=24).tokens
    poison = next(token for token in range(3, 61) if token not in expected + prompt)

    class Poisoner(TokenRecycling):
        def grow(self, root):
            tokens = super().grow(root)
            tokens[1::2] = poison
            return tokens

    target = Target(overflowing(plain, poison))
    drafter = Poisoner(61, build_template("2.2.2"))
    for _ in range(2):  # the second prompt has another length, and what was rejected in the first lies in its bucket
        assert generate(target, drafter, prompt, max_new_tokens=24, execution=execution).tokens == expected
        assert (
            generate(target, Vanilla(torch.device("cpu")), prompt, max_new_tokens=24, execution=execution).tokens
            == expected
        )


def test_nothing_outlives_its_owner(llama):
    """No cycle keeps a cache, a drafter, a target or a model: two of them would lie in memory side by side."""
    gc.collect()
    gc.disable()
    try:
        for execution in ("eager", "static"):
            model = toy_model("llama")
            target, drafter = Target(model), TokenRecycling(61, build_template("2.2.2"))
            generate(target, drafter, [5, 6, 7], max_new_tokens=5, execution=execution)
            generate(target, NeedsHidden(torch.device("cpu")), [5, 6, 7], max_new_tokens=5, execution=execution)
            (held,) = target.caches._free
            cache, layer = weakref.ref(held), weakref.ref(held.layers[0])
            del held
            target.reserve(200)  # a larger one takes its place
            assert cache() is None and layer() is None
            things = (drafter, drafter.matrix.candidates, target, target.caches._free[0], model)
            watched = [weakref.ref(thing) for thing in things]
            del things
            del drafter, target, model
            assert [thing() for thing in watched] == [None] * 5, execution
    finally:
        gc.enable()


def resident() -> int:
    """Bytes of memory this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_memory_does_not_grow_over_200_prompts(llama):
    target, rng = Target(llama), random.Random(0)
    everyone = list(drafters().values())

    def answer(count):
        for i in range(count):
            prompt = [rng.randrange(3, 61) for _ in range(5 + i % 40)]
            generate(target, everyone[i % len(everyone)], prompt, max_new_tokens=12)

    answer(60)  # allocators, masks and tables settle
    before = resident()
    answer(200)
    assert resident() - before < 2 * 2**20
