"""What public codes accepted with the shipped model on the sample bench: each file's test says of which code."""

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from model.engine import Drafter, Generation, Target, generate
from model.files import ROOT

WEIGHTS = "e507af9767c6c0cd3ba2b370bf3d0d8c435b95e46cbd120955b9797c81a9f012"
EOS = 2
HERE = Path(__file__).parent
OFFICIAL = (HERE.parent / "recycling/official_trace.jsonl").read_text()
TRACE: list[dict[str, Any]] = [json.loads(line) for line in OFFICIAL.splitlines()]


@cache
def embedded() -> PreTrainedModel:
    """The shipped model, as it was when the traces were recorded."""
    folder = ROOT / "data/embedded"
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS, "recorded with others"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


EXECUTED = pytest.mark.parametrize(
    ("execution", "every"), [("eager", 8), ("static", 28), pytest.param("eager", 1, marks=pytest.mark.slow)]
)


def answered(
    drafter: Drafter, target: Target, name: str, every: int, execution: str
) -> Iterator[tuple[dict[str, Any], Generation]]:
    """Each so-many-th turn of a file, and what is answered to it, cold."""
    turns = [json.loads(line) for line in (HERE / name).read_text().splitlines()]
    assert [turn["question_id"] for turn in turns] == [turn["question_id"] for turn in TRACE if turn["start"] == "cold"]
    for turn, shared in list(zip(turns, TRACE, strict=False))[::every]:
        drafter.reset()
        out = generate(target, drafter, shared["prompt_ids"], max_new_tokens=200, eos={EOS}, execution=execution)
        assert out.tokens[: len(shared["output_ids"])] == shared["output_ids"][: len(out.tokens)]
        yield turn, out
