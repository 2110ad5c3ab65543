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

from model.engine import Draft, Drafter, Generation, Target, generate
from model.files import ROOT
from tests.model.sessions import each_session

WEIGHTS = "e507af9767c6c0cd3ba2b370bf3d0d8c435b95e46cbd120955b9797c81a9f012"
EOS = 2
HERE = Path(__file__).parent
OFFICIAL = (HERE.parent / "recycling/official_trace.jsonl").read_text()
TRACE: list[dict[str, Any]] = [json.loads(line) for line in OFFICIAL.splitlines()]


@cache
def embedded() -> PreTrainedModel:
    """The shipped model, as it was when the traces were recorded."""
    folder = ROOT / "data/embedded"
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS, (
        "recorded with others"
    )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


EXECUTED = pytest.mark.parametrize(
    ("execution", "every"),
    [("eager", 14), ("static", 28), pytest.param("eager", 1, marks=pytest.mark.slow)],
)


def answered(
    drafter: Drafter, target: Target, name: str, every: int, execution: str
) -> Iterator[tuple[dict[str, Any], Generation]]:
    """Each so-many-th turn of a file, and what is answered to it, cold."""
    for turn, shared in list(zip(lines(name), TRACE, strict=False))[::every]:
        assert turn["question_id"] == shared["question_id"]
        drafter.reset()
        out = generate(
            target,
            drafter,
            shared["prompt_ids"],
            max_new_tokens=200,
            eos={EOS},
            execution=execution,
        )
        assert out.tokens[: len(shared["output_ids"])] == shared["output_ids"][: len(out.tokens)]
        yield turn, out


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


def watched(drafter: Drafter) -> list[Draft]:
    """The drafts that it makes from now on."""
    drafts: list[Draft] = []

    def watch(session: Any) -> None:
        inner = session.draft

        def draft(root: int) -> Draft:
            made = inner(root)
            drafts.append(Draft(made.tree, made.tokens.clone(), made.source))
            return made

        session.draft = draft

    each_session(drafter, watch)
    return drafts


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """The tokens from the root down to each node, sorted: public codes list nodes in another order."""
    paths = [(tokens[0],)]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return sorted(paths)


def retaken(
    drafter: Drafter, target: Target, turn: dict[str, Any], execution: str = "eager"
) -> Generation:
    """Answer a turn of a loop that commits root and accepted drafts, counts them, and sees the end a step later.

    Here a step adds its accepted drafts and the next root. So the first root is a step of one token, with the prompt,
    and the others are as recorded; the loop is made not to see the end.
    """
    shared = TRACE[turn["turn"] - 1]
    lengths = turn["accept_lengths"]
    out = generate(
        target, drafter, shared["prompt_ids"], max_new_tokens=1 + sum(lengths), execution=execution
    )
    assert out.tokens[: len(shared["output_ids"])] == shared["output_ids"][: len(out.tokens)]
    assert out.accept_lengths == [1, *lengths], turn["turn"]
    return out
