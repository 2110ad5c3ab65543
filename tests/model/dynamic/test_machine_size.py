"""The size of a draft for the machine: by hand, what it tells, what is saved."""

import copy
import itertools
import random

import pytest

from model.dynamic.machine_size import MachineSize
from model.errors import UserError
from model.sizing import draft_size
from model.sizing.draft_size import StepCosts

SECONDS = {0: 1.0, 1: 1.1, 2: 1.2, 4: 1.4, 8: 1.8}


def test_by_hand():
    size = MachineSize(StepCosts(SECONDS, 0.9, 8))
    # At first a second is worth a token, the plain step's, and drafts taught nothing yet. Tokens less cost, by size: 0,
    # 0.4, 1.59 - 1.2, 1.64 - 1.4
    assert size.choose([1.0, 0.5, 0.09, 0.05]) == 1
    # now a second is worth (1 + 0.5 / 64) / (1 + 0.1 / 64) tokens, 1.0062: 0, 0.39, 0.69, 0.89
    assert size.choose([1.0, 0.5, 0.4, 0.3, 0.1]) == 4
    assert size.choose([1.0, 0.05]) == 0, "where nothing is worth its time, plain decoding"
    described = size.describe()
    assert described["steps_by_size"] == [1, 1, 0, 1, 0]
    assert described["predicted_speedup"] == pytest.approx(0.9 * (1.5 + 2.3 + 1.0) / (1.1 + 1.4 + 1.0))
    assert described["expected_accepted"] == pytest.approx([0, (0.5 + 0.5 + 0.05) / 3, 1.54 / 3, 1.99 / 3, 1.99 / 3])
    assert described["predicted_speedup_by_size"][4] == pytest.approx(0.9 * (1 + 1.99 / 3) / 1.8)
    assert size.choose([1.0, 0.5, 0.09]) == 1 and size.describe()["chosen"] == 1, "the most frequent one"


def test_what_a_draft_teaches_counts():
    """Where drafts add a token a step at the speed of plain decoding, n nodes are worth 0.2 ln(1 + n) tokens more."""
    size = MachineSize(StepCosts({0: 1.0, 4: 2.0, 8: 3.0}, 1.0, 8))
    size._recent[:] = 2.0, 2.0
    assert size.choose([1.0, *[0.18] * 4]) == 4  # 0.72 + 0.2 ln 5 = 1.04 tokens for a second
    size._recent[:] = 2.0, 2.0
    assert size.choose([1.0, *[0.16] * 4]) == 0  # 0.64 + 0.32
    size._recent[:] = 2.0, 2.0
    assert size.choose([1.0, *[0.2] * 8]) == 4  # 0.8 + 0.32 for one; 0.8 + 0.12 for another


def test_it_finds_the_sizes_that_are_best_together(monkeypatch):
    """Two kinds of steps: the best pair of sizes by trying all of them, and what it settles on."""
    monkeypatch.setattr(draft_size, "FILLING", 0.0)
    likely_nodes, unlikely_nodes = [1.0, *[0.9] * 8], [1.0, 0.15, 0.12, *[0.02] * 6]
    size = MachineSize(StepCosts(SECONDS, 1.0, 8))
    for _ in range(500):
        last = size.choose(likely_nodes), size.choose(unlikely_nodes)

    def speed(pair):
        return sum(sum(kind[: 1 + n]) for kind, n in zip((likely_nodes, unlikely_nodes), pair, strict=True)) / sum(
            SECONDS[n] for n in pair
        )

    assert last == max(itertools.product(SECONDS, SECONDS), key=speed)


def test_a_draft_grows_no_further_than_can_pay():
    size, rng = MachineSize(StepCosts(SECONDS, 0.9, 8)), random.Random(0)
    # with one node 1.5 - 1.1 tokens are won; seven more of 0.1 cost as much as they give, of 0.12 less
    assert size.enough([1.0, 0.5], 0.09) and not size.enough([1.0, 0.5], 0.12)
    assert not size.enough([1.0, 0.5, 0.1, 0.1], 0.0), "three are no size: it is looked at with the fourth"
    assert size.enough([1.0] * 9, 1.0), "no larger one"
    for _ in range(200):  # where it stops the choice is that of the whole draft
        drawn = [1.0, *sorted((rng.random() ** 3 for _ in range(8)), reverse=True)]
        end = next(n for n in range(9) if n == 8 or size.enough(drawn[: n + 1], drawn[n + 1]))
        other = copy.deepcopy(size)
        assert size.choose(drawn[: end + 1]) == other.choose(drawn)


def test_the_budget_bounds_it():
    size = MachineSize(StepCosts(dict.fromkeys(SECONDS, 1.0), 1.0, 3))
    assert size.sizes == [0, 1, 2] and size.choose([1.0] * 9) == 2
    with pytest.raises(UserError, match="budget"):
        MachineSize(StepCosts(SECONDS, 1.0, -1))
    with pytest.raises(UserError, match="step time of 0 nodes"):
        MachineSize(StepCosts({1: 1.0}, 1.0, 8))


def test_what_is_saved_comes_back():
    size, other = MachineSize(StepCosts(SECONDS, 0.9, 8)), MachineSize(StepCosts(SECONDS, 0.9, 8))
    assert other.describe()["predicted_speedup"] is None
    size.choose([1.0, 0.5])
    other.load_state_dict({name: tensor.clone() for name, tensor in size.state_dict().items()})
    assert other.describe() == size.describe()
    other.load_state_dict({})
    assert other.describe()["steps_by_size"] == [0] * 5, "a state that chose no sizes"
    with pytest.raises(UserError, match="other sizes"):
        MachineSize(StepCosts(SECONDS, 0.9, 2)).load_state_dict(size.state_dict())
