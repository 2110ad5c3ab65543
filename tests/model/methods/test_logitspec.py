"""LogitSpec against the public code's own trace.

logitspec_trace.jsonl: one line a turn, the 56 first turns of the sample bench in file order (their prompts and outputs
are those of ../recycling/official_trace.jsonl), recorded from github.com/smart-lty/LogitSpec (commit 659bba9,
transformers 4.37.1, float32, one thread) with its defaults, at most 200 tokens, EOS 2.

There a step commits its root and what is accepted, here what is accepted and the next root. So this engine has a first
step of one token, with the prompt, and the accepted lengths behind it are the public ones; the last is one shorter, and
where EOS is a root there is none, as this engine has ended with the step that found it.
"""

from model.engine import Target
from model.methods.rivals.logitspec import LogitSpec
from tests.model.methods.public_traces import EXECUTED, answered, embedded


@EXECUTED
def test_every_step_is_the_public_codes(execution, every):
    target = Target(embedded())
    steps = 0
    for turn, out in answered(
        LogitSpec(target.vocab_size), target, "logitspec_trace.jsonl", every, execution
    ):
        *others, last = turn["accept_lengths"]
        assert out.accept_lengths == [1, *others] + [last - 1] * (last > 1), turn["question_id"]
        assert [step.nodes for step in out.steps] == [1] + [64] * (len(out.steps) - 1)
        steps += len(others) + 1
    assert every > 1 or steps == 2198
