"""LogitSpec against the public code's own trace, its continuations against a slow version, and by hand.

logitspec_trace.jsonl: one line a turn, the 56 first turns of the sample bench in file order (their prompts and outputs
are those of ../recycling/official_trace.jsonl), recorded from github.com/smart-lty/LogitSpec (commit 659bba9,
transformers 4.37.1, float32, one thread) with its defaults, at most 200 tokens, EOS 2.

There a step commits its root and what is accepted, here what is accepted and the next root. So this engine has a first
step of one token, with the prompt, and the accepted lengths behind it are the public ones; the last is one shorter, and
where EOS is a root there is none, as this engine has ended with the step that found it.
"""

import random

import pytest

from model.engine import Target
from model.methods.logitspec import Continuations, LogitSpec
from tests.model.methods.public_traces import EXECUTED, answered, embedded


@EXECUTED
def test_every_step_is_the_public_codes(execution, every):
    target, steps = Target(embedded()), 0
    for turn, out in answered(
        LogitSpec(target.vocab_size), target, "logitspec_trace.jsonl", every, execution
    ):
        *others, last = turn["accept_lengths"]
        assert out.accept_lengths == [1, *others] + [last - 1] * (last > 1), turn["question_id"]
        assert [step.nodes for step in out.steps] == [1] + [64] * (len(out.steps) - 1)
        steps += len(others) + 1
    assert every > 1 or steps == 2198


def write(pool, text, first):
    """The continuations of all n-grams from there on, by tuples; the newer one counts unless it is shorter."""
    for i in range(max(first, 0), len(text)):
        for n in (1, 2, 3):
            gram, continuation = tuple(text[i : i + n]), text[i + n : i + n + 20]
            if i + n < len(text) and len(pool.get(gram, [])) <= len(continuation):
                pool[gram] = continuation


@pytest.mark.parametrize("size", [2, 3])
def test_continuations_are_those_of_writing_the_whole_window_every_time(size):
    """Steps of 19 to 21 tokens leave continuations behind that are shorter than they could be."""
    rng, slow = random.Random(size), {}
    text = [rng.randrange(size) for _ in range(rng.randrange(1, 60))]
    write(slow, text, 0)
    fast = Continuations(size, text)
    for _ in range(40):
        step = [rng.randrange(size) for _ in range(rng.choice((1, 2, 5, 18, 19, 20, 21)))]
        text += step
        write(slow, text, len(text) - 40)
        fast.commit(step)
        for gram, continuation in slow.items():
            pool = fast._pools[len(gram) - 1]
            end, count = divmod(
                pool[sum(token * size**i for i, token in enumerate(reversed(gram)))], 21
            )
            assert fast.tokens[end : end + count] == continuation, gram
        assert sum(map(len, fast._pools)) == len(slow)
    # what one prompt leaves to the next is what reading all of it at once gives, so that a saved text is enough
    fast.extend([0, 1])
    assert Continuations(size, fast.tokens)._pools == fast._pools
