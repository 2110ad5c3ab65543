"""The acceptance record against vLLM's own example, and against what AIPerf refuses in one."""

from model.engine.loop.answer import acceptance_record

# The example of PR 48915 and of vLLM's documentation: 43 steps of 3 draft tokens
SUMMARY = {
    "mean_acceptance_length": 1.2325581395348837,
    "draft_acceptance_rate": 0.07751937984496124,
    "acceptance_histogram": [39, 1, 0, 3],
    "num_spec_steps": 43,
    "num_accepted_draft_tokens": 10,
    "num_draft_tokens": 129,
    "num_spec_tokens": 3,
}


def test_vllms_example_is_had_field_for_field():
    accepted = [0] * 39 + [1] + [3] * 3
    detailed = {"per_step_accepted": accepted, "per_step_drafted": [3] * 43}
    assert acceptance_record([3] * 43, accepted, 3) == SUMMARY | detailed
    with_plain_steps = acceptance_record([0, *[3] * 43, 0], [0, *accepted, 0], 3)
    assert with_plain_steps == SUMMARY | detailed, "steps without a draft are none"


def test_an_answer_without_drafts():
    record = acceptance_record([0, 0], [0, 0], 0)
    assert (record["mean_acceptance_length"], record["draft_acceptance_rate"]) == (1.0, 0.0)
    assert record["acceptance_histogram"] == [0] and record["per_step_drafted"] == []
