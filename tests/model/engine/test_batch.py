"""Batches: each text is that of its sequence alone, whoever else is in the batch."""

import random
from collections import Counter, defaultdict
from functools import cache, partial

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import DogeConfig, GPTNeoConfig

from model.engine import Drafter, Request, Sampling, Target, exhaust, generate
from model.engine.attention.sight import LENGTH
from model.engine.loop.batch import check_batch, decode_batch
from model.engine.loop.step import Executor
from model.errors import UserError
from model.methods.vanilla import Vanilla
from tests.conftest import CONFIGS, NARROW, SIZES, greedy, sharpened, toy_model
from tests.model.every_method import SETTINGS, Oracle, OracleSession, V, make, write_companions
from tests.model.families import toy
from tests.model.sessions import comparable
from tests.model.test_layers import WINDOWED

LENGTHS = (1, 2, 12, 30)
LIMITS = (2, 12, 7, 1, 20, 12)


@cache
def model():
    return toy_model("llama-grouped")


@cache
def prompts():
    """More of them than a batch takes, of different lengths; two are equal, and one holds its own answer."""
    rng = random.Random(1)
    texts = [[rng.randrange(3, V) for _ in range(length)] for length in LENGTHS]
    return [*texts, texts[2] + greedy(model(), texts[2], 20) + texts[2], texts[2]]


@cache
def longest(prompt):
    return greedy(model(), list(prompt), 40)


@pytest.fixture(scope="module")
def companions(tmp_path_factory):
    return write_companions(model(), tmp_path_factory.mktemp("companions"))


def together(target, drafter, size, asked):
    """All answers of a batch; what it yields are their steps, in order."""
    seen = Counter()

    def count(yielded):
        number, out = yielded
        seen[number] += 1
        assert len(out.steps) == len(out.ends_s) == seen[number]

    outs = exhaust(decode_batch(target, drafter, asked, size), count)
    assert [len(out.steps) for out in outs] == [seen[number] for number in range(len(outs))]
    return outs


def cut(text, limit, eos=()):
    text = text[:limit]
    return text[: next((i + 1 for i, token in enumerate(text) if token in eos), limit)]


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_texts_of_every_method(name, companions):
    """Answers end by a token, at their limits and at the context's end; the queue is longer than the batch."""
    target = Target(model(), context=70)
    eos = {*random.Random(name).sample(range(3, V), 2)}
    drafter = make(name, target, companions, eos=eos)
    expected = [
        cut(longest(tuple(prompt)), min(limit, 70 - len(prompt)), eos)
        for prompt, limit in zip(prompts(), LIMITS, strict=True)
    ]
    # the second is hot: what is drafted goes past the end
    for execution in ("eager", "static"):
        requests = [Request(max_new_tokens=limit, eos=eos, execution=execution) for limit in LIMITS]
        outs = together(target, drafter, 3, zip(prompts(), requests, strict=True))
        assert [out.tokens for out in outs] == expected
        for out, prompt, limit in zip(outs, prompts(), LIMITS, strict=True):
            assert sum(out.accept_lengths) == len(out.tokens)
            full = "length" if limit == len(out.tokens) else "context"
            assert out.stop == ("eos" if out.tokens[-1] in eos else full)
            assert out.forwards - len(out.steps) in (0, len(prompt) > 1)


# Steps that are one launch, drafts on the host that know the text's positions, and hidden states.
@pytest.mark.parametrize("name", ["recycling", "dynamic", "eagle2"])
def test_sampled_texts(name, companions):
    """Each sequence has its own seed; one reads its text, and one is greedy. Those that differ in
    their seeds alone are drawn for at once.
    """
    target = Target(model())
    ways = [Sampling(temperature=0.8, top_p=0.9, seed=seed) for seed in range(4)]
    ways += [Sampling(temperature=1.0, repetition_penalty=1.2, seed=7), Sampling()]
    expected = [
        plain_sampling(tuple(prompt), way) for prompt, way in zip(prompts(), ways, strict=True)
    ]
    for size, execution, count in ((3, "eager", 6), (6, "static", 6), (4, "static", 4)):
        requests = [
            Request(max_new_tokens=12, sampling=sampling, execution=execution)
            for sampling in ways[:count]
        ]
        drafter = make(name, target, companions)
        outs = together(target, drafter, size, zip(prompts(), requests, strict=False))
        assert [out.tokens for out in outs] == expected[:count]


@cache
def plain_sampling(prompt, sampling):
    target = Target(model())
    return generate(
        target, Vanilla(target.device), list(prompt), max_new_tokens=12, sampling=sampling
    ).tokens


def read(texts, ids, scores):
    texts.append(ids[0].tolist())
    return scores


def end_at(texts, length, text):
    texts.append(text)
    return len(text) >= length


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_repeats_and_processors_and_criteria_are_asked_once_a_token(name, companions):
    target = Target(model())
    runs = []
    for _ in range(2):
        requests = []
        texts = defaultdict(list)
        asked = defaultdict(list)
        for i, prompt in enumerate(prompts()):
            reads = partial(read, texts[i])
            ends = partial(end_at, asked[i], len(prompt) + 3 + i)
            requests.append(
                Request(max_new_tokens=6, sampling=Sampling(processors=(reads,)), ends=ends)
            )
        drafter = make(name, target, companions)
        outs = together(target, drafter, 3, zip(prompts(), requests, strict=True))
        runs.append(([out.steps for out in outs], comparable(drafter.state_dict())))
        for i, (prompt, out) in enumerate(zip(prompts(), outs, strict=True)):
            expected = list(longest(tuple(prompt))[: min(6, 3 + i)])
            assert out.tokens == expected and out.stop == ("stop" if i <= 3 else "length")
            assert texts[i] == [prompt + expected[:count] for count in range(len(expected))]
            assert asked[i] == [*texts[i][1:], prompt + expected]
    assert runs[0] == runs[1]


class Oracles(Drafter):
    """Knows some of each answer and drafts it on a random path of a random tree."""

    max_nodes = 31

    def __init__(self, answers, seed=0):
        super().__init__(torch.device("cpu"))
        self.answers = answers
        self.rng = random.Random(seed)

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
    forward = Executor.forward

    def poisoned(executor, cache, drafts, drafter):
        target = executor.target
        # a soft cap goes to sdpa with a mask (transformers 5.17), which multiplies what is hidden by 0
        capped = getattr(target.model.config, "attn_logit_softcapping", None)
        if target.attends_by_table and capped is None:
            for buffer in cache._buffers:
                of_each = buffer.unflatten(2, (len(cache.lengths), -1))
                for at, length in enumerate(cache.lengths):
                    of_each[:, :, at, length if at in drafts else 0 :] = float("nan")
        return forward(executor, cache, drafts, drafter)

    monkeypatch.setattr(Executor, "forward", poisoned)
    monkeypatch.setattr("model.engine.loop.batch.check_batch", lambda *trial: None)


# Heads that share keys; learned positions; other scales and soft caps; then windows and chunks.
KINDS = ("llama-grouped", "gpt2", "gemma2", "gemma3")


@pytest.mark.parametrize("architecture", [*KINDS, *(f"windowed {name}" for name in WINDOWED)])
def test_texts_of_every_kind_of_attention(architecture, columns):
    """Also where the context ends, and where windows and chunks do."""
    windowed = architecture.removeprefix("windowed ")
    of = toy_model(architecture) if architecture in CONFIGS else toy(windowed)
    rng = random.Random(1)
    target = Target(of, context=256)
    texts = [
        [7],
        [5, 6, 7, 8] * 62,
        *([rng.randrange(3, V) for _ in range(length)] for length in (20, 3, 33)),
    ]
    answers = {tuple(text): greedy(of, text, min(12, 256 - len(text))) for text in texts}
    for size, execution in ((2, "eager"), (3, "static")):
        request = Request(max_new_tokens=12, execution=execution)
        asked = [(text, request) for text in texts]
        outs = together(target, Oracles(answers, size), size, asked)
        assert [out.tokens for out in outs] == list(answers.values())
        assert outs[1].stop == "context"
    assert max(len(out.steps) for out in outs) < 9, "the oracle must get paths accepted"


@pytest.mark.parametrize("by_table", [True, False])
@pytest.mark.parametrize("wrong", ["one column less", "columns in another order"])
def test_a_wrong_mask_is_noticed(wrong, by_table, monkeypatch):
    forward = Target.forward_static

    def changed(target, cache, tokens, positions, write_at, sight, bucket, **more):
        table = sight.table.clone()
        if wrong == "one column less":
            table[:, LENGTH].sub_(1).clamp_(min=0)
        else:
            write_at = write_at.flip(0)
        sight = sight._replace(table=table)
        return forward(target, cache, tokens, positions, write_at, sight, bucket, **more)

    monkeypatch.setattr(Target, "forward_static", changed)
    target = Target(model())
    target.attends_by_table = by_table
    with pytest.raises(UserError, match="logits of a batch's rows are .* away"):
        check_batch(target)


def test_what_cannot_be_a_batch_is_refused_by_name(llama):
    target = Target(llama)
    for size in (0, 2.5, "8"):
        with pytest.raises(UserError, match=f"^batch={size}: must be a number of sequences"):
            together(target, Vanilla(target.device), size, [])
    for wrong in (dict(execution="graph"), dict(max_new_tokens=0)):
        asked = [([5], Request(**dict(max_new_tokens=3) | wrong))]
        with pytest.raises(UserError, match=f"^{next(iter(wrong))}="):
            together(target, Vanilla(target.device), 2, asked)
    states = Target(toy("lfm2"))
    with pytest.raises(UserError, match="keeps recurrent states; decode its prompts one by one"):
        together(states, Vanilla(states.device), 2, [([5], Request(max_new_tokens=3))])
    neo = GPTNeoConfig(
        vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]],
        max_position_embeddings=256,
    )  # fmt: skip
    counting = Target(sharpened(Auto.from_config(neo).eval()))
    with pytest.raises(UserError, match="does not work with transformers' own cache and masks"):
        check_batch(counting)


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
    out = generate(target, drafter, prompts()[3], max_new_tokens=30)
    assert out.tokens == longest(tuple(prompts()[3]))[:30]


@pytest.mark.parametrize(
    "execution, by_table", [("eager", True), ("static", True), ("static", False)]
)
@pytest.mark.parametrize("size", [1, 3])
def test_texts_longer_than_a_stretch_at_first(size, by_table, execution, monkeypatch):
    """A batch of one lost its text when its stretch grew, and saw the first 256 columns of it under masks."""
    monkeypatch.setattr("model.engine.loop.batch.ROOM", 48)
    monkeypatch.setattr("model.engine.graphs.static_step.BUCKET", 64)
    target = Target(model())
    request = Request(max_new_tokens=40, execution=execution)
    target.attends_by_table = by_table
    texts = [tuple(prompts()[index]) for index in (4, 3, 5, 2)]
    outs = together(
        target, make("recycling", target, {}), size, [(list(text), request) for text in texts]
    )
    assert [out.tokens for out in outs] == [longest(text)[:40] for text in texts]


def test_attention_that_adds_to_its_mask_gets_masks():
    """Doge does; it takes its attention from the interface all the same."""
    own = sharpened(
        Auto.from_config(
            DogeConfig(**SIZES, **NARROW, num_key_value_heads=2, keep_window_size=512)
        ).eval()
    )
    target = Target(own, context=256)
    texts = prompts()[2:6]
    assert target.attends_by_table
    outs = together(
        target, Vanilla(target.device), 3, [(text, Request(max_new_tokens=12)) for text in texts]
    )
    assert [out.tokens for out in outs] == [greedy(own, text, 12) for text in texts]
    assert not target.attends_by_table
