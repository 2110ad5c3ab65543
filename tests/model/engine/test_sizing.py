"""The size of a draft, found while decoding: by a clock that the test turns, so that no machine decides anything."""

import random
from itertools import product
from statistics import mean, median

import pytest
import torch

from model.engine import Sizing, Target, generate
from model.engine.contract.sizing import POLICIES
from model.engine.graphs.static_step import StaticForward
from model.errors import UserError
from model.methods import make_method
from tests.conftest import greedy

V = 61
GPU = torch.device("cuda")  # is only asked for its kind
CPU = torch.device("cpu")
SECOND = 0.025  # of a plain step
PLAIN = -1


def line(slope, overhead=0.02):
    """T(n): a plain step takes 1."""
    return lambda n: 1.0 if n == PLAIN else 1.0 + overhead + slope * n


def accepting(most, half):
    """E(n): it saturates."""
    return lambda n: most * n / (n + half) if n > 0 else 0.0


MACHINES = {
    "gpu": (line(0.005), accepting(3, 8)),
    "cheap": (line(0.015, 0.05), accepting(2.2, 6)),
    "medium": (line(0.03), accepting(2, 6)),
    "expensive": (line(0.06), accepting(1.5, 4)),
    "a step at 8": (lambda n: 1.0 if n < 0 else 1.02 if n <= 8 else 1.8, accepting(2, 6)),
    "a step at 1": (
        lambda n: 1.0 if n < 0 else 1.02 if n == 0 else 1.9 + 0.012 * n,
        accepting(2.4, 6),
    ),
}


class Machine:
    """Steps on a machine where T(n) and E(n) are known; a draft of n nodes has E(n) accepted, drawn by chance.

    `promised` is what the method says instead of E(n). Times have noise and spikes; what is reported has neither.
    """

    def __init__(
        self,
        times,
        accepted,
        *,
        seed=0,
        noise=0.0,
        spikes=0.0,
        promised=None,
    ):
        self.times = times
        self.accepted = accepted
        self.noise = noise
        self.spikes = spikes
        self.scale = 1.0
        self.rng = random.Random(seed)
        self.size = Sizing("auto", CPU, filling=0.0)
        sums = [1.0 + (promised or accepted)(n) for n in range(self.size.sizes[-1] + 1)]
        self.likelihoods = [1.0, *(b - a for a, b in zip(sums, sums[1:], strict=False))]

    def answer(self, tokens):
        """Return an answer's speed over the oracle's, the best size throughout or plain decoding."""
        self.size.begin()
        added = 0.0
        seconds = 0.0
        self.sizes = []
        while added < tokens:
            n = PLAIN if self.size.begin_step() else self.size.choose(self.likelihoods)
            expected = self.accepted(n)
            took = self.times(n) * self.scale
            drafts = 0
            while drafts < n and self.rng.random() < expected / (1 + expected):
                drafts += 1
            spike = self.rng.uniform(3, 10) if self.rng.random() < self.spikes else 1.0
            noise = max(self.rng.gauss(1, self.noise), 0.2) * spike
            self.size.observe(max(n, 0), 1 + drafts, SECOND * took * noise)
            added += 1 + expected
            seconds += took
            self.sizes.append(n)
        best = max((1 + self.accepted(n)) / self.times(n) for n in range(PLAIN, 81)) / self.scale
        return added / seconds / best


@pytest.mark.parametrize(
    ("noise", "spikes", "first", "later"), [(0.0, 0.0, 0.93, 0.97), (0.3, 0.03, 0.83, 0.9)]
)
def test_it_has_nearly_the_speed_of_an_oracle(noise, spikes, first, later):
    shares = []
    for (times, accepted), seed in product(MACHINES.values(), range(2)):
        machine = Machine(times, accepted, seed=seed, noise=noise, spikes=spikes)
        shares.append([machine.answer(200), machine.answer(1000)])
    means = [mean(column) for column in zip(*shares, strict=True)]
    assert means[0] > first and means[1] > later, means


def test_a_batch_has_step_times_of_its_own():
    """A row takes a hundredth of a forward: alone large drafts pay, and of eight sequences small ones."""
    size = Sizing("auto", CPU, filling=0.0)
    likelihoods = [1.0, *(0.7 * 0.85**n for n in range(80))]

    def steps(width):
        chosen = []
        for _ in range(120):
            plain = size.begin_step(width)
            nodes = 0 if plain else [size.choose(likelihoods) for _ in range(width)][-1]
            seconds = SECOND * (1 + 0.01 * width * (1 + nodes))
            size.observe(nodes, sum(likelihoods[: 1 + nodes]), seconds)
            chosen.append(nodes)
        return median(chosen[60:])

    alone = steps(1)
    times = size.times
    assert 1.5 * steps(8) < alone
    assert size.times[0] / times[0] == pytest.approx(1.08 / 1.01, rel=0.03)
    assert size.state_dict()["sizing"][0].tolist() == times and steps(1) == alone


@pytest.mark.parametrize(("noise", "spikes", "least"), [(0.03, 0.0, 0.93), (0.3, 0.03, 0.75)])
@pytest.mark.parametrize(
    ("before", "after", "scale"),
    [(line(0.01), line(0.1), 2.0), (line(0.1), line(0.01), 0.5), (line(0.03), line(0.03), 3.0)],
    ids=["nodes become expensive", "nodes become cheap", "all is slower"],
)
def test_it_follows_a_machine_that_changes_and_changes_back(
    before, after, scale, noise, spikes, least
):
    shares = []
    for seed in range(3):
        machine = Machine(before, accepting(2, 6), seed=seed, noise=noise, spikes=spikes)
        machine.answer(1000)
        for machine.times, machine.scale in ((after, scale), (before, 1.0)):
            machine.answer(100)
            shares.append(machine.answer(300))
    assert mean(shares) > least, shares


@pytest.mark.parametrize(
    ("times", "noise", "hoped", "least"),
    [
        (line(0.01), 0.0, 1.5, 0.96),
        (line(0.02, overhead=0.3), 0.0, 0.0, 0.96),
        (line(0.0, overhead=1.5), 0.0, 1.5, 0.95),
        (line(1.0), 0.0, 1.5, 0.95),
        (line(0.1), 0.3, 1.5, 0.92),
    ],
)
def test_worthless_drafts_lose_little_of_200_tokens_whatever_the_method_promises(
    times, noise, hoped, least
):
    for seed in range(2):
        settings = dict(seed=seed, noise=noise, spikes=noise / 10)
        machine = Machine(times, accepting(0, 1), promised=accepting(hoped, 4), **settings)
        speeds = [machine.answer(200) for _ in range(4)]
        assert min(speeds) > least and speeds[-1] > least + 0.01, (seed, speeds)
    assert machine.sizes.count(PLAIN) > 100, "a rest costs nothing"


@pytest.mark.parametrize("most", [1, 80])
@pytest.mark.parametrize("device", [CPU, GPU])
def test_it_begins_with_the_size_for_the_device_within_the_budget(device, most):
    size = Sizing(f"auto:{most}", device)
    assert size.sizes[-1] == most
    assert size.begin_step(), "first a plain step, with which drafts are compared"
    size.observe(0, 1, SECOND)
    assert not size.begin_step()
    assert size.choose([1.0] + [0.01] * most) == min(POLICIES[device.type].start, most)


@pytest.mark.parametrize(("device", "sizes"), [(CPU, [12, 24, 2]), (GPU, [15, 31, 3])])
def test_a_short_drafts_time_is_that_of_the_size_that_holds_it(device, sizes):
    for nodes, size in zip((10, 20, 1), sizes, strict=True):
        sizing = Sizing("auto", device)
        assert sizing.begin_step()
        sizing.observe(0, 1, SECOND)
        assert not sizing.begin_step()
        sizing.observe(nodes, 1, SECOND)
        assert sizing.describe()["steps_by_size"].index(1) == sizing.sizes.index(size)


def test_what_is_described_and_saved():
    machine = Machine(line(0.03), accepting(2, 6))
    share = machine.answer(600)
    described = machine.size.describe()
    assert described["plain_seconds"] == pytest.approx(SECOND)
    assert described["step_seconds"][described["sizes"].index(8)] == pytest.approx(SECOND * 1.26)
    assert described["predicted_speedup"] == pytest.approx(share * 2.143 / 1.26, rel=0.1)
    other = Sizing("auto", CPU)
    other.load(other.read(machine.size.state_dict()))
    assert other.describe() == described
    machine.size.reset()
    assert machine.size.times == other.times
    assert not any(machine.size.describe()["steps_by_size"])
    another = Sizing("auto:8", CPU)
    assert another.read(other.state_dict()) is None, "times of other sizes"


# ---- methods, on a toy model whose forwards turn the clock


class Clock:
    """Time that passes by forwards alone, and with the rows of each."""

    def __init__(self, target, slope):
        self.now = 0.0
        self.slope = slope
        forward = target.forward
        static = target.forward_static

        def counted(cache, draft, *rest, **named):
            self.turn(len(draft.tree))
            return forward(cache, draft, *rest, **named)

        def counted_static(cache, tokens, *rest, **named):
            self.turn(len(tokens))
            return static(cache, tokens, *rest, **named)

        target.clock = self
        target.forward = counted
        target.forward_static = counted_static

    def turn(self, rows):
        self.now += SECOND * (1 + self.slope * (rows - 1))

    def __call__(self):
        return self.now


def prompts():
    rng = random.Random(3)
    return [[rng.randrange(3, V) for _ in range(6 + 10 * i)] * 2 for i in range(3)]


def test_output_is_the_models_own_and_the_size_follows_the_cost(llama):
    texts = [(prompt, greedy(llama, prompt, 40)) for prompt in prompts()] * 2
    for execution, slope in (("eager", 0.0), ("eager", 2.0), ("static", 0.03)):
        target = Target(llama)
        drafter = make_method("dynamic", target)
        Clock(target, slope)
        sizes = []
        for prompt, expected in texts:
            out = generate(target, drafter, prompt, max_new_tokens=40, execution=execution)
            assert out.tokens == expected
            sizes += [step.nodes - 1 for step in out.steps]
        assert 0 in sizes
        assert slope != 0.0 or max(sizes) > 8, "where nodes cost nothing, many are tried"
        assert slope != 2.0 or sum(sizes) <= 0.1 * len(sizes), (
            "and hardly any where each takes two steps"
        )


def test_a_step_that_makes_a_new_shape_is_not_measured(llama, monkeypatch):
    target = Target(llama)
    made = StaticForward.__init__
    drafter = make_method("dynamic", target)
    clock = Clock(target, 0.0)

    def slow(*args):
        clock.now += 100.0
        made(*args)

    monkeypatch.setattr(StaticForward, "__init__", slow)
    generate(target, drafter, prompts()[0], max_new_tokens=40, execution="static")
    assert clock.now > 100 and max(drafter.sizing.times) < 10 * SECOND


def test_the_library_finds_sizes_unless_told(llama):
    target = Target(llama)
    assert make_method("dynamic", target).sizing.sizes[-1] <= 80
    assert make_method("dynamic", target, nodes=6).sizing is None
    for settings, nodes in (({}, 80), (dict(tree="best:7"), 7), (dict(nodes=6), 6)):
        recycling = make_method("recycling", target, **settings)
        assert recycling.sizing is None and len(recycling.tree) == 1 + nodes, settings
    with pytest.raises(UserError, match="recycling: nodes=auto: must be a number; method dynamic"):
        make_method("recycling", target, nodes="auto")


def test_the_first_steps_begin_from_measured_times_of_rows():
    """Interpolated, and beyond the last number of rows in a line; a saved state's own times count more."""
    sizing = Sizing("auto", CPU)
    assert sizing.sizes[-1] == 80
    sizing.expect((1, 8, 40), [10.0, 12.0, 20.0])
    plain, *times = sizing.times
    overhead = POLICIES["cpu"].overhead
    assert plain == 1.0 and times[0] == pytest.approx(1 + overhead)
    assert times[sizing.sizes.index(40)] == pytest.approx(2.0 + 0.025 + overhead)
    assert times[-1] == pytest.approx(3.0 + overhead)
    saved = sizing.state_dict()
    saved["sizing"][0] *= 2
    sizing.load(sizing.read(saved))
    assert sizing.times[0] == 2.0
