"""Sampling: the noise by hand, the output against plain sampling and transformers, and a distribution."""

import itertools
import math

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from model.engine import Sampling, Target, decode, generate, top_k
from model.engine.rule import sampling
from model.engine.rule.sampling import Choice, argmax, drawn_by, gumbel
from model.errors import UserError
from model.methods import make_method
from model.methods.vanilla import Vanilla
from model.recycling import TokenRecycling, build_template

V = 61
WORD = (1 << 64) - 1
HALF = (1 << 32) - 1
CPU = torch.device("cpu")


def splitmix(number):
    number = number + 0x9E3779B97F4A7C15 & WORD
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB & WORD
    return number ^ number >> 31


def lowbias(number):
    number = (number ^ number >> 16) * 0x7FEB352D & HALF
    number = (number ^ number >> 15) * 0x846CA68B & HALF
    return number ^ number >> 16


def noise(seed, position, token):
    """The same from unbounded integers and doubles."""
    key = splitmix(splitmix(seed & WORD) ^ position)
    drawn = lowbias(lowbias(token ^ (key & HALF)) ^ key >> 32)
    return -math.log(-math.log1p(-(drawn + 0.5) / 2**32))


@pytest.mark.parametrize("seed", [0, -7, 2**62 + 12345])
def test_noise_is_that_of_integers_by_hand(seed):
    positions = [0, 1, 2, 777, 131071]
    drawn = gumbel(torch.tensor(seed), torch.tensor(positions), 300)
    assert drawn.dtype == torch.float32 and bool(drawn.isfinite().all())
    expected = torch.tensor(
        [[noise(seed, p, t) for t in range(300)] for p in positions], dtype=torch.float64
    )
    torch.testing.assert_close(drawn.double(), expected, rtol=2e-5, atol=2e-6)


def slow(model, prompt, new, sampling, eos=()):
    """Plain sampling from whole forwards without a cache, transformers' own processors, and noise by hand."""
    text = list(prompt)
    for _ in range(new):
        ids = torch.tensor([text])
        with torch.no_grad():
            scores = model(ids).logits[:, -1].float()
        if sampling.repetition_penalty != 1:
            scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
        for processor in sampling.processors:
            scores = processor(ids, scores)
        if sampling.temperature:
            scores = TemperatureLogitsWarper(sampling.temperature)(ids, scores)
            if sampling.top_k:
                scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
            if sampling.top_p < 1:
                scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
            if sampling.min_p:
                scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
            drawn = [noise(sampling.seed, len(text), token) for token in range(scores.shape[1])]
            scores = scores.double() + torch.tensor([drawn], dtype=torch.float64)
        text.append(int(scores.argmax()))
        if text[-1] in eos:
            break
    return text[len(prompt) :]


SETTINGS = [
    Sampling(temperature=0.5, seed=2),
    Sampling(temperature=1.0, top_p=0.9, seed=3),
    Sampling(temperature=0.7, top_k=5, min_p=0.02, seed=4),
    Sampling(repetition_penalty=1.3),
    Sampling(temperature=1e-20),
    Sampling(temperature=0.8, repetition_penalty=1.2, seed=5),
    Sampling(temperature=0.9, processors=(NoRepeatNGramLogitsProcessor(2),), seed=6),
]


@pytest.mark.parametrize("way", SETTINGS, ids=lambda s: f"{s.temperature}-{s.seed}")
def test_plain_and_drafted_sampling_are_the_slow_one(way, llama):
    model = llama
    prompt = [5, 9, 5, 9, 5, 9, 7]
    expected = slow(model, prompt, 40, way)
    for drafter in (Vanilla(CPU), TokenRecycling(V, build_template("best", nodes=30))):
        out = generate(Target(model), drafter, prompt, max_new_tokens=40, sampling=way)
        assert out.tokens == expected and sum(out.accept_lengths) == 40
    assert len(set(expected)) > 5, "it says nothing if the model repeats one token"


WRONG = {
    "temperature": (-1, 1e-21, float("nan")),
    "top_k": (-1,),
    "top_p": (0, 1.1),
    "min_p": (2,),
    "repetition_penalty": (0,),
}


def test_settings_out_of_range_are_refused():
    for name, values in WRONG.items():
        for value in values:
            with pytest.raises(UserError, match=f"sampling.{name}="):
                Sampling(**{name: value})


def test_the_least_noise_is_a_number():
    """Of 2^32 draws the last 128 round to 1, whose noise would be minus infinity: a token that is alone wins still."""
    logits = torch.zeros(1, 152064)
    logits[0, 129743] = 50
    alone = Choice(Sampling(temperature=1.0, top_k=1, seed=0), CPU)
    for position in (650, 651):
        assert alone.among(logits, torch.tensor([position])).tolist() == [129743]


PENALTY = RepetitionPenaltyLogitsProcessor(1.2)
LISTS = {  # in `generate`'s order: what is a setting, and what is left of the list
    "settings": (
        [
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ],
        4,
    ),
    "some": ([PENALTY, TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)], 2),
    "none": ([TopKLogitsWarper(20), TopKLogitsWarper(9, filter_value=-5.0)], 0),
    "order": ([TopPLogitsWarper(0.9), TemperatureLogitsWarper(0.7)], 1),
    "nothing": ([], 0),
}


@pytest.mark.parametrize("name", LISTS)
def test_the_warpers_of_a_list_are_settings_of_the_same_choice(name, llama):
    """So `generate` with a checkpoint's temperature and top-p may take captured steps."""
    processors, taken = LISTS[name]
    drawn = drawn_by(processors, seed=5)
    called = Sampling(temperature=1.0, seed=5, processors=tuple(processors))
    assert len(drawn.processors) == len(processors) - taken
    target = Target(llama)
    one = generate(target, Vanilla(CPU), [5, 6, 7], max_new_tokens=16, sampling=drawn)
    other = generate(target, Vanilla(CPU), [5, 6, 7], max_new_tokens=16, sampling=called)
    assert one.tokens == other.tokens and len(set(one.tokens)) > 5


@pytest.mark.parametrize("warper", [TopPLogitsWarper(0.0), TemperatureLogitsWarper(1e-21)])
def test_a_warper_out_of_our_range_stays_a_processor(warper):
    assert drawn_by([warper], seed=5) == Sampling(temperature=1.0, seed=5, processors=(warper,))


@pytest.mark.parametrize("dtype, vocab", [(torch.float32, 61), (torch.bfloat16, 2048)])
def test_argmax_is_torchs_with_ties_too(vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    for n in (1, 7, 81):
        ties = torch.randint(0, 9, (n, vocab), generator=generator).to(dtype)
        noise = torch.randn(n, vocab, generator=generator).to(dtype)
        for logits in (ties, noise, ties[:, :1].expand(n, vocab)):
            assert torch.equal(argmax(logits), logits.argmax(dim=-1))


def test_top_k_is_torchs_also_with_ties_and_crowded_groups(monkeypatch):
    """The greatest all in one group, or all equal: each column is named once."""
    monkeypatch.setattr(sampling, "LARGE_VOCAB", 0)
    crowded = torch.zeros(3, 2048)
    crowded[:, 5::128] = torch.arange(16.0)
    random = torch.randn(13, 32000, generator=torch.Generator().manual_seed(0))
    for logits in (random, random[:, :61], crowded, torch.full((3, 2048), float("-inf"))):
        for k in (1, 8, 32):
            found = top_k(logits, k)
            assert torch.equal(logits.gather(1, found), logits.topk(k, dim=-1).values)
            assert all(len(set(row)) == k for row in found.tolist())


@pytest.mark.parametrize("method, execution", [("recycling", "static"), ("dynamic", "eager")])
def test_sequences_with_other_seeds_may_take_steps_in_turns(method, execution, llama):
    """A static step computes on the device the positions that its noise depends on."""
    target = Target(llama)
    drafter = make_method(method, target, nodes=12)
    ways = [Sampling(temperature=1.0, seed=seed) for seed in (1, 2)]
    settings = dict(max_new_tokens=20, execution=execution)
    alone = []
    for way in ways:
        out = generate(target, Vanilla(CPU), [5, 6, 7], max_new_tokens=20, sampling=way)
        alone.append(out.tokens)
    streams = [
        decode(target, drafter.session(), [5, 6, 7], sampling=way, **settings) for way in ways
    ]
    said = [[], []]
    for steps in itertools.zip_longest(*streams):
        for tokens, step in zip(said, steps, strict=True):
            tokens += step.tokens if step else []
    assert said == alone and alone[0] != alone[1]
