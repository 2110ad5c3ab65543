"""What public codes accepted with the shipped model on the sample bench: each file's test says of which code."""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

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


def public_turns(name: str) -> list[dict[str, Any]]:
    """A file's turns, with the prompts and outputs that all of them share."""
    turns = [json.loads(line) for line in (HERE / name).read_text().splitlines()]
    assert [turn["question_id"] for turn in turns] == [turn["question_id"] for turn in TRACE if turn["start"] == "cold"]
    shared = [{key: turn[key] for key in ("prompt_ids", "output_ids")} for turn in TRACE]
    return [own | other for own, other in zip(turns, shared, strict=False)]
