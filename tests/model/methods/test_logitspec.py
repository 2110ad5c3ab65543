"""LogitSpec against the public code's own trace, against a slow second version, and by hand.

logitspec_trace.jsonl: one line a turn, the 56 first turns of the sample bench in file order (their prompts and outputs
are those of ../recycling/official_trace.jsonl), recorded from github.com/smart-lty/LogitSpec (commit 659bba9,
transformers 4.37.1, float32, one thread) with its defaults, at most 200 tokens, EOS 2.

There a step commits its root and what is accepted, here what is accepted and the next root. So this engine has a first
step of one token, with the prompt, and the accepted lengths behind it are the public ones; the last is one shorter, and
where EOS is a root there is none, as this engine has ended with the step that found it.
"""

import random

import pytest
import torch

from model.engine import Target, generate
from model.errors import UserError
from model.methods.logitspec import Continuations, LogitSpec, side_by_side
from tests.model.methods.logitspec_reference import SlowLogitSpec
from tests.model.methods.public_traces import EOS, embedded, public_turns
from tests.model.methods.streams import V, drafts, paths_of, random_prompt


@pytest.mark.parametrize(
    ("execution", "every"), [("eager", 4), ("static", 8), pytest.param("eager", 1, marks=pytest.mark.slow)]
)
def test_every_step_is_the_public_codes(execution, every):
    target = Target(embedded())
    drafter = LogitSpec(target.vocab_size)
    turns = public_turns("logitspec_trace.jsonl")[::every]
    for turn in turns:
        drafter.reset()
        out = generate(target, drafter, turn["prompt_ids"], max_new_tokens=200, eos={EOS}, execution=execution)
        *others, last = turn["accept_lengths"]
        assert out.accept_lengths == [1, *others] + [last - 1] * (last > 1), turn["question_id"]
        assert [step.nodes for step in out.steps] == [1] + [64] * (len(out.steps) - 1)
        assert out.tokens[: len(turn["output_ids"])] == turn["output_ids"][: len(out.tokens)]
    if every == 1:
        assert (len(turns), sum(len(turn["accept_lengths"]) for turn in turns)) == (56, 2198)


@pytest.mark.parametrize("nodes", [63, 1, 2, 9, 24, 30])
@pytest.mark.parametrize("seed", range(4))
def test_every_draft_is_the_slow_references(nodes, seed):
    prompt = random_prompt(seed)
    slow, drafter, most = SlowLogitSpec(prompt, seed, capacity=nodes + 1), LogitSpec(V, nodes=nodes), 0
    for i, (draft, verification, text) in enumerate(drafts(drafter, prompt, 40, seed)):
        if i == 0:
            assert len(draft.tree) == 1
            continue
        root, paths, committed = slow.step()
        assert draft.tokens[0] == root and text == slow.stream[: len(text)]
        assert paths_of(draft) == sorted(tuple(path[: n + 1]) for path in paths for n in range(len(path))), i
        assert [root, *verification.tokens[:-1]] == committed, i
        assert len(draft.tree) - 1 == sum(map(len, paths)) <= nodes
        most = max(most, len(committed))
    assert most > min(nodes, 3), "something must be accepted"


@pytest.mark.parametrize("seed", range(8))
def test_continuations_are_those_of_writing_the_whole_window_every_time(seed):
    """Steps of 19 to 21 tokens leave continuations behind that are shorter than they could be."""
    rng = random.Random(seed)
    size = 2 + seed % 4
    slow, text = SlowLogitSpec([], seed), [rng.randrange(size) for _ in range(rng.randrange(1, 60))]
    slow.stream = list(text)
    slow.write(0)
    fast = Continuations(size, text)
    for _ in range(40):
        step = [rng.randrange(size) for _ in range(rng.choice((1, 2, 5, 18, 19, 20, 21)))]
        slow.stream += step
        slow.write(len(slow.stream) - 40)
        fast.commit(step)
        for gram, continuation in slow.pool.items():
            pool = fast._pools[len(gram) - 1]
            end, count = divmod(pool[sum(token * size**i for i, token in enumerate(reversed(gram)))], 21)
            assert fast.tokens[end : end + count] == continuation, gram
        assert sum(map(len, fast._pools)) == len(slow.pool)
    # what one prompt leaves to the next is what reading all of it at once gives, so that a saved text is enough
    fast.extend([0, 1])
    whole = Continuations(size, fast.tokens)
    assert whole._pools == fast._pools


def test_continuations_by_hand():
    text = Continuations(61, [1, 2, 3, 4, 1, 2, 5])
    assert text.after(-1, 1, 2, 20) == [3, 4, 1, 2, 5], "the oldest has most behind it"
    assert text.after(4, 1, 2, 2) == [5], "three tokens before two"
    assert text.after(9, 9, 3, 2) == [4, 1] and text.after(9, 9, 5, 20) == []
    text.commit(range(10, 28))
    assert text.after(9, 1, 2, 20) == [3, 4, 1, 2, 5, *range(10, 25)]
    text.commit([28])
    assert text.after(9, 1, 2, 20) == [5, *range(10, 29)], "the newer has 20 tokens behind it now"


def test_a_draft_by_hand():
    drafter = LogitSpec(61, nodes=15)
    session = drafter.session()
    session.begin([1, 2, 3, 9, 1, 4, 9, 1])
    session._ranked = [2, 7, 3, 4, 5, 6, 8, 11, 12, 13, 14, 15]
    # the text, and the root 2 behind it: (1, 2) was followed by 3 9 1 4 9 1, which is the first path
    # 7 and the rest are candidates, 3 with (9, 1, 4), 4 with (9, 1), which end as the draft has 15 nodes
    draft = session.draft(2)
    paths = [[3, 9, 1, 4, 9, 1], [7], [3, 9, 1, 4], [4, 9, 1], [5]]
    assert draft.tokens.tolist() == [2, 3, 7, 3, 4, 5, 9, 9, 9, 1, 1, 1, 4, 4, 9, 1]
    assert (draft.tokens.tolist(), draft.tree.parent_of) == side_by_side(2, paths)
    session._ranked = [7, 2, *range(20, 60)]
    assert paths_of(session.draft(2))[-1] == (27,), "where another is first, the root is left out all the same"


def test_how_long_a_path_may_be():
    """By rank in the logits, the root's included: up to 8 four tokens, up to 32 three, then one."""
    drafter = LogitSpec(61, nodes=200)
    session = drafter.session()
    session.begin([token for token in range(1, 61) for _ in range(5)])
    session._ranked = list(range(60, 0, -1))
    lengths = [len(path) for path in session._paths(60)]
    assert lengths == [2] + [4] * 8 + [3] * 24 + [1] * 27, "the first path is what followed 60 60 60 first"


def test_equal_paths_are_verified_each_for_itself():
    drafter = LogitSpec(61)
    session = drafter.session()
    session.begin([1, 2, 3, 4, 5, 1])
    session._ranked = [2, 3, 9]
    assert paths_of(session.draft(2)).count((3, 4)) == 2


def test_what_is_carried():
    """Nothing where history_tokens is 0; else the text but for the answer's last token, which nothing follows yet."""
    target = Target(embedded())
    prompt = public_turns("logitspec_trace.jsonl")[0]["prompt_ids"]
    alone, drafter = LogitSpec(target.vocab_size, history_tokens=0), LogitSpec(target.vocab_size)
    assert not alone.stateful and alone.state_dict() == {} and drafter.stateful
    out = generate(target, drafter, prompt, max_new_tokens=40)
    text = drafter.state_dict()["text"].tolist()
    assert text[: len(prompt) + 39] == prompt + out.tokens[:39]
    assert len(generate(target, drafter, prompt, max_new_tokens=40).steps) < 0.5 * len(out.steps)
    first = generate(target, alone, prompt, max_new_tokens=40).steps
    assert first == generate(target, alone, prompt, max_new_tokens=40).steps == out.steps


def test_settings_out_of_range_are_refused():
    for nodes in (0, 4097, 1.5, None):
        with pytest.raises(UserError, match=f"logitspec: nodes={nodes} must be from 1 to 4096"):
            LogitSpec(61, nodes=nodes)
    with pytest.raises(UserError, match="history_tokens=1: must be 0"):
        LogitSpec(61, history_tokens=1)
    with pytest.raises(UserError, match="start: the saved text"):
        LogitSpec(61).load_state_dict({"text": torch.tensor([61])})
    assert LogitSpec(61).max_nodes == 64
