"""acceptance.jsonl: the acceptance record of each turn of a run, as other engines and benchmarks read it."""

from __future__ import annotations

import json
from collections.abc import Iterable

from model.engine.loop import acceptance_record

from ..records.rows import Row


def acceptance_lines(rows: Iterable[Row], most: int) -> str:
    """Return a JSON line a turn: which it is, and `usage` and `metrics` as in a response of vLLM.

    Args:
        most: the draft tokens that a step may have.
    """
    lines: list[str] = []
    for row in rows:
        for choice in row["choices"]:
            turns = zip(choice["step_nodes"], choice["step_paths"], strict=True)
            for turn, (nodes, paths) in enumerate(turns):
                prompt, new = choice["prompt_tokens"][turn], choice["new_tokens"][turn]
                record = acceptance_record([n - 1 for n in nodes], [len(path) for path in paths], most)
                line = {"question_id": row["question_id"], "category": row["category"], "choice": choice["index"]}
                line |= {"turn": turn, "usage": {"prompt_tokens": prompt, "completion_tokens": new}}
                line |= {"metrics": {"speculative_decoding": record}}
                lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)
