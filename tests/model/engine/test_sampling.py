"""Sampling: the noise by hand, the output against plain sampling and transformers, and a distribution."""

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

from model.engine import Target, Tree, generate, verify
from model.engine.sampling import Choice, Sampling, gumbel
from model.engine.tree import Draft
from model.errors import UserError
from model.methods.vanilla import Vanilla
from model.recycling import TokenRecycling, build_template
from tests.conftest import toy_model

V, WORD, HALF = 61, (1 << 64) - 1, (1 << 32) - 1
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


def test_splitmix_is_the_published_one():
    """The first numbers of seed 1234567, as Vigna's C code prints them."""
    state, found = 1234567, []
    for _ in range(3):
        found.append(splitmix(state))
        state += 0x9E3779B97F4A7C15
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, -7, 2**62 + 12345])
def test_noise_is_that_of_integers_by_hand(seed):
    positions = [0, 1, 2, 777, 131071]
    drawn = gumbel(torch.tensor(seed), torch.tensor(positions), 300)
    assert drawn.dtype == torch.float32 and bool(drawn.isfinite().all())
    expected = torch.tensor([[noise(seed, p, t) for t in range(300)] for p in positions], dtype=torch.float64)
    torch.testing.assert_close(drawn.double(), expected, rtol=2e-5, atol=2e-6)


def chi_square(counts, shares):
    """Of counts over shares; how likely so large a one is, by the normal approximation of Wilson and Hilferty."""
    total, free = counts.sum(), len(counts) - 1
    found = ((counts - total * shares) ** 2 / (total * shares)).sum().item()
    z = ((found / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
    return 0.5 * math.erfc(z / math.sqrt(2))


def logits_of(tokens):
    """A toy language over 5 tokens: what follows depends on the two last ones. (m, 2) -> (m, 5)"""
    table = torch.randn(5, 5, 5, generator=torch.Generator().manual_seed(3)) * 1.5
    return table[tokens[:, 0], tokens[:, 1]]


@pytest.mark.parametrize("rule", ["by place", "by node"])
def test_drafting_leaves_the_distribution_as_it_is(rule):
    """200,000 texts of three tokens against the exact shares, drafted as a tree of the likeliest three, two below each.

    Noise by node instead of by place draws every single token rightly and looks alike. But where a draft fails the next
    root is node 0 again, with the noise of before, so tokens depend on one another: the same count must see that.
    """
    runs = 200_000
    seeds, rows = torch.arange(runs), torch.arange(runs)
    text = torch.tensor([[1, 2]]).repeat(runs, 1)
    node = torch.zeros(runs, dtype=torch.long)  # which node of its draft a text's last token is: 0 is a root
    for place in (2, 3, 4):
        scores = logits_of(text[:, -2:])
        at = torch.full((runs,), place) if rule == "by place" else node
        chosen = (scores + gumbel(seeds, at, 5)).argmax(-1)
        likeliest = scores.topk(3).indices  # (runs, 3)
        among = likeliest == chosen[:, None]
        rank = among.float().argmax(1)
        below_root, below_child = among.any(1) & (node == 0), among[:, :2].any(1) & (node >= 1) & (node <= 3)
        child, grandchild = 1 + rank, 4 + 2 * (node - 1) + rank
        node = torch.where(below_root, child, torch.where(below_child, grandchild, torch.zeros_like(node)))
        text = torch.cat((text, chosen[rows, None]), 1)
    counts = torch.bincount(text[:, 2] * 25 + text[:, 3] * 5 + text[:, 4], minlength=125).double()

    def shares(first, second):
        return logits_of(torch.tensor([[first, second]])).double().softmax(-1)[0].tolist()

    exact = [p * q * r for a, p in enumerate(shares(1, 2)) for b, q in enumerate(shares(2, a)) for r in shares(a, b)]
    likely = chi_square(counts, torch.tensor(exact, dtype=torch.float64))
    assert likely > 0.001 if rule == "by place" else likely < 1e-9


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
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.5, seed=2),
    Sampling(temperature=1.0, top_p=0.9, seed=3),
    Sampling(temperature=0.7, top_k=5, min_p=0.02, seed=4),
    Sampling(repetition_penalty=1.3),
    Sampling(temperature=0.8, repetition_penalty=1.2, seed=5),
    Sampling(temperature=0.9, processors=(NoRepeatNGramLogitsProcessor(2),), seed=6),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=lambda s: f"{s.temperature}-{s.seed}")
@pytest.mark.parametrize("name", ["llama-grouped", "gpt-neox"])
def test_plain_and_drafted_sampling_are_the_slow_one(name, sampling):
    model, prompt = toy_model(name), [5, 9, 5, 9, 5, 9, 7]
    expected = slow(model, prompt, 60, sampling)
    for drafter in (Vanilla(CPU), TokenRecycling(V, build_template("best", nodes=30))):
        out = generate(Target(model), drafter, prompt, max_new_tokens=60, sampling=sampling)
        assert out.tokens == expected and sum(out.accept_lengths) == 60
    assert len(set(expected)) > 5, "it says nothing if the model repeats one token"
    eos = expected[20]
    cut = generate(Target(model), drafter, prompt, max_new_tokens=60, sampling=sampling, eos={eos})
    assert cut.tokens == expected[: expected.index(eos) + 1] and cut.stop == "eos"


def test_steps_of_fixed_shape_draw_the_same():
    model, prompt = toy_model("llama"), [5, 9, 5, 9, 7]
    target, drafter = Target(model), TokenRecycling(V, build_template("2.2.2"))
    texts = set()
    for seed in (1, 2, 1):  # a step that was captured for one seed draws by the next one's
        sampling = Sampling(temperature=0.9, top_p=0.95, seed=seed)
        out = generate(target, drafter, prompt, max_new_tokens=50, sampling=sampling, execution="static")
        assert out.tokens == generate(Target(model), Vanilla(CPU), prompt, max_new_tokens=50, sampling=sampling).tokens
        texts.add(tuple(out.tokens))
    assert len(texts) == 2
    greedily = generate(target, drafter, prompt, max_new_tokens=50, execution="static").tokens
    assert greedily == generate(Target(model), Vanilla(CPU), prompt, max_new_tokens=50).tokens
    assert (
        greedily
        == generate(target, drafter, prompt, max_new_tokens=50, sampling=Sampling(top_k=3), execution="static").tokens
    )
    with pytest.raises(UserError, match="repetition penalty.*take execution=eager"):
        generate(
            target, drafter, prompt, max_new_tokens=5, sampling=Sampling(repetition_penalty=1.1), execution="static"
        )


def test_all_nodes_of_a_place_have_its_noise():
    tree = Tree([0, 0, 0, 1, 1, 2])
    draft = Draft(tree, torch.tensor([5, 6, 7, 8, 9, 8]))
    scores = torch.zeros(6, V)
    choices = Choice(Sampling(temperature=1.0, seed=9), CPU).after(scores, draft, [1, 2, 5]).tolist()
    by_place = [max(range(V), key=lambda token, p=p: noise(9, p, token)) for p in (3, 4, 5)]
    assert choices == [by_place[depth] for depth in tree.depth_of] and len(set(by_place)) == 3


def test_kept_noise_is_bounded_in_bytes_and_none_is_dropped_that_a_call_needs(monkeypatch):
    """Answers by one seed, longer than what is kept; then more places at once than fit, of which some are kept."""
    bound, drawn = 20 * 4 * V, list[int]()

    def counted(seed, positions, vocab):
        drawn.extend(positions.tolist())
        return gumbel(seed, positions, vocab)

    monkeypatch.setattr("model.engine.sampling.gumbel", counted)
    monkeypatch.setattr("model.engine.sampling.NOISE_BYTES", bound)
    choice = Choice(Sampling(temperature=1.0, seed=3), CPU)

    def asked(*places):
        found = choice.scores(torch.zeros(len(places), V), torch.tensor(places))
        assert found.equal(gumbel(torch.tensor(3), torch.tensor(places), V))
        return sum(row.untyped_storage().nbytes() for row in choice._rows.values())

    for _ in range(2):  # a step looks four places ahead, and two nodes of it share one
        assert all(asked(p, p + 1, p + 1, p + 2, p + 3) <= bound for p in range(600))
    assert sorted(drawn) == sorted(2 * [*range(603)]), "each place once an answer"
    asked(*range(350))
    assert asked(350) <= bound and len(choice._rows) > 15
    drawn.clear()
    asked(349, 350)
    assert drawn == [], "what was used last is kept"


@pytest.mark.parametrize(
    "wrong",
    [dict(temperature=-1), dict(temperature=float("nan")), dict(top_k=-1), dict(top_p=0), dict(top_p=1.1)]
    + [dict(min_p=2), dict(repetition_penalty=0)],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match=f"sampling.{next(iter(wrong))}="):
        Sampling(**wrong)


def test_the_least_noise_is_a_number():
    """Of 2^32 draws the last 128 round to 1, whose noise would be minus infinity: a token that is alone wins still."""
    logits = torch.zeros(1, 152064)
    logits[0, 129743] = 50
    alone = Choice(Sampling(temperature=1.0, top_k=1, seed=0), CPU)
    for position in (650, 651):
        assert alone.among(logits, torch.tensor([position])).tolist() == [129743]


def test_choices_along_the_path_are_those_of_all_nodes():
    generator = torch.Generator().manual_seed(5)
    tree = build_template("best", nodes=20)
    for seed in range(20):
        logits = torch.randn(21, V, generator=generator) * 3
        sampling = Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=seed)
        tokens = torch.randint(0, V, (21,), generator=generator)
        choice, text = Choice(sampling, CPU), [1, 2, int(tokens[0])]
        for _ in range(3):  # make some of them stand
            every = choice.after(logits, Draft(tree, tokens), text).tolist()
            for node in range(1, 21, 2):
                tokens[node] = every[tree.parent_of[node]]
        draft = Draft(tree, tokens)
        every, along = (choice.after(logits, draft, text, every=whole) for whole in (True, False))
        one, other = verify(draft, every), verify(draft, along)
        assert (one.node, one.tokens) == (other.node, other.tokens)
        assert one.accepted.tolist() == other.accepted.tolist() or one.tokens == other.tokens


def test_of_siblings_with_one_token_each_is_followed():
    """LogitSpec and the n-gram cache may draft a token twice; what is accepted is below the second one here."""
    choice, text = Choice(Sampling(temperature=1.0, seed=3), CPU), [1, 2]
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(0))
    logits[2] = logits[1]  # the same context
    first, second = (int(choice.among(logits[n : n + 1], torch.tensor([2 + n]))) for n in (0, 1))
    draft = Draft(Tree([0, 0, 0, 2]), torch.tensor([2, first, first, second]))
    every, along = (verify(draft, choice.after(logits, draft, text, every=whole)) for whole in (True, False))
    assert every.node == along.node == 3 and every.tokens == along.tokens
