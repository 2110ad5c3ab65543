"""Spec-Bench's own figures of two answer files: speed and accepted lengths of the first choice, by subtask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..records.rows import Row, accept_lengths, common_questions
from .metrics import by_subtask, mean


def mean_speed(rows: Sequence[Row], tokenizer: Any = None) -> float:
    """Tokens per second: mean over questions of tokens / seconds, of the first choice.

    With a tokenizer the tokens are counted from the text, less the BOS of each turn, as that project does for its
    baseline; without one they are the answers' own new_tokens.
    """
    values = []
    for row in rows:
        choice = row["choices"][0]
        if tokenizer is None:
            tokens = sum(choice["new_tokens"])
        else:
            tokens = sum(len(tokenizer(text).input_ids) - 1 for text in choice["turns"])
        if sum(choice["wall_time"]) > 0:
            values.append(tokens / sum(choice["wall_time"]))
    return mean(values)


def compare(rows: dict[Any, Row], baseline: dict[Any, Row], tokenizer: Any = None) -> list[dict[str, Any]]:
    """One entry a subtask, over the questions that both files have; `mat` is over those, too."""
    common = [rows[key] for key in common_questions(rows, baseline)]
    found = []
    for name, group in by_subtask(common).items():
        base = mean_speed([baseline[row["question_id"]] for row in group], tokenizer)
        own = mean_speed(group)
        mat = mean(n for row in group for n in accept_lengths({"choices": row["choices"][:1]}))
        speedup = own / base if base else math.nan  # of a baseline that said nothing there is none
        found.append({"subtask": name, "mat": mat, "tokens_per_second": own, "baseline": base, "speedup": speedup})
    return found
