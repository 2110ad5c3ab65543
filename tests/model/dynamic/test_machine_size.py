"""The size of a draft for the machine: by hand, what it tells, what is saved."""

import random

import pytest

from model.dynamic.machine_size import MachineSize
from model.errors import UserError

SECONDS = {0: 1.0, 1: 1.1, 2: 1.2, 4: 1.4, 8: 1.8}


def test_by_hand():
    size = MachineSize(SECONDS, 0.9, 8)
    # tokens 1, 1.5, 1.6 and, as there are no more, 1.65 in 1.0, 1.1, 1.2, 1.4, 1.8 seconds
    assert size.choose([1.0, 0.5, 0.1, 0.05]) == 1
    # 1, 1.5, 1.9, 2.3 in 1.0, 1.1, 1.2 and 1.4 seconds: 1.58 with two, 1.64 with four
    assert size.choose([1.0, 0.5, 0.4, 0.3, 0.1]) == 4
    assert size.choose([1.0, 0.05]) == 0, "where nothing is worth its time, plain decoding"
    told = size.describe()
    assert told["steps_by_size"] == [1, 1, 0, 1, 0]
    assert size.choose([1.0, 0.5, 0.1]) == 1 and size.describe()["chosen"] == 1, "the most frequent one"
    assert told["predicted_speedup"] == pytest.approx(0.9 * (1.5 + 2.3 + 1.0) / (1.1 + 1.4 + 1.0))
    assert told["expected_accepted"] == pytest.approx([0, (0.5 + 0.5 + 0.05) / 3, 1.55 / 3, 2.0 / 3, 2.0 / 3])
    assert told["predicted_speedup_by_size"][4] == pytest.approx(0.9 * (1 + 2.0 / 3) / 1.8)


def test_a_draft_grows_no_further_than_can_pay():
    size, rng = MachineSize(SECONDS, 0.9, 8), random.Random(0)
    # with one node 1.5 / 1.1 = 1.36; as many as eight of 0.1 give 2.2 / 1.8, of 0.2 2.9 / 1.8 = 1.61
    assert size.enough([1.0, 0.5], 0.1) and not size.enough([1.0, 0.5], 0.2)
    assert not size.enough([1.0, 0.5, 0.1, 0.1], 0.0), "three are no size: it is looked at with the fourth"
    assert size.enough([1.0] * 9, 1.0), "no larger one"
    for _ in range(200):  # where it stops the choice is that of the whole draft
        drawn = [1.0, *sorted((rng.random() ** 3 for _ in range(8)), reverse=True)]
        end = next(n for n in range(9) if n == 8 or size.enough(drawn[: n + 1], drawn[n + 1]))
        assert size.choose(drawn[: end + 1]) == size.choose(drawn)


def test_the_budget_bounds_it():
    size = MachineSize(dict.fromkeys(SECONDS, 1.0), 1.0, 3)
    assert size.sizes == [0, 1, 2] and size.choose([1.0] * 9) == 2
    with pytest.raises(UserError, match="budget"):
        MachineSize(SECONDS, 1.0, -1)
    with pytest.raises(UserError, match="step time of 0 nodes"):
        MachineSize({1: 1.0}, 1.0, 8)


def test_what_is_saved_comes_back():
    size, other = MachineSize(SECONDS, 0.9, 8), MachineSize(SECONDS, 0.9, 8)
    assert other.describe()["predicted_speedup"] is None
    size.choose([1.0, 0.5])
    other.load_state_dict({name: tensor.clone() for name, tensor in size.state_dict().items()})
    assert other.describe() == size.describe()
    other.load_state_dict({})
    assert other.describe()["steps_by_size"] == [0] * 5, "a state that chose no sizes"
    with pytest.raises(UserError, match="other sizes"):
        MachineSize(SECONDS, 0.9, 2).load_state_dict(size.state_dict())
