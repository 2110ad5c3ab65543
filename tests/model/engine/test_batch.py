"""Batches: each text is that of its sequence alone, whoever else is in the batch."""

import gc
import random
import time
import weakref
from dataclasses import replace
from functools import cache, partial
from itertools import count

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import BambaConfig, DogeConfig, GPTNeoConfig

from model.engine import Drafter, Target, generate
from model.engine.batch import ROOM, SharedCache, check_batch, decode_batch
from model.engine.loop import Request
from model.engine.sampling import Sampling
from model.engine.sight import LENGTH
from model.engine.static_step import StaticForward
from model.errors import UserError
from model.methods import make_method
from model.methods.vanilla import Vanilla
from model.tuning import choose_linear
from tests.conftest import CONFIGS, NARROW, SIZES, greedy, sharpened, toy_model
from tests.model.engine.fake_graphs import FakeGraphs
from tests.model.every_method import SETTINGS, Oracle, OracleSession, V, make, write_companions
from tests.model.sessions import comparable
from tests.model.test_layers import STATES, WINDOWED

LENGTHS = (1, 2, 5, 30, 17, 1, 60, 9, 23, 12, 40)


@cache
def model():
    return toy_model("llama-grouped")


@cache
def prompts():
    """More of them than a batch takes, of different lengths; two are equal, and some hold their own answers."""
    rng = random.Random(1)
    texts = [[rng.randrange(3, V) for _ in range(length)] for length in LENGTHS]
    return [*texts[:-2], texts[3] + greedy(model(), texts[3], 20) + texts[3], texts[4]]


@cache
def longest(prompt):
    return greedy(model(), list(prompt), 50)


@pytest.fixture(scope="module")
def companions(tmp_path_factory):
    return write_companions(model(), tmp_path_factory.mktemp("companions"))


def ended(steps):
    """All answers of a batch; what was yielded are their steps, in order."""
    seen = {}
    while True:
        try:
            number, out = next(steps)
        except StopIteration as end:
            assert [len(out.steps) for out in end.value] == [
                seen[number] for number in range(len(end.value))
            ]
            return end.value
        seen[number] = seen.get(number, 0) + 1
        assert len(out.steps) == len(out.ends_s) == seen[number] and out.ends_s == sorted(
            out.ends_s
        )


def together(target, drafter, size, asked):
    return ended(decode_batch(target, drafter, asked, size))


def cut(text, limit, eos=()):
    text = text[:limit]
    return text[: next((i + 1 for i, token in enumerate(text) if token in eos), limit)]


def mixed(count, rng, execution="eager"):
    """Requests of different limits, and ends of answers at different steps."""
    how = {"eos": {*rng.sample(range(3, V), 2)}, "execution": execution}
    return [Request(max_new_tokens=rng.choice([1, 2, 7, 24, 40]), **how) for _ in range(count)]


@pytest.mark.parametrize("sizes", [(3,), pytest.param((2, 8), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_texts_of_every_method(name, sizes, companions):
    """Answers end by a token, at their limits and at the context's end; the queue is longer than the batch."""
    rng, target = random.Random(name), Target(model(), context=100)
    for size in sizes:
        requests = mixed(len(prompts()), rng)
        drafter = make(name, target, companions, eos=requests[0].eos)
        expected = [
            cut(longest(tuple(prompt)), min(request.max_new_tokens, 100 - len(prompt)), request.eos)
            for prompt, request in zip(prompts(), requests, strict=True)
        ]
        # the second is hot: what is drafted goes past the end
        for execution in (
            "eager",
            "static",
        ):
            requests = [replace(request, execution=execution) for request in requests]
            outs = together(target, drafter, size, zip(prompts(), requests, strict=True))
            assert [out.tokens for out in outs] == expected
            for out, prompt, request in zip(outs, prompts(), requests, strict=True):
                assert sum(out.accept_lengths) == len(out.tokens)
                left = request.max_new_tokens - len(out.tokens)
                full = "length" if not left else "context"
                assert out.stop == ("eos" if out.tokens[-1] in request.eos else full)
                assert out.forwards - len(out.steps) in (0, len(prompt) > 1)


@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_texts_of_every_method(name, companions):
    """Each sequence has its own seed; one reads its text, and one is greedy."""
    target = Target(model())
    ways = [Sampling(temperature=0.8, top_p=0.9, seed=seed) for seed in range(4)]
    ways += [Sampling(temperature=1.0, repetition_penalty=1.2, seed=7), Sampling()]
    expected = [
        plain_sampling(tuple(prompt), way) for prompt, way in zip(prompts()[2:], ways, strict=False)
    ]
    for size, execution in ((3, "eager"), (6, "static")):
        requests = [
            Request(max_new_tokens=20, sampling=sampling, execution=execution) for sampling in ways
        ]
        outs = together(
            target, make(name, target, companions), size, zip(prompts()[2:], requests, strict=False)
        )
        assert [out.tokens for out in outs] == expected


@cache
def plain_sampling(prompt, sampling):
    target = Target(model())
    return generate(
        target, Vanilla(target.device), list(prompt), max_new_tokens=20, sampling=sampling
    ).tokens


def test_shares_of_a_batch_add_up_to_the_whole(monkeypatch):
    """By a clock that moves by one at each reading; each forward of several sequences is one of their steps."""
    ticks, target, forwards = count(), Target(model()), []
    drafter = make("recycling", target, {})
    together(target, drafter, 2, [([5], Request(max_new_tokens=2))])  # the trial, by another clock
    monkeypatch.setattr("model.engine.batch.time.perf_counter", lambda: float(next(ticks)))
    forward = SharedCache.forward
    monkeypatch.setattr(
        SharedCache,
        "forward",
        lambda *given, **how: forwards.append(len(given[2])) or forward(*given, **how),
    )
    requests = [Request(max_new_tokens=limit) for limit in (3, 9, 5)]
    outs = together(target, drafter, 2, zip(prompts(), requests, strict=False))
    steps = [step.batch for out in outs for step in out.steps]
    assert (
        sum(1 / size for size in steps) == pytest.approx(len(forwards))
        and max(forwards) == max(steps) == 2
    )
    # a step reads the clock when it begins, after each of its sequences, and at its end; a beginning at both ends
    spent = sum(size + 1 for size in forwards) + len(outs)
    assert sum(out.prefill_s + out.decode_s for out in outs) == pytest.approx(spent)
    assert all(out.prefill_s > 1 and out.decode_s > 0 for out in outs)


def read(texts, ids, scores):
    texts.append(ids[0].tolist())
    return scores


def end_at(texts, length, text):
    texts.append(text)
    return len(text) >= length


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_repeats_and_processors_and_criteria_are_asked_once_a_token(name, companions):
    target, runs = Target(model()), []
    for _ in range(2):
        requests, texts, asked = [], {}, {}
        for i, prompt in enumerate(prompts()):
            texts[i], asked[i] = [], []
            reads = partial(read, texts[i])
            ends = partial(end_at, asked[i], len(prompt) + 3 + i)
            requests.append(
                Request(max_new_tokens=9, sampling=Sampling(processors=(reads,)), ends=ends)
            )
        drafter = make(name, target, companions)
        outs = together(target, drafter, 3, zip(prompts(), requests, strict=True))
        runs.append(([out.steps for out in outs], comparable(drafter.state_dict())))
        for i, (prompt, out) in enumerate(zip(prompts(), outs, strict=True)):
            expected = list(longest(tuple(prompt))[: min(9, 3 + i)])
            assert out.tokens == expected and out.stop == ("stop" if i <= 6 else "length")
            assert texts[i] == [prompt + expected[:count] for count in range(len(expected))]
            assert asked[i] == [*texts[i][1:], prompt + expected]
    assert runs[0] == runs[1]


class Oracles(Drafter):
    """Knows some of each answer and drafts it on a random path of a random tree."""

    max_nodes = 31

    def __init__(self, answers, seed=0):
        super().__init__(torch.device("cpu"))
        self.answers, self.rng = answers, random.Random(seed)

    def session(self):
        return OraclesSession(Oracle([], seed=self.rng.random()), self)


class OraclesSession(OracleSession):
    def __init__(self, method, oracles):
        super().__init__(method)
        self.oracles = oracles

    def begin(self, prompt):
        self.answer = self.oracles.answers[tuple(prompt)] + [3] * 60


@pytest.fixture
def columns(monkeypatch):
    """Before each forward, all that no sequence may see is NaN: whatever is read of it is in a text."""
    forward = SharedCache.forward

    def poisoned(shared, target, drafts, *more, **how):
        # a soft cap goes to sdpa with a mask (transformers 5.17), which multiplies what is hidden by 0
        capped = getattr(target.model.config, "attn_logit_softcapping", None)
        if target.attends_by_table and capped is None:
            for buffer in shared.cache._buffers:
                of_each = buffer.unflatten(2, (shared.cache.stretches, -1))
                for at, length in enumerate(shared.lengths):
                    of_each[:, :, at, length if at in drafts else 0 :] = float("nan")
        return forward(shared, target, drafts, *more, **how)

    monkeypatch.setattr(SharedCache, "forward", poisoned)
    monkeypatch.setattr("model.engine.batch.check_batch", lambda *trial: None)


@pytest.mark.parametrize("sizes", [(2, 3), pytest.param((2, 3, 8), marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", [*CONFIGS, *(f"windowed {name}" for name in WINDOWED)])
def test_every_architecture(architecture, sizes, columns):
    """Also where the context ends, and where windows and chunks do."""
    windowed = architecture.removeprefix("windowed ")
    torch.manual_seed(0)
    of = (
        toy_model(architecture)
        if architecture in CONFIGS
        else sharpened(Auto.from_config(WINDOWED[windowed]).eval())
    )
    rng, target = random.Random(1), Target(of)
    texts = [
        [7],
        [5, 6, 7, 8] * 60,
        *([rng.randrange(3, V) for _ in range(length)] for length in (20, 3, 33)),
    ]
    answers = {tuple(text): greedy(of, text, min(30, 256 - len(text))) for text in texts}
    names = ("vanilla", "recycling", "dynamic") if 8 in sizes else ("recycling",)
    drafters = {name: make(name, target, {}) for name in names}
    for size in sizes:
        for name, drafter in (drafters | {"oracle": Oracles(answers, size)}).items():
            request = Request(max_new_tokens=30, execution="static" if size == 3 else "eager")
            outs = together(target, drafter, size, [(text, request) for text in texts])
            assert [out.tokens for out in outs] == list(answers.values()), name
            assert outs[1].stop == "context"
    assert max(len(out.steps) for out in outs) < 16, "the oracle must get paths accepted"


def fuzz(count, seed):
    rng, target = random.Random(seed), Target(model(), context=120)
    texts = {tuple(prompt): longest(tuple(prompt)) for prompt in prompts()}
    companionless = [
        "vanilla",
        "recycling",
        "dynamic",
        "suffix",
        "suffix_recycling",
        "spine",
        "pld",
        "lookahead",
    ]
    for _ in range(count):
        asked = [rng.choice(prompts()) for _ in range(rng.randrange(1, 9))]
        requests = mixed(len(asked), rng, rng.choice(["eager", "static"]))
        kind = rng.choice([*companionless, "oracles", "oracles"])
        drafter = Oracles(texts, rng.random()) if kind == "oracles" else drawn(kind, target, rng)
        outs = together(target, drafter, rng.randrange(1, 6), zip(asked, requests, strict=True))
        for out, prompt, request in zip(outs, asked, requests, strict=True):
            expected = cut(
                texts[tuple(prompt)], min(request.max_new_tokens, 120 - len(prompt)), request.eos
            )
            assert out.tokens == expected and sum(out.accept_lengths) == len(out.tokens)


def drawn(kind, target, rng):
    """A drafter; sometimes the size of its drafts is learnt while decoding."""
    by_auto = kind in ("recycling", "dynamic", "spine") and rng.random() < 0.4
    return make_method(kind, target, nodes="auto:16") if by_auto else make(kind, target, {})


def test_fuzzed_batches(columns):
    fuzz(25, 0)


@pytest.mark.slow
def test_many_fuzzed_batches(columns):
    fuzz(1000, 1)


@pytest.mark.parametrize("by_table", [True, False])
@pytest.mark.parametrize(
    "wrong",
    ["one column less", "another's rows", "columns in another order", "positions of another"],
)
def test_a_wrong_mask_is_noticed(wrong, by_table, monkeypatch):
    """By the trial, and without it by the texts."""
    forward = Target.forward_static

    def changed(target, cache, tokens, positions, write_at, sight, bucket, **more):
        table = sight.table.clone()
        if wrong == "one column less":
            table[:, LENGTH].sub_(1).clamp_(min=0)
        elif wrong == "another's rows":
            table[:, LENGTH - 1 : LENGTH + 1] = table[:, LENGTH - 1 : LENGTH + 1].flip(0)
        elif wrong == "columns in another order":
            write_at = write_at.flip(0)
        else:
            positions = positions.flip(0)
        return forward(
            target, cache, tokens, positions, write_at, sight._replace(table=table), bucket, **more
        )

    monkeypatch.setattr(Target, "forward_static", changed)
    target, asked = (
        Target(model()),
        [(prompt, Request(max_new_tokens=30)) for prompt in prompts()[2:6]],
    )
    target.attends_by_table = by_table
    with pytest.raises(UserError, match="logits of a batch's rows are .* away"):
        together(target, Vanilla(target.device), 4, asked)
    monkeypatch.setattr("model.engine.batch.check_batch", lambda *trial: None)
    target.attends_by_table = by_table
    outs = together(target, Vanilla(target.device), 4, asked)
    assert [out.tokens for out in outs] != [longest(tuple(prompt))[:30] for prompt, _ in asked]


def test_what_cannot_be_a_batch_is_refused_by_name(llama):
    target, asked = Target(llama), [([5, 6], Request(max_new_tokens=3))]
    for size in (0, 2.5, "8"):
        with pytest.raises(
            UserError, match=f"^batch={size}: must be a number of sequences, at least 1$"
        ):
            together(target, Vanilla(target.device), size, asked)
    with pytest.raises(UserError, match="^execution=graph: "):
        together(
            target, Vanilla(target.device), 2, [([5], Request(max_new_tokens=3, execution="graph"))]
        )
    with pytest.raises(UserError, match="^max_new_tokens=0: must"):
        together(target, Vanilla(target.device), 2, [*asked, ([5], Request(max_new_tokens=0))])
    sizes = SIZES | NARROW | dict(num_key_value_heads=2, attn_layer_indices=[1])
    states = Target(Auto.from_config(BambaConfig(**sizes, **STATES)).eval())
    with pytest.raises(UserError, match="keeps recurrent states; decode its prompts one by one"):
        together(states, Vanilla(states.device), 2, asked)
    neo = GPTNeoConfig(
        vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]],
        max_position_embeddings=256,
    )  # fmt: skip
    counting = Target(sharpened(Auto.from_config(neo).eval()))
    with pytest.raises(UserError, match="does not work with transformers' own cache and masks"):
        check_batch(counting, 4096)


def test_a_larger_batch_after_weights_were_written_uncounted(monkeypatch):
    """The trial of its size ran on packed weights of before, and refused the model."""
    monkeypatch.setattr("model.engine.linear.SMALL_PRODUCT", 0)
    owned = toy_model("llama-grouped")
    target = Target(owned, linear=choose_linear(owned))
    drafter, asked = (
        Vanilla(target.device),
        [(prompt, Request(max_new_tokens=12)) for prompt in prompts()[2:6]],
    )
    together(target, drafter, 2, asked)
    for parameter in owned.parameters():
        parameter.data.mul_(0.7)
    expected = [greedy(owned, prompt, 12) for prompt, _ in asked]
    assert target.linear != "torch"
    assert [out.tokens for out in together(target, drafter, 4, asked)] == expected


def test_an_abandoned_batch_closes_its_sessions(llama):
    target = Target(llama)
    drafter = make("dynamic", target, {})
    steps = decode_batch(
        target, drafter, [(prompt, Request(max_new_tokens=30)) for prompt in prompts()], 3
    )
    for _ in range(7):
        next(steps)
    assert drafter.history.borrowed_length is not None
    steps.close()
    assert drafter.history.borrowed_length is None
    assert (
        generate(target, drafter, prompts()[3], max_new_tokens=30).tokens
        == longest(tuple(prompts()[3]))[:30]
    )


def test_stretches_are_used_again_and_grow_together(llama, monkeypatch):
    """Forty answers in turn, three at a time, take no more room than three; the longest text decides how much."""
    target = Target(llama)
    together(target, Vanilla(target.device), 3, [([5, 6, 7, 8], Request(max_new_tokens=20))] * 40)
    shared = target.idle_batch
    assert shared.cache.stretches == 3 and shared.room == ROOM
    text = prompts()[6] * 4
    monkeypatch.setattr("model.engine.batch.ROOM", 48)
    asked = [(prompt, Request(max_new_tokens=50)) for prompt in ([5, 6], text[:150], [7])]
    outs = together(target, Vanilla(target.device), 4, asked)
    assert [out.tokens for out in outs] == [greedy(llama, prompt, 50) for prompt, _ in asked]
    assert 199 <= target.idle_batch.room < 400


@pytest.mark.parametrize("execution", ["eager", "static"])
@pytest.mark.parametrize("by_table", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_texts_longer_than_a_stretch_at_first(size, by_table, execution, monkeypatch):
    """A batch of one lost its text when its stretch grew, and saw the first 256 columns of it under masks."""
    monkeypatch.setattr("model.engine.batch.ROOM", 48)
    monkeypatch.setattr("model.engine.static_step.BUCKET", 64)
    target, request = Target(model()), Request(max_new_tokens=50, execution=execution)
    target.attends_by_table = by_table
    texts = [tuple(prompts()[index]) for index in (6, 3, 10, 9)]
    outs = together(
        target, make("recycling", target, {}), size, [(list(text), request) for text in texts]
    )
    assert [out.tokens for out in outs] == [longest(text) for text in texts]


def test_attention_that_adds_to_its_mask_gets_masks():
    """Doge does; it takes its attention from the interface all the same."""
    own = sharpened(
        Auto.from_config(
            DogeConfig(**SIZES, **NARROW, num_key_value_heads=2, keep_window_size=512)
        ).eval()
    )
    target, texts = Target(own, context=256), prompts()[2:6]
    assert target.attends_by_table
    outs = together(
        target, Vanilla(target.device), 3, [(text, Request(max_new_tokens=12)) for text in texts]
    )
    assert [out.tokens for out in outs] == [greedy(own, text, 12) for text in texts]
    assert not target.attends_by_table


def test_waiting_leaves_out_what_making_a_shape_takes(monkeypatch):
    target, request, feed = (
        Target(model()),
        Request(max_new_tokens=12, execution="static"),
        StaticForward.__init__,
    )
    monkeypatch.setattr(StaticForward, "__init__", lambda *given: time.sleep(0.1) or feed(*given))
    outs = together(
        target, make("recycling", target, {}), 2, [(prompts()[2], request), (prompts()[3], request)]
    )
    assert sum(out.setup_s for out in outs) > 0.1
    assert all(max(out.ends_s[-1], out.prefill_s + out.decode_s) < 0.1 for out in outs)


def test_a_batch_leaves_no_cycle_that_keeps_the_model():
    own = toy_model("llama")
    target = Target(own)
    together(target, Vanilla(target.device), 2, [([5, 6], Request(max_new_tokens=3))] * 2)
    gc.disable()
    try:
        gone = weakref.ref(target)
        del target
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["recycling", "suffix", "dynamic"])
def test_captured_forwards_serve_all_steps_and_the_next_batches(name, monkeypatch):
    graphs = FakeGraphs(monkeypatch)
    target, asked = (
        graphs.target(model()),
        [(p, Request(max_new_tokens=30, execution="graph")) for p in prompts()[2:8]],
    )
    drafter, captures = make(name, target, {}), []
    for _ in range(3):
        outs = together(target, drafter, 3, asked)
        assert [out.tokens for out in outs] == [longest(tuple(prompt))[:30] for prompt, _ in asked]
        assert all(out.decode_s > 0 and out.setup_s >= 0 for out in outs)
        captures.append(len(graphs.captured))
    steps = sum(1 / step.batch for out in outs for step in out.steps)
    assert graphs.replays > 2 * steps > 3 * captures[0] > 0 and captures[2] <= captures[0] + 3, (
        "few shapes, made once"
    )
