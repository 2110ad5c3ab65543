"""The plan of a device report, checked; its time budget, models and prompts."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from model.decoding.devices import triton_problem
from model.errors import UserError
from model.files import ROOT

from ..loading.shapes import check_shape, choose_dtype, random_weights

EMBEDDED = "embedded"
DTYPES = ("float16", "bfloat16", "float32")
EXECUTIONS = ("eager", "static", "graph", "compiled", "tree")  # tree: compiled, with the tree attention kernel
ON_CUDA, ON_CPU = ("eager", "graph", "compiled", "tree"), ("eager", "compiled")
PUBLISHED = 80  # nodes of the tree 2.2.2
# Timed nodes below the root: with the root 8, 16, 24, 32, ... rows, which suit matrix units, and the published size.
SIZES_CUDA = (0, 1, 3, 7, 15, 23, 31, 47, 63, 79, 80, 95, 127, 160)
SIZES_CPU = (0, 1, 2, 4, 7, 15, 24, 31, 48, 63, 80)
POSITIONS = 4096  # of every model here
MOST_CONTEXT = 3840  # leaves room for the rounding up of a static step and the largest draft


@dataclass(frozen=True)
class ReportPlan:
    """The measurements of a report.

    Attributes:
        models: `embedded`, or shapes with random weights.
        dtypes: of the steps that are timed.
        contexts: tokens before a step.
        executions: of EXECUTIONS.
        sizes: nodes below the root.
        mat: mean accepted tokens of the published tree, for the forecast.
        minutes: the time budget; measurements beyond it are cut.
        tests: also run the tests for CUDA.
    """

    device: torch.device
    models: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    contexts: tuple[int, ...]
    executions: tuple[str, ...]
    sizes: tuple[int, ...]
    mat: float
    minutes: float
    tests: bool = True


def make_plan(
    device: torch.device,
    *,
    shapes: str | None = None,
    dtype: str = "auto",
    contexts: str | None = None,
    executions: str | None = None,
    mat: str | None = None,
    minutes: str = "8",
    tests: bool = True,
) -> ReportPlan:
    """Make a plan from a command's flags and the device's defaults.

    Raises:
        UserError: a wrong value; names the flag.
    """
    cuda = device.type == "cuda"
    models = _listed(shapes, "--shapes") or (("vicuna-7b", "llama-3-8b") if cuda else (EMBEDDED, "small"))
    for model in models:
        check_shape(model, "--shapes", EMBEDDED)
    types = _listed(dtype, "--dtype")
    for name in types:
        if name not in ("auto", *DTYPES):
            raise UserError(f"--dtype {name}: use auto, {', '.join(DTYPES)}")
    ways = _listed(executions, "--executions") or (ON_CUDA if cuda else ON_CPU)
    if cuda and executions is None and triton_problem(device):
        ways = tuple(way for way in ways if way != "tree")
    for way in ways:
        if way not in EXECUTIONS or (way == "graph" and not cuda):
            raise UserError(
                f"--executions {way}: " + ("needs CUDA" if way == "graph" else f"use {', '.join(EXECUTIONS)}")
            )
    lengths = [
        int(_number(text, "--contexts", 2, MOST_CONTEXT, whole=True)) for text in _listed(contexts, "--contexts")
    ]
    return ReportPlan(
        device,
        tuple(dict.fromkeys(models)),
        tuple(dict.fromkeys(choose_dtype(name, device) for name in types)),
        tuple(dict.fromkeys(lengths)) or ((500, 200, 2000) if cuda else (500, 200)),
        tuple(dict.fromkeys(ways)),
        SIZES_CUDA if cuda else SIZES_CPU,
        published_mat() if mat is None else _number(mat, "--mat", 1, PUBLISHED + 1),
        _number(minutes, "--minutes", 0.05, 600),
        tests,
    )


def published_mat() -> float:
    """Return the MAT of Token Recycling on Vicuna-7B and Spec-Bench in the paper's Table 1."""
    with (ROOT / "data/reference/paper_table1.csv").open(encoding="utf-8", newline="") as file:
        rows = {(row["model"], row["method"]): row for row in csv.DictReader(file)}
    return float(rows["vicuna-7b", "recycling"]["specbench_mat"])


def _listed(text: str | None, flag: str) -> tuple[str, ...]:
    """Split a,b into its parts; none if the flag is not given."""
    if text is None:
        return ()
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise UserError(f"{flag} {text!r}: must be names or numbers with commas between them")
    return parts


def _number(text: str, flag: str, least: float, most: float, *, whole: bool = False) -> float:
    try:
        number = float(int(text)) if whole else float(text)
    except ValueError:
        number = float("nan")
    if not least <= number <= most:  # also True for NaN
        kind = "whole numbers" if whole else "a number"
        raise UserError(f"{flag} {text}: must be {kind} from {least:g} to {most:g}")
    return number


class Budget:
    """A time budget, with a clock that tests can replace.

    Args:
        minutes: of the whole report.
        clock: seconds, rising.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self.seconds = clock, 60 * minutes
        self._start = clock()

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until this share of the budget is used; negative afterwards."""
        return self._start + share * self.seconds - self._clock()

    def spent(self) -> float:
        """Return the seconds since the start."""
        return self._clock() - self._start


FOLDER = ROOT / "data/embedded"
QUESTIONS = ROOT / "data/sample/question.jsonl"


def load(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Load a model of `ReportPlan.models` by its name."""
    if name != EMBEDDED:
        return random_weights(name, device, dtype)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
    return model.to(device).eval()


def conversation_prompts(count: int) -> list[list[int]]:
    """Return first turns of the sample bench, one per category, in the embedded model's conversation template."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").split("\n") if line]
    by_category = {row["category"]: row for row in reversed(rows)}
    return [tokenizer.encode(f"USER: {row['turns'][0]} ASSISTANT:").ids for row in list(by_category.values())[:count]]


def random_prompt(vocabulary: int, tokens: int) -> list[int]:
    """Return random token ids (tokens,), from seed 0."""
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(3, vocabulary, (tokens,), generator=generator).tolist()
    return ids


def dtype_name(dtype: torch.dtype) -> str:
    """Return a type's name as in flags and reports."""
    return str(dtype).removeprefix("torch.")
