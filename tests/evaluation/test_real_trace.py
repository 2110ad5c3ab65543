"""What the authors' own loop accepted on a real chat model, step by step: SmolLM2-135M-Instruct.

smollm2_trace.jsonl: ten first turns of Spec-Bench cold, then hot, one line each; recorded from
github.com/Luowaterbi/TokenRecycling (commit 1b4c05c, transformers 4.37.1, float32, one thread) with
k = 8, tree 2.2.2, 96 new tokens. That loop checks its limit after a whole step, and then does not
learn from it. So a turn without EOS is asked for the tokens of all steps but that one.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from evaluation.configuration.jobs import group_settings
from evaluation.loading.models import ModelSettings, locate
from model.engine import Target, generate
from model.recycling import TokenRecycling, build_template

EOS = 2
TRACE = [
    json.loads(line)
    for line in (Path(__file__).parent / "smollm2_trace.jsonl").read_text().splitlines()
]


@pytest.fixture(scope="module")
def target() -> Target:
    """Torch's own products, as the official loop has them; the weights come by pip, 93 MB."""
    settings = ModelSettings(**group_settings(["model=smollm2-135m"], "model")["model"])
    return Target(AutoModelForCausalLM.from_pretrained(locate(settings), dtype=torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("start", ["cold", "hot"])
def test_every_accepted_length_is_the_official_one(target, start):
    turns = [turn for turn in TRACE if turn["start"] == start]
    assert len(turns) == 10
    turns = turns[:2]  # all ten take minutes
    drafter = TokenRecycling(target.vocab_size, build_template("2.2.2"), eos={EOS})
    for turn in turns:
        if start == "cold":
            drafter.reset()
        official = turn["accept_lengths"]
        ends = sum(official) <= 96  # at EOS
        asked = sum(official if ends else official[:-1])
        out = generate(target, drafter, turn["prompt_ids"], max_new_tokens=asked, eos={EOS})
        compared = len(official) - 1  # the official loop takes the last step whole
        assert out.accept_lengths[:compared] == official[:compared], turn["question_id"]
        assert len(out.steps) == compared + ends
        assert out.tokens[: len(turn["output_ids"])] == turn["output_ids"][: len(out.tokens)]
