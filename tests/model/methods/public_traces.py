"""What public codes accepted with the shipped model on the sample bench: each file's test says of which code."""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.model.recycling.test_official_trace import ROOT, WEIGHTS

EOS = 2
HERE = Path(__file__).parent


@cache
def embedded() -> PreTrainedModel:
    """The shipped model, as it was when the traces were recorded."""
    folder = ROOT / "data/embedded"
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS, "recorded with others"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def public_turns(name: str) -> list[dict[str, Any]]:
    """A file's turns, with the prompts and outputs that all of them share."""
    turns = [json.loads(line) for line in (HERE / name).read_text().splitlines()]
    told = [json.loads(line) for line in (HERE.parent / "recycling/official_trace.jsonl").read_text().splitlines()]
    assert [turn["question_id"] for turn in turns] == [turn["question_id"] for turn in told if turn["start"] == "cold"]
    shared = [{key: turn[key] for key in ("prompt_ids", "output_ids")} for turn in told]
    return [own | other for own, other in zip(turns, shared, strict=False)]
