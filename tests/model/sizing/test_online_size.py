"""The size of a draft, found while decoding: by a clock that the test turns, so that no machine decides anything."""

import logging
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from model.copying.spine import Spine
from model.copying.suffix import Suffix
from model.copying.suffix_recycling import SuffixRecycling
from model.decoding import Target, decode, generate
from model.dynamic.dynamic_recycling import DynamicRecycling
from model.errors import UserError
from model.methods import SIZED, make_method
from model.recycling import TokenRecycling, build_template
from model.recycling.auto import AutoRecycling
from model.sizing import online_size
from model.sizing.draft_size import SIZES
from model.sizing.online_size import ALLOWED, PROBE, RATE, UNPAID, LawfulSize, OnlineSize, budget_of, finds_size
from model.sizing.step_times import PLAIN
from model.vanilla import Vanilla
from tests.conftest import greedy, toy_model

V = 61
GPU = torch.device("cuda")  # is only asked for its kind
CPU = torch.device("cpu")
SECOND = 0.025  # of a plain step


def line(slope, overhead=0.02):
    """T(n): a plain step takes 1."""
    return lambda n: 1.0 if n == PLAIN else 1.0 + overhead + slope * n


def accepting(most, half):
    """E(n): it saturates."""
    return lambda n: most * n / (n + half) if n > 0 else 0.0


def best_of(times, accepted, sizes=SIZES):
    return max(sizes, key=lambda n: (1 + accepted(n)) / times(n))


class Machine:
    """Steps on a machine where T(n) and E(n) are known; a draft of n nodes has E(n) accepted, drawn by chance."""

    def __init__(self, times, accepted, *, noise=0.0, seed=0, scale=1.0, size=None):
        self.times, self.accepted, self.noise, self.scale = times, accepted, noise, scale
        self.rng, self.size = random.Random(seed), size or OnlineSize(80, CPU)
        self.tokens, self.seconds = 0, 0.0

    def answer(self, tokens):
        """The sizes of the steps of one answer."""
        self.open()
        end, sizes = self.tokens + tokens, []
        while self.tokens < end:
            sizes_ = self.size.sizes
            n = PLAIN if self.size.rests() else sizes_[self.size.best([1 + self.accepted(n) for n in sizes_])]
            mean, drafts = self.accepted(n), 0
            while drafts < n and self.rng.random() < mean / (1 + mean):
                drafts += 1
            took = self.times(n) * self.scale
            self.size.took(max(n, 0), 1 + drafts, SECOND * took * max(self.rng.gauss(1, self.noise), 0.2))
            self.tokens, self.seconds = self.tokens + 1 + drafts, self.seconds + took
            sizes.append(n)
        return sizes

    def open(self):
        """An answer begins with a plain step that nobody times, as the prompt goes with it."""
        self.size.opened()

    @property
    def speedup(self):
        return self.tokens / self.seconds


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    ("times", "accepted"),
    [
        (line(0.005), accepting(3, 8)),
        (line(0.03), accepting(2, 6)),
        (lambda n: 1.02 if n <= 8 else 1.8, accepting(2, 6)),
    ],
)
def test_it_comes_to_the_best_size(times, accepted, noise):
    machine = Machine(times, accepted, noise=noise)
    first = machine.answer(200)
    assert max(first[:3]) <= 2, "it begins near plain decoding"
    late = [n for n in machine.answer(600)[-100:] if n != PLAIN]
    usual = sorted(late)[len(late) // 2]
    reached, best = ((1 + accepted(n)) / times(n) for n in (usual, best_of(times, accepted)))
    assert reached > 0.97 * best
    assert machine.size.pays is True and not machine.size.resting


@pytest.mark.parametrize("slope", [0.001, 0.01, 0.05])
def test_on_a_gpu_it_comes_to_the_best_of_fewer_sizes(slope):
    machine = Machine(line(slope), accepting(3, 8), noise=0.05, size=OnlineSize(80, GPU))
    machine.answer(200)
    late = sorted(n for n in machine.answer(600)[-100:] if n != PLAIN)
    sizes = machine.size.sizes
    assert sizes == [0, 3, 7, 15, 31, 63, 79]
    usual, best = late[len(late) // 2], best_of(line(slope), accepting(3, 8), sizes)
    reached, most = ((1 + accepting(3, 8)(n)) / line(slope)(n) for n in (usual, best))
    assert usual > 0 and reached > 0.97 * most


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("budget", [1, 2, 5, 80])
def test_a_small_budget_is_drafted(device, budget):
    size = OnlineSize(budget, device)
    size.opened()
    size.rests()
    assert 0 < size.sizes[size.largest] <= budget == max(budget, *size.sizes)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    "times",
    [line(0.01), line(0.1), line(0.02, overhead=0.3), line(0.0, overhead=1.5)],
    ids=["cheap", "dear", "0.3", "1.5"],
)
@pytest.mark.parametrize("hoped", [0.0, 1.5])
def test_where_drafts_are_worthless_it_returns_to_plain_decoding(times, noise, hoped):
    """Whatever the method hopes for: nothing is accepted."""
    size = OnlineSize(80, CPU)

    class Hopeless(Machine):
        def answer(self, tokens):
            self.open()
            sizes = []
            for _ in range(tokens):
                n = PLAIN if self.size.rests() else SIZES[self.size.best([1 + hoped * n / (n + 4) for n in SIZES])]
                took = self.times(n)
                self.size.took(max(n, 0), 1, SECOND * took * max(self.rng.gauss(1, self.noise), 0.2))
                self.tokens, self.seconds = self.tokens + 1, self.seconds + took
                sizes.append(n)
            return sizes

    for seed in range(4):
        machine = Hopeless(times, None, noise=noise, seed=seed, size=size if noise else None)
        machine.answer(30)
        assert machine.speedup > 0.88
        machine.answer(170)
        assert machine.speedup > 0.965
    late = machine.answer(600)[-200:]
    assert sum(n > 0 for n in late) <= 12 and machine.size.pays is not True
    if times(0) > 1 + 2 * RATE:
        assert late.count(PLAIN) > 150, "nothing costly is learnt, either"


def test_it_says_once_that_drafting_does_not_pay(caplog, monkeypatch):
    monkeypatch.setattr(
        online_size.log, "disabled", False
    )  # Hydra, in tests before, disables all loggers that there are
    with caplog.at_level(logging.WARNING, logger="model.sizing.online_size"):
        machine = Machine(line(0.1, overhead=0.5), accepting(0.0, 1))
        assert machine.size.pays is None
        for _ in range(5):
            machine.answer(300)
    assert machine.size.pays is False and machine.size._unpaid >= UNPAID
    assert [record.getMessage().count("drafting does not pay here") for record in caplog.records] == [1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("before", "after", "scale"),
    [(line(0.01), line(0.1), 2.0), (line(0.1), line(0.01), 0.5), (line(0.03), line(0.03), 3.0)],
    ids=["nodes become dear", "nodes become cheap", "all is slower"],
)
def test_it_follows_a_machine_that_changes_within_50_steps(before, after, scale, seed):
    accepted = accepting(2, 6)
    machine = Machine(before, accepted, noise=0.03, seed=seed)
    machine.answer(700)
    machine.times, machine.scale = after, scale
    machine.size.opened()
    steps = machine.answer(400)[50:100]
    speeds = [(1 + accepted(max(n, 0))) / after(n) for n in steps]
    best = (1 + accepted(best_of(after, accepted))) / after(best_of(after, accepted))
    assert sum(speeds) / len(speeds) > 0.85 * best


def test_sizes_are_tried_in_turn_and_measuring_is_rare():
    machine = Machine(line(0.002), accepting(3, 8))
    first = machine.answer(150)
    drafted = [n for n in first if n > 0]
    for before, n in zip(drafted, drafted[1:], strict=False):
        assert n <= max(2 * max(drafted[: drafted.index(before) + 1]), 2) or n <= 2 * max(
            drafted[: first.index(n)], default=2
        )
    late = machine.answer(900)
    usual = max(set(late), key=late.count)
    assert late.count(PLAIN) <= 2 + len(late) // PROBE[1]
    assert sum(n != usual for n in late[-100:]) <= 12


def test_what_an_answer_may_lose_is_bounded_whatever_was_won_before():
    machine = Machine(line(0.01), accepting(3, 4))
    machine.answer(400)
    assert machine.size.balance > ALLOWED
    machine.size.opened()
    assert machine.size.balance == ALLOWED


def test_two_sequences_in_turns_book_into_one():
    size = OnlineSize(80, CPU)
    machines = [Machine(line(0.03), accepting(2, 6), seed=seed, size=size) for seed in range(2)]
    for _ in range(40):
        for machine in machines:
            machine.answer(5)
    assert size.times.at(8) == pytest.approx(line(0.03)(8), rel=0.05) and size.pays


def test_state_is_saved_and_goes_on():
    machine = Machine(line(0.03), accepting(2, 6), noise=0.05)
    machine.answer(300)
    other = OnlineSize(80, CPU)
    other.load_state_dict({name: tensor.clone() for name, tensor in machine.size.state_dict().items()})
    assert other.seconds == machine.size.seconds and other.balance == machine.size.balance
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in machine.size.state_dict().items())
    fresh = OnlineSize(80, CPU)
    fresh.load_state_dict({})
    assert fresh.seconds == OnlineSize(80, CPU).seconds, "a state of another kind"
    for another in (OnlineSize(8, CPU), OnlineSize(80, GPU)):
        was = another.state_dict()
        another.load_state_dict(machine.size.state_dict())
        assert all(torch.equal(t, another.state_dict()[name]) for name, t in was.items()), "times of other sizes"
    machine.size.reset()
    assert machine.size.seconds == other.seconds and sum(machine.size.used) == 0, "times are the machine's"


def test_what_is_told():
    machine = Machine(line(0.03), accepting(2, 6))
    machine.answer(300)
    told = machine.size.promised([1 + accepting(2, 6)(n) for n in SIZES], [accepting(2, 6)(n) for n in SIZES], chosen=8)
    assert told["plain_seconds"] == pytest.approx(SECOND, rel=0.02)
    assert told["step_seconds"][SIZES.index(8)] == pytest.approx(SECOND * 1.26, rel=0.05)
    assert told["predicted_speedup"] == pytest.approx(machine.speedup, rel=0.1)
    assert told["pays"] is True and told["resting"] is False


@pytest.mark.parametrize(("said", "most"), [("auto", 80), ("auto:12", 12), (24, None)])
def test_budgets(said, most):
    assert budget_of(said) == most


@pytest.mark.parametrize("wrong", ["many", "auto:", "auto:x", "12"])
def test_wrong_budgets(wrong):
    with pytest.raises(UserError, match="nodes="):
        budget_of(wrong)
    with pytest.raises(UserError, match="nodes="):
        DynamicRecycling(V, nodes=wrong)


def test_a_law_is_held_against_what_is_accepted():
    size = LawfulSize(OnlineSize(8, CPU), [[0.5, 0.25], [0.9, 0.8, 0.7]])
    size.sizing.times._count = [2.0] * len(size.sizing.times.knots)
    size.sizing.opened()
    size.sizing.rests()
    assert size.choose(1) > 0
    for _ in range(200):
        size.learn(0)
    assert size.choose(1) == 0 and size.choose(0) > 0, "one kind of draft says nothing of the other"
    other = LawfulSize(OnlineSize(8, CPU), [[0.5, 0.25], [0.9, 0.8, 0.7]])
    other.load_state_dict(size.state_dict())
    assert other.state_dict()["law_holds"].equal(size.state_dict()["law_holds"])


# ---- methods, on a toy model whose forwards turn the clock


MAKE = {
    "dynamic": lambda: DynamicRecycling(V, nodes="auto", pairs=64),
    "recycling": lambda: AutoRecycling(V),
    "spine": lambda: Spine(V, nodes="auto"),
    "suffix": lambda: Suffix(V, nodes="auto", history_tokens=1000),
    "suffix_recycling": lambda: SuffixRecycling(V, nodes="auto", min_match=2),
}


class Clock:
    """Time that passes by forwards alone, and with the rows of each."""

    def __init__(self, target, slope):
        self.now, self.slope, self.rows = 0.0, slope, []
        forward, static = target.forward, target.forward_static

        def counted(cache, draft, *rest, **named):
            self.turn(len(draft.tree))
            return forward(cache, draft, *rest, **named)

        def counted_static(cache, tokens, *rest, **named):
            self.turn(len(tokens))
            return static(cache, tokens, *rest, **named)

        target.forward, target.forward_static = counted, counted_static

    def turn(self, rows):
        self.rows.append(rows)
        self.now += SECOND * (1 + self.slope * (rows - 1))

    def __call__(self):
        return self.now


def prompts():
    rng = random.Random(3)
    return [[rng.randrange(3, V) for _ in range(6 + 10 * i)] * 2 for i in range(3)]


@pytest.mark.parametrize("execution", ["eager", "static"])
@pytest.mark.parametrize("slope", [0.0, 0.03, 2.0])
@pytest.mark.parametrize("method", MAKE)
def test_output_is_the_models_own(method, slope, execution):
    model = toy_model("llama")
    target, drafter = Target(model, execution=execution), MAKE[method]()
    clock = Clock(target, slope)
    sizes = []
    for prompt in prompts() * 2:
        out = generate(target, drafter, prompt, max_new_tokens=70, clock=clock)
        assert out.tokens == greedy(model, prompt, 70)
        sizes += [step.nodes - 1 for step in out.steps]
    if slope == 0.0:
        assert max(sizes) > 8, "where nodes cost nothing, many are tried"
    if slope == 2.0:
        assert sum(sizes) <= 0.1 * len(sizes), "and hardly any where each takes two steps"
    assert 0 in sizes


@pytest.mark.parametrize("method", MAKE)
def test_sequences_in_turns_and_in_threads(method):
    model = toy_model("llama")
    target, drafter = Target(model), MAKE[method]()
    clock = Clock(target, 0.02)
    open_ = {
        i: decode(target, drafter.session(), prompt, max_new_tokens=50, clock=clock)
        for i, prompt in enumerate(prompts())
    }
    found, rng = {i: [] for i in open_}, random.Random(0)
    while open_:
        i = rng.choice(sorted(open_))
        try:
            found[i] += next(open_[i]).tokens
        except StopIteration:
            del open_[i]
    wanted = [greedy(model, prompt, 50) for prompt in prompts()]
    assert [found[i] for i in range(3)] == wanted
    with ThreadPoolExecutor(3) as pool:
        outs = pool.map(lambda prompt: generate(target, drafter, prompt, max_new_tokens=50, clock=clock), prompts())
        assert [out.tokens for out in outs] == wanted


@pytest.mark.parametrize("method", MAKE)
def test_a_methods_state_holds_what_was_found(method):
    target, (first, second, third) = Target(toy_model("llama")), prompts()
    clock = Clock(target, 0.02)
    whole, half = MAKE[method](), MAKE[method]()
    for prompt in (first, second):
        generate(target, whole, prompt, max_new_tokens=60, clock=clock)
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    half.load_state_dict(state)
    assert half.sizing.seconds == whole.sizing.seconds
    assert all(torch.equal(tensor, half.state_dict()[name]) for name, tensor in state.items())
    whole.reset()
    assert half.sizing.seconds == whole.sizing.seconds, "a cold start forgets texts, not the machine"
    assert generate(target, half, third, max_new_tokens=30, clock=clock).tokens == greedy(target.model, third, 30)
    described = half.describe()
    assert sum(described["steps_by_size"]) > 0 and described["sizes"] == half.sizing.sizes


@pytest.mark.parametrize("method", MAKE)
def test_what_a_gpu_learnt_is_read_on_a_cpu(method, monkeypatch):
    """All but the sizes, which are others there."""
    target, (first, second, third) = Target(toy_model("llama")), prompts()
    clock = Clock(target, 0.02)
    with monkeypatch.context() as there:
        there.setitem(online_size.TRIED, "cpu", online_size.TRIED["cuda"])
        gpus = MAKE[method]()
        for prompt in (first, second):
            generate(target, gpus, prompt, max_new_tokens=60, clock=clock)
    state, here = gpus.state_dict(), MAKE[method]()
    assert here.sizing.sizes != gpus.sizing.sizes
    unread = here.sizing.state_dict()
    here.load_state_dict(state)
    for name, tensor in here.state_dict().items():
        if name in unread:
            assert torch.equal(tensor, unread[name])
        if name.startswith(("text", "token_", "pair_", "candidates", "law_holds")):
            assert torch.equal(tensor, state[name])
    assert generate(target, here, third, max_new_tokens=30, clock=clock).tokens == greedy(target.model, third, 30)
    described = here.describe()
    assert sum(described["steps_by_size"]) > 0 and described["sizes"] == here.sizing.sizes


def test_a_consumer_that_takes_its_time_is_not_measured():
    target, drafter = Target(toy_model("llama")), MAKE["recycling"]()
    clock = Clock(target, 0.0)
    for _ in decode(target, drafter.session(), prompts()[0], max_new_tokens=40, clock=clock):
        clock.now += 100.0
    assert drafter.sizing.times.plain_seconds == pytest.approx(SECOND, rel=0.05)


@pytest.mark.parametrize("pays", [None, True])
@pytest.mark.parametrize("method", ["dynamic", "recycling"])
def test_the_first_step_goes_with_the_prompt_whose_rows_are_read_as_far_as_they_may_cost(method, pays, monkeypatch):
    monkeypatch.setattr(online_size, "PROMPT_ROWS", 4)
    target, prompt = Target(toy_model("llama")), prompts()[0]
    settings = {"recycle_prompt": True} if method == "recycling" else {}
    drafter, read = make_method(method, target, **settings), []
    drafter.sizing.pays = pays
    session = drafter.session()
    observe = session.observe_prompt

    def observed(tokens, logits):
        read.append((tokens, logits.argmax(-1).tolist()))
        observe(tokens, logits)

    session.observe_prompt = observed
    steps = decode(target, session, prompt, max_new_tokens=8, clock=Clock(target, 0.0))
    first = next(steps)
    assert first.nodes == 1 and first.tokens == greedy(target.model, prompt, 1), "no forward of its own, and no draft"
    ((tokens, chosen),) = read
    assert tokens == prompt[-4 if pays else -1 :]
    following = target.model(torch.tensor([prompt])).logits[0].argmax(-1).tolist()
    assert chosen == following[-len(tokens) :], "the rows are those of the tokens"
    steps.close()


def test_the_library_finds_sizes_unless_told():
    target = Target(toy_model("llama"))
    assert set(SIZED) == set(MAKE)
    for name in SIZED:
        drafter = make_method(name, target)
        assert isinstance(drafter.sizing, OnlineSize) and drafter.sizing.sizes[-1] <= 80, name
        assert make_method(name, target, nodes="auto:12").sizing.sizes[-1] == 12
    assert make_method("recycling", target, tree="2.2.2").sizing is None
    assert type(make_method("recycling", target, nodes=6)) is TokenRecycling
    assert make_method("recycling", target, nodes=6).max_nodes == 7
    assert make_method("dynamic", target, nodes=6).sizing is None
    assert make_method("suffix_recycling", target, tree="best:6").sizing is None
    assert not finds_size(Vanilla) and not finds_size(TokenRecycling) and finds_size(Spine)
    with pytest.raises(UserError, match="not both"):
        make_method("recycling", target, tree="best:4", nodes=4)
    with pytest.raises(UserError, match="suffix_recycling"):
        SuffixRecycling(V, build_template("best", nodes=4), nodes="auto")
    with pytest.raises(UserError, match="suffix_recycling"):
        SuffixRecycling(V)
    with pytest.raises(UserError, match="step_seconds"):
        DynamicRecycling(V, nodes="auto", step_seconds={0: 1.0})
    with pytest.raises(UserError, match="max_draft"):
        Suffix(V, nodes=6)
