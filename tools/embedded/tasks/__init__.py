"""The tasks of the synthetic world, one file a task, by Spec-Bench's category."""

from __future__ import annotations

from tools.embedded.dialogue import Maker
from tools.embedded.tasks import (
    code,
    coding,
    extraction,
    humanities,
    math,
    math_reasoning,
    qa,
    rag,
    reasoning,
    roleplay,
    stem,
    summarization,
    translation,
    writing,
)

# The eight labels that Spec-Bench reports together as mt_bench, in its order.
MT_BENCH: dict[str, Maker] = {
    "writing": writing.make,
    "roleplay": roleplay.make,
    "reasoning": reasoning.make,
    "math": math.make,
    "coding": coding.make,
    "extraction": extraction.make,
    "stem": stem.make,
    "humanities": humanities.make,
}
SINGLE: dict[str, Maker] = {
    "translation": translation.make,
    "summarization": summarization.make,
    "qa": qa.make,
    "math_reasoning": math_reasoning.make,
    "rag": rag.make,
    "code": code.make,
}
MAKERS: dict[str, Maker] = {**MT_BENCH, **SINGLE}


def subtask(category: str) -> str:
    """The row of a table that a category belongs to."""
    return "mt_bench" if category in MT_BENCH else category
