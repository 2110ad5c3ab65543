"""The loop: what it refuses, yields, lends and leaves behind; its output is in test_contract."""

import gc
import random
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import LlamaConfig

from model.engine import LAST, Draft, Needs, Request, Target, Tree, decode, exhaust, generate
from model.engine.attention.layers import mode_of
from model.engine.loop.batch import decode_batch
from model.errors import UserError
from model.methods import make_method
from model.methods.copying.suffix import Suffix
from model.methods.vanilla import Vanilla
from model.recycling import TokenRecycling, build_template
from tests.conftest import NARROW, SIZES, greedy, toy_model
from tests.model.every_method import Oracle, V, make
from tests.model.methods.heads import write_eagle
from tests.model.sessions import each_session


@pytest.mark.parametrize("name", ["llama-grouped", "gemma2", "gpt2", "gpt-neox"])
def test_hidden_states_are_transformers_own(name):
    """Of a prompt and of a draft's two paths, in any order; and no hook is left."""
    model = toy_model(name)
    target = Target(model)
    tree = Tree([0, 0, 0, 1, 2])
    numbers = (LAST, 0, 1)
    expected = []
    for path in ([5, 9, 33, 12, 8], [5, 9, 33, 13, 9]):
        with torch.no_grad():
            states = model(torch.tensor([path]), output_hidden_states=True).hidden_states
        expected.append(torch.cat([states[number][0] for number in numbers], -1))
    mode = mode_of(model)
    with target.cache(len(tree)) as cache:
        read = target.prefill(cache, [5, 9, 33], hidden=numbers).hidden
        drafted = target.forward(
            cache, Draft(tree, torch.tensor([33, 12, 13, 8, 9])), hidden=numbers
        ).hidden
    close = dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(read, expected[0][:2], **close)
    for path, nodes in zip(expected, ([0, 1, 3], [0, 2, 4]), strict=True):
        torch.testing.assert_close(drafted[nodes], path[2:], **close)
    assert mode_of(model) == mode, "hooks are as before"


def test_hidden_states_that_there_are_not_are_refused():
    target = Target(toy_model("llama"))
    for number in (-2, 2):
        drafter = Vanilla(target.device)
        drafter.needs = Needs(hidden=(0, number, LAST))
        with pytest.raises(UserError, match=f"has no hidden state {number}; there are 0 to 1"):
            generate(target, drafter, [5, 9], max_new_tokens=2)


def test_a_draft_that_does_not_fit_is_refused(llama):
    drafter = Oracle([5] * 40)
    drafter.max_nodes = 2
    with pytest.raises(UserError, match=r"Oracle: a draft of \d+ nodes is over its max_nodes"):
        generate(Target(llama), drafter, [5, 6, 7], max_new_tokens=20)

    def make_impatient(session):
        session.begin = lambda prompt: session.draft(prompt[-1])

    each_session(drafter, make_impatient)
    with pytest.raises(UserError, match="begins with is a chain, or None"):
        generate(Target(llama), drafter, [5, 6, 7], max_new_tokens=5)
    with pytest.raises(UserError, match="prompt of 256 tokens.*context 256"):
        generate(Target(llama), drafter, [5] * 256, max_new_tokens=4)


def test_positions_that_change_with_the_longest_are_refused():
    """longrope takes other frequencies for a whole forward once one position, a draft's too, passes the threshold."""
    torch.manual_seed(0)
    rope = dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=16)
    rope |= dict(short_factor=[1.0] * 4, long_factor=[3.0, 1.5, 4.0, 2.0], factor=16.0)
    model = Auto.from_config(LlamaConfig(**SIZES, **NARROW, rope_parameters=rope)).eval()
    with pytest.raises(
        UserError, match="longrope.*passes 16 tokens.*set the context to 16 or less"
    ):
        Target(model)
    target = Target(model, context=16)
    prompt = [5, 6, 7, 8, 9]
    free = greedy(model, prompt, 11)
    # drafts pass the end
    for drafter in (TokenRecycling(V, build_template("2.2.2")), Oracle(free, 3)):
        assert generate(target, drafter, prompt, max_new_tokens=40).tokens == free


TEXTS = [[5, 6, 7, 8, 5, 6, 7], [9, 11, 13, 9, 11, 13, 9], [20, 21, 22, 20, 21, 22]]


def answers(target, drafter, execution, batch=0):
    """Of TEXTS twice: one by one, or in batches, the second of which gets the columns of the first."""
    settings = dict(max_new_tokens=12, execution=execution)
    if not batch:
        return [
            [generate(target, drafter, text, reuse=True, **settings).tokens for text in TEXTS]
            for _ in range(2)
        ]
    asked = [(text, Request(**settings)) for text in TEXTS]
    return [
        [out.tokens for out in exhaust(decode_batch(target, drafter, asked, batch))]
        for _ in range(2)
    ]


@pytest.fixture(scope="module")
def silent(tmp_path_factory):
    """A model with NaN states of all tokens that it never says, its answers to TEXTS, and a head without NaN."""
    model = toy_model("llama-grouped")
    expected = [greedy(model, text, 12) for text in TEXTS]
    head = write_eagle(tmp_path_factory.mktemp("eagle"), model)
    said = {token for text in (*expected, *TEXTS) for token in text}
    silent = [token for token in range(3, V) if token not in said]
    with torch.no_grad():
        model.get_input_embeddings().weight[silent] = torch.nan
    return model, expected, {"eagle": {"head_path": head}}


# A whole static step, static forwards, masks of its own, and a head's own attention.
@pytest.mark.parametrize(
    "method, execution",
    [("recycling", "static"), ("dynamic", "static"), ("lookahead", "eager"), ("eagle", "eager")],
)
def test_tokens_that_are_never_said_and_have_nan_states_change_no_text(method, execution, silent):
    """Each method drafts them, in the same forward as the text's own; and learns from their rows."""
    model, expected, companions = silent
    for batch in (0, 3):
        target = Target(model)
        drafter = make(method, target, companions)
        assert answers(target, drafter, execution, batch) == [expected, expected]


@pytest.mark.parametrize("execution", ["eager", "static"])
def test_nothing_outlives_its_owner(execution):
    """No cycle keeps a cache, a drafter, a target or a model, which would fill a GPU's memory."""
    gc.collect()
    gc.disable()
    try:
        model = toy_model("llama")
        target = Target(model)
        drafter = TokenRecycling(61, build_template("2.2.2"))
        settings = dict(max_new_tokens=5, execution=execution)
        generate(target, drafter, [5, 6, 7], **settings)
        exhaust(decode_batch(target, drafter, [([5, 6], Request(**settings))], 2))
        buffer = weakref.ref(target.caches._free[0]._buffers[0])
        target.reserve(200)  # a larger one takes its place
        assert buffer() is None
        watched = [weakref.ref(thing) for thing in (drafter, target, model)]
        del drafter, target, model
        assert [thing() for thing in watched] == [None] * 3
    finally:
        gc.enable()


def test_a_step_is_yielded_as_soon_as_it_is_known_and_gives_the_whole_answer(llama):
    target = Target(llama)
    drafter = TokenRecycling(V, build_template("2.2.2"))
    expected = generate(target, drafter, [5, 6, 7, 5, 6, 7], max_new_tokens=40)
    drafter.reset()
    yielded = []

    def seen(step):
        yielded.append(step)
        assert not torch.is_inference_mode_enabled(), "the time between steps is the consumer's"

    steps = decode(target, drafter.session(), [5, 6, 7, 5, 6, 7], max_new_tokens=40)
    out = exhaust(steps, seen)
    assert yielded == out.steps == expected.steps
    assert (out.tokens, out.stop) == (expected.tokens, expected.stop)
    assert out.ends_s == sorted(out.ends_s) and len(out.ends_s) == len(out.steps)
    assert out.ends_s[0] == out.prefill_s and out.ends_s[-1] <= out.prefill_s + out.decode_s


def test_an_answer_that_nobody_reads_on_or_that_fails_gives_back_what_it_borrowed(llama):
    target = Target(llama)
    drafter = Suffix(V, max_draft=12, history_tokens=4096)
    steps = decode(target, drafter.session(), [5, 6, 7], max_new_tokens=40)
    first = next(steps)
    steps.close()
    assert len(target.caches._free) == 1 and drafter.history.borrowed_length is None
    assert drafter.history.text.tokens == [5, 6, 7, *first.tokens]

    def fail(session):
        account = session.account
        count = iter(range(3))

        def failing(verification):
            if next(count, None) is None:
                raise KeyboardInterrupt
            account(verification)

        session.account = failing

    each_session(drafter, fail)
    with pytest.raises(KeyboardInterrupt):
        generate(target, drafter, [5, 6, 7], max_new_tokens=40)
    assert drafter.history.borrowed_length is None and len(target.caches._free) == 1
    with pytest.raises(UserError, match="max_new_tokens=0"):
        generate(target, drafter, [5], max_new_tokens=0)


def test_a_method_that_learns_a_prompt_anew_gets_all_of_it(llama):
    """A kept beginning is not forwarded again, and would be missing from what it learns."""
    target = Target(llama)
    drafter = Vanilla(torch.device("cpu"))
    learnt = []
    drafter.needs = Needs(prompt_logits=True)
    each_session(
        drafter,
        lambda session: setattr(
            session, "observe_prompt", lambda prompt, start, _: learnt.append(prompt[start:])
        ),
    )
    for _ in range(2):
        exhaust(decode(target, drafter.session(), [5, 6, 7, 8, 9], max_new_tokens=4, reuse=True))
    assert learnt == [[5, 6, 7, 8, 9]] * 2


@pytest.mark.parametrize(("method", "parts"), [("dynamic", 1), ("recycling", 7)])
def test_a_prompt_in_parts_is_learnt_as_a_whole_one(method, parts, llama, monkeypatch):
    """No more of a prompt's logits are held than LOGITS_BYTES, however long it is."""
    prompt = [random.Random(3).randrange(3, 61) for _ in range(40)]
    held = []
    outs = []
    settings = {"recycle_prompt": True} if method == "recycling" else {}
    for size in (1 << 20, parts):
        monkeypatch.setattr("model.engine.target.target.LOGITS_BYTES", size * V * 4)
        target = Target(llama)
        drafter = make_method(method, target, nodes=12, **settings)

        def note(session):
            observe_prompt = session.observe_prompt

            def noted(prompt, start, logits):
                held.append(len(logits))
                observe_prompt(prompt, start, logits)

            session.observe_prompt = noted

        each_session(drafter, note)
        outs.append(generate(target, drafter, prompt, max_new_tokens=20).steps)
    assert outs[0] == outs[1] and len(held) > 20 / parts and max(held[1:]) == parts
