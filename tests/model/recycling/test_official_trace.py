"""Against what the authors' own loop accepted, step by step, with the shipped model on the sample bench.

official_trace.jsonl: one line a turn, first all 56 questions cold, then hot; recorded from github.com/Luowaterbi/
TokenRecycling (commit 1b4c05c, transformers 4.37.1, float32, one thread) with k = 8, tree 2.2.2, at most 200 tokens.
The last accepted length of a turn is the official step's whole one, which may run past the answer's end.
"""

import pytest

from model.engine import Target, generate
from model.recycling import TokenRecycling, build_template
from tests.model.methods.public_traces import EOS, TRACE, embedded

WHOLE = [("cold", "static", 56), ("hot", "eager", 56)]
SOME = [("cold", "eager", 4), ("hot", "static", 6)]


@pytest.mark.parametrize(
    ("start", "execution", "first"),
    [*SOME, *(pytest.param(*whole, marks=pytest.mark.slow) for whole in WHOLE)],
)
def test_every_accepted_length_is_the_official_one(start, execution, first):
    turns = [turn for turn in TRACE if turn["start"] == start]
    assert len(turns) == 56
    target = Target(embedded())
    drafter = TokenRecycling(target.vocab_size, build_template("2.2.2"), eos={EOS})
    for turn in turns[:first]:
        if start == "cold":
            drafter.reset()
        out = generate(
            target, drafter, turn["prompt_ids"], max_new_tokens=200, eos={EOS}, execution=execution
        )
        official = turn["accept_lengths"]
        assert out.accept_lengths[:-1] == official[:-1], turn["question_id"]
        assert len(out.steps) == len(official) and out.accept_lengths[-1] <= official[-1]
        assert out.tokens[: len(turn["output_ids"])] == turn["output_ids"][: len(out.tokens)]
