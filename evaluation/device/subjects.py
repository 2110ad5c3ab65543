"""The models of a report: the shipped one, and random weights of a known shape; nothing is fetched."""

from __future__ import annotations

import json
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from model.files import ROOT

from ..running.shapes import random_weights
from .plan import EMBEDDED

FOLDER = ROOT / "data/embedded"
QUESTIONS = ROOT / "data/sample/question.jsonl"


def load(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A transformers model, by the name that `Plan.models` has."""
    if name != EMBEDDED:
        return random_weights(name, device, dtype)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
    return model.to(device).eval()


def spoken_prompts(count: int) -> list[list[int]]:
    """First turns of the sample bench, one of every kind first, in the manner of the embedded model's conversations."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").split("\n") if line]
    kinds = {row["category"]: row for row in reversed(rows)}
    return [tokenizer.encode(f"USER: {row['turns'][0]} ASSISTANT:").ids for row in list(kinds.values())[:count]]


def random_prompt(vocabulary: int, tokens: int) -> list[int]:
    """Token ids (tokens,) from seed 0."""
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(3, vocabulary, (tokens,), generator=generator).tolist()
    return ids


def named(dtype: torch.dtype) -> str:
    """As flags and reports have it."""
    return str(dtype).removeprefix("torch.")
