"""The loop: what it refuses, yields, lends and leaves behind; its output is in test_contract."""

import copy
import gc
import random
import weakref
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import AutoModelForSeq2SeqLM as AutoSeq2Seq
from transformers import LlamaConfig, MambaConfig, T5Config

from model.engine import LAST, Draft, Needs, Target, Tree, decode, generate
from model.engine.batch import decode_batch
from model.engine.layers import mode_of
from model.engine.loop import Request, whole
from model.errors import UserError
from model.methods import make_method
from model.methods.eagle import Eagle
from model.methods.medusa import Medusa
from model.methods.spine import Spine
from model.methods.vanilla import Vanilla
from model.recycling import TokenRecycling, build_template
from tests.conftest import CONFIGS, greedy, toy_model
from tests.model.every_method import SETTINGS, Oracle, OracleSession, V, make, write_companions
from tests.model.families import toy
from tests.model.methods.heads import write_eagle, write_medusa
from tests.model.sessions import each_session


class NeedsHidden(Vanilla):
    needs = Needs(hidden=(0, LAST))


@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_are_transformers_own(name):
    """Of a prompt and of a draft's two paths, in any order; and no hook is left."""
    model, tokens = toy_model(name), [5, 9, 33, 12, 7]
    target, tree = Target(model), Tree([0, 0, 0, 1, 2])
    paths, numbers = ([5, 9, 33, 12, 8], [5, 9, 33, 13, 9]), (LAST, 0, 1)
    with torch.no_grad():
        states = [
            model(torch.tensor([path]), output_hidden_states=True).hidden_states for path in paths
        ]
    expected = [
        torch.cat([path_states[number][0] for number in numbers], -1) for path_states in states
    ]
    mode = mode_of(model)
    with target.cache(len(tree)) as cache:
        read = target.prefill(cache, tokens[:3], hidden=numbers).hidden
        drafted = target.forward(
            cache, Draft(tree, torch.tensor([33, 12, 13, 8, 9])), hidden=numbers
        ).hidden
    close = dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(read, expected[0][:2], **close)
    for path, nodes in zip(expected, ([0, 1, 3], [0, 2, 4]), strict=True):
        torch.testing.assert_close(drafted[nodes], path[2:], **close)
    assert mode_of(model) == mode, "hooks are as before"


def test_hidden_states_that_there_are_not_and_hooks_after_errors(monkeypatch):
    """And a list of layers that its owner replaced is looked up anew."""
    model = toy_model("llama")
    target, mode = Target(model), mode_of(model)
    for number in (-2, 2):
        drafter = Vanilla(target.device)
        drafter.needs = Needs(hidden=(0, number, LAST))
        with pytest.raises(
            UserError, match=rf"has no hidden state {number}; there are 0 to 1 and -1"
        ):
            generate(target, drafter, [5, 9], max_new_tokens=2)
    store, model.model.layers = target._store_hidden, copy.deepcopy(model.model.layers)
    generate(target, NeedsHidden(target.device), [5, 9], max_new_tokens=2)
    with monkeypatch.context() as patch, target.cache(1) as cache:
        patch.setattr(
            target,
            "_store_hidden",
            lambda states, number: store(states, number) if number else 1 / 0,
        )
        with pytest.raises(ZeroDivisionError):
            target.prefill(cache, [5, 9], hidden=(LAST, 0))
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: 1 / 0)
    with target.cache(1) as cache, pytest.raises(ZeroDivisionError):
        target.prefill(cache, [5, 9], hidden=(LAST, 0))
    assert mode_of(model) == mode


def test_what_a_drafter_begins_with_is_a_chain_or_nothing(llama):
    drafter = Oracle([5])

    def make_impatient(session):
        session.begin = lambda prompt: session.draft(prompt[-1])

    each_session(drafter, make_impatient)
    with pytest.raises(UserError, match="begins with is a chain, or None"):
        generate(Target(llama), drafter, [5, 6, 7], max_new_tokens=5)


def test_a_draft_larger_than_its_method_declares_is_refused_at_once(llama):
    """The run's last file had ended in a traceback, after all questions."""
    drafter = Oracle([5] * 40)
    drafter.max_nodes = 2
    with pytest.raises(UserError, match=r"Oracle: a draft of \d+ nodes is over its max_nodes"):
        generate(Target(llama), drafter, [5, 6, 7], max_new_tokens=20)


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
    # its scan forgets the state
    with pytest.raises(UserError, match="drafts would change what the model says"):
        Target(Auto.from_config(MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2)))
    t5 = T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    with pytest.raises(UserError, match="encoder-decoder"):
        Target(AutoSeq2Seq.from_config(t5))
    flex = Auto.from_config(
        LlamaConfig(**small, num_attention_heads=4), attn_implementation="flex_attention"
    )
    with pytest.raises(UserError, match="flex_attention.*sdpa"):
        Target(flex)
    with pytest.raises(UserError, match="context=9999 is more than the 256 positions"):
        Target(toy_model("llama"), context=9999)


def test_positions_that_change_with_the_longest_are_refused():
    """longrope takes other frequencies for a whole forward once one position, a draft's too, passes the threshold."""
    torch.manual_seed(0)
    rope = dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=16)
    rope |= dict(short_factor=[1.0] * 4, long_factor=[3.0, 1.5, 4.0, 2.0], factor=16.0)
    small = dict(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=4,
    )
    model = Auto.from_config(
        LlamaConfig(**small, max_position_embeddings=256, rope_parameters=rope)
    ).eval()
    with pytest.raises(
        UserError, match="longrope.*passes 16 tokens.*set the context to 16 or less"
    ):
        Target(model)
    target, prompt = Target(model, context=16), [5, 6, 7, 8, 9]
    free = greedy(model, prompt, 11)
    # drafts pass the end
    for drafter in (
        TokenRecycling(V, build_template("2.2.2")),
        Oracle(free, 3),
    ):
        assert generate(target, drafter, prompt, max_new_tokens=40).tokens == free


def overflowing(model, *tokens, by=torch.inf):
    """The model with tokens whose states overflow wherever they stand: keys and values are infinite or NaN."""
    with torch.no_grad():
        model.get_input_embeddings().weight[[*tokens]] = by
    return model


@pytest.mark.parametrize("execution", ["eager", "static"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_draft_that_overflows_harms_nobody(execution, kernel, dtype):
    """No mask silences an infinite state: in the same step its neighbours were lost, in static steps all later ones."""
    plain = toy_model("llama", dtype=dtype)
    plain.set_attn_implementation(kernel)
    prompt = [5, 6, 7, 8]
    expected = generate(
        Target(plain), Vanilla(torch.device("cpu")), prompt, max_new_tokens=16
    ).tokens
    poison = next(token for token in range(3, 61) if token not in expected + prompt)

    class Poisoner(TokenRecycling):
        def grow(self, root):
            tokens = super().grow(root)
            tokens[1::2] = poison
            return tokens

    target = Target(overflowing(plain, poison))
    drafter = Poisoner(61, build_template("2.2.2"))
    # the second prompt has another length, and what was rejected in the first lies in its bucket
    for _ in range(2):
        assert (
            generate(target, drafter, prompt, max_new_tokens=16, execution=execution).tokens
            == expected
        )
        assert (
            generate(
                target, Vanilla(torch.device("cpu")), prompt, max_new_tokens=16, execution=execution
            ).tokens
            == expected
        )


UNTRAINED = [name for name in SETTINGS if name not in ("rest", "samd")]
TEXTS = [[5, 6, 7, 8, 5, 6, 7], [9, 11, 13, 9, 11, 13, 9], [20, 21, 22, 20, 21, 22]]


def answers(target, drafter, execution, batch=0):
    """Of TEXTS twice: one by one, or in batches, the second of which gets the columns of the first."""
    settings = dict(max_new_tokens=24, execution=execution)
    if not batch:
        return [
            [generate(target, drafter, text, reuse=True, **settings).tokens for text in TEXTS]
            for _ in range(2)
        ]
    asked = [(text, Request(**settings)) for text in TEXTS]
    return [
        [out.tokens for out in whole(decode_batch(target, drafter, asked, batch))] for _ in range(2)
    ]


@pytest.fixture(scope="module")
def silent(tmp_path_factory):
    """A model with NaN states of all tokens that it never says, its answers to TEXTS, and companions without NaN."""
    model = toy_model("llama-grouped")
    expected = [greedy(model, text, 24) for text in TEXTS]
    companions = write_companions(model, tmp_path_factory.mktemp("companions"))
    said = {token for text in (*expected, *TEXTS) for token in text}
    overflowing(model, *(token for token in range(3, V) if token not in said), by=torch.nan)
    return model, expected, companions


@pytest.mark.parametrize("execution", ["eager", "static"])
@pytest.mark.parametrize("method", UNTRAINED)
def test_tokens_that_are_never_said_and_have_nan_states_change_no_text(method, execution, silent):
    """Each method drafts them, in the same forward as the text's own; and learns from their rows."""
    model, expected, companions = silent
    for batch in (0, 3):
        target = Target(model)
        assert answers(target, make(method, target, companions), execution, batch) == [
            expected,
            expected,
        ]


@cache
def overflown(token):
    """A model that overflows in the second text, its answers, a text that goes on from there, and its answer."""
    model = toy_model("llama-grouped")
    healthy = [greedy(model, text, 24) for text in TEXTS]
    overflowing(model, token, by=torch.nan)
    expected = [greedy(model, text, 24) for text in TEXTS]
    assert (
        expected[1][-9:] == [0] * 9 and healthy[1] != expected[1] and healthy[::2] == expected[::2]
    )
    continued = [*TEXTS[1], *expected[1], 5, 6]
    return model, expected, continued, greedy(model, continued, 6)


@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("execution", ["eager", "static"])
@pytest.mark.parametrize("method", ["vanilla", "pld", "recycling", "dynamic"])
def test_a_model_that_overflows_on_its_own_text_says_what_generate_says(method, execution, batch):
    """Zeros from there on: the token is in the second prompt, or in its answer. Other texts are as they were."""
    for token in (13, 46):
        model, expected, continued, after = overflown(token)
        target = Target(model)
        drafter = make(method, target, {})
        assert answers(target, drafter, execution, batch) == [expected, expected]
        settings = dict(execution=execution, reuse=True)
        decoded = generate(target, Oracle(expected[1], 3), TEXTS[1], max_new_tokens=24, **settings)
        assert decoded.tokens == expected[1], "a draft holds the token and zeros after it"
        assert (
            generate(target, drafter, TEXTS[1], max_new_tokens=24, **settings).tokens == expected[1]
        )
        out = generate(target, drafter, continued, max_new_tokens=6, **settings)
        assert out.tokens == after, "nothing is kept of what overflowed"


def test_a_text_that_begins_with_a_token_without_an_embedding_is_no_overflow():
    """Its keys are zeros in all layers."""
    model = overflowing(toy_model("llama-grouped"), 0, by=0.0)
    for prompt in ([0], [0, 0, 5, 6]):
        drafter = TokenRecycling(V, build_template("2.2.2"))
        assert generate(Target(model), drafter, prompt, max_new_tokens=30).tokens == greedy(
            model, prompt, 30
        )


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_a_nan_of_a_draft_does_not_reach_a_recurrent_models_root(family):
    """Scans in chunks multiply what a token does not see by zero; hidden states and what is read later are right."""
    model, prompt = toy(family), [5, 6, 7, 5, 6, 7]
    expected, drafted = greedy(model, prompt, 24), []
    poison = next(token for token in range(3, V) if token not in expected + prompt)
    overflowing(model, poison, by=torch.nan)

    class Poisoner(OracleSession):
        def draft(self, root):
            tokens = [root, *self.answer[self.at :][: self.at % 3], poison, 7]
            drafted.append(len(tokens))
            return Draft(Tree.chain(len(tokens) - 1), torch.tensor(tokens))

        def observe(self, verification):
            super().observe(verification)
            hidden = verification.hidden[: len(verification.tokens)]
            assert hidden.isfinite().all() and len(verification.hidden) == drafted[-1]

    drafter = Oracle(expected)
    drafter.needs, drafter.session = Needs(hidden=(LAST,)), lambda: Poisoner(drafter)
    assert (
        generate(Target(model), drafter, prompt, max_new_tokens=24).tokens == expected
        and len(drafted) > 8
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
            generate(
                target,
                NeedsHidden(torch.device("cpu")),
                [5, 6, 7],
                max_new_tokens=5,
                execution=execution,
            )
            buffer = weakref.ref(target.caches._free[0]._buffers[0])
            target.reserve(200)  # a larger one takes its place
            assert buffer() is None
            things = (drafter, drafter.matrix.candidates, target, target.caches._free[0], model)
            watched = [weakref.ref(thing) for thing in things]
            del things
            del drafter, target, model
            assert [thing() for thing in watched] == [None] * 5, execution
    finally:
        gc.enable()


def test_a_step_is_yielded_as_soon_as_it_is_known_and_gives_the_whole_answer(llama):
    target, prompt = Target(llama), [5, 6, 7, 5, 6, 7]
    drafter = TokenRecycling(V, build_template("2.2.2"))
    whole = generate(target, drafter, prompt, max_new_tokens=40)
    drafter.reset()
    steps, yielded = decode(target, drafter.session(), prompt, max_new_tokens=40), []
    while True:
        try:
            yielded.append(next(steps))
        except StopIteration as end:
            out = end.value
            break
        assert not torch.is_inference_mode_enabled(), (
            "what is done between two steps is the consumer's own"
        )
    assert yielded == out.steps == whole.steps and (out.tokens, out.stop) == (
        whole.tokens,
        whole.stop,
    )
    assert [len(step.tokens) for step in yielded] == out.accept_lengths
    assert out.ends_s == sorted(out.ends_s) and len(out.ends_s) == len(out.steps)
    assert out.ends_s[0] == out.prefill_s and out.ends_s[-1] <= out.prefill_s + out.decode_s


def test_a_hook_is_on_within_a_step_only(llama, tmp_path):
    """An abandoned answer is closed whenever its garbage is collected, be it within another one's step."""
    target, prompt = Target(llama), [5, 6, 7, 5, 6]
    eagle = Eagle(target, head_path=write_eagle(tmp_path, llama))
    abandoned = decode(target, eagle.session(), [9, 8, 7], max_new_tokens=30)
    next(abandoned)
    assert not llama.get_decoder()._forward_hooks

    def abandon(session):
        # within the first step of the other
        session.observe_prompt_hidden = lambda *_: abandoned.close()

    expected = generate(target, eagle, prompt, max_new_tokens=30).steps
    drafter = Medusa(target, heads_path=write_medusa(tmp_path / "medusa", llama))
    each_session(drafter, abandon)
    assert generate(target, drafter, prompt, max_new_tokens=30).tokens == greedy(llama, prompt, 30)
    assert (
        generate(target, eagle, prompt, max_new_tokens=30).steps == expected
        and not llama.get_decoder()._forward_hooks
    )


def test_an_answer_that_nobody_reads_on_or_that_fails_gives_back_what_it_borrowed(llama):
    target, spine = Target(llama), Spine(V, nodes=12)
    steps = decode(target, spine.session(), [5, 6, 7], max_new_tokens=40)
    first = next(steps)
    steps.close()
    assert len(target.caches._free) == 1 and spine.history.borrowed_length is None
    assert spine.history.text.tokens == [5, 6, 7, *first.tokens]

    def fail(session):
        account, count = session.account, iter(range(3))

        def failing(verification):
            if next(count, None) is None:
                raise KeyboardInterrupt
            account(verification)

        session.account = failing

    each_session(spine, fail)
    with pytest.raises(KeyboardInterrupt):
        generate(target, spine, [5, 6, 7], max_new_tokens=40)
    assert spine.history.borrowed_length is None and len(target.caches._free) == 1
    with pytest.raises(UserError, match="max_new_tokens=0"):
        generate(target, spine, [5], max_new_tokens=0)


def test_caches_of_two_sizes_both_stay(llama):
    target = Target(llama)
    with target.cache(80) as large, target.cache(2) as small:
        pass
    for nodes, expected in ((2, small), (80, large), (2, small)):
        with target.cache(nodes) as cache:
            assert cache is expected or (nodes == 2 and cache is large)
    assert {id(cache) for cache in target.caches._free} == {id(large), id(small)}


def test_a_method_that_learns_a_prompt_anew_gets_all_of_it(llama):
    """A kept beginning is not forwarded again, and would be missing from what it learns."""
    target, drafter, learnt = Target(llama), Vanilla(torch.device("cpu")), []
    drafter.needs = Needs(prompt_logits=True)
    each_session(
        drafter,
        lambda session: setattr(
            session, "observe_prompt", lambda prompt, start, _: learnt.append(prompt[start:])
        ),
    )
    for _ in range(2):
        whole(decode(target, drafter.session(), [5, 6, 7, 8, 9], max_new_tokens=4, reuse=True))
    assert learnt == [[5, 6, 7, 8, 9]] * 2


READERS = {
    "dynamic": {"nodes": 12},
    "recycling": {"recycle_prompt": True, "nodes": 12},
    "racer": {},
    "goose": {},
}


@pytest.mark.parametrize("method", READERS)
@pytest.mark.parametrize("parts", [1, 3, 7])
def test_a_prompt_in_parts_is_learnt_as_a_whole_one(method, parts, llama, monkeypatch):
    """No more of a prompt's logits are held than LOGITS_BYTES, however long it is."""
    prompt, held, outs = [random.Random(3).randrange(3, 61) for _ in range(40)], [], []
    for size in (1 << 20, parts):
        monkeypatch.setattr("model.engine.target.LOGITS_BYTES", size * V * 4)
        target = Target(llama)
        drafter = make_method(method, target, **READERS[method])

        def note(session):
            observe_prompt = session.observe_prompt
            session.observe_prompt = lambda *args: (
                held.append(len(args[2])),
                observe_prompt(*args),
            )

        each_session(drafter, note)
        outs.append(
            [generate(target, drafter, prompt[i:], max_new_tokens=20).steps for i in (0, 3)]
        )
    assert outs[0] == outs[1] and len(held) > 20 / parts and max(held[2:]) == parts


def test_a_gpu_reads_a_prompt_in_larger_parts(llama, monkeypatch):
    """Each of them takes a forward, which reads all weights."""

    class Gpu(str):
        type = "cuda"

    target, read = Target(llama), []
    monkeypatch.setattr("model.engine.target.LOGITS_BYTES", 3 * V * 4)
    for device in (torch.device("cpu"), Gpu("cpu")):
        target.device = device
        with target.cache(8) as cache:
            target.prefill(
                cache,
                list(range(3, 43)),
                rows=40,
                read=lambda start, logits: read.append(len(logits)),
            )
    assert read == [3] * 13 + [39]
