"""python -m evaluation.audit FOLDER: is the output still the model's own? Compares each method with vanilla by turn.

Every report makes this comparison from the records (tables/audit.csv and .md). This command also loads the model and
adds the target's top-2 logit gap where answers first differ, which tells a tie in float16 from a defect.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from model.errors import UserError
from model.files import write_json

from .errors import user_errors
from .loading.bench import answer_text, load_bench, prompt_ids
from .loading.locks import exclusive, keep_devices
from .loading.models import load_model
from .loading.settings import ModelSettings
from .records.questions import Question
from .records.rows import difference
from .records.runs import Run, read_runs
from .statistics.audits import GAPS, audits, write_audit
from .statistics.pools import pools


def measure_gaps(
    runs: Sequence[Run], *, trust_remote_code: bool = False, allow_pickle: bool = False
) -> Iterator[dict[str, Any]]:
    """Measure the target's two largest logits where an answer first differs from vanilla's.

    A folder's metadata name the model and bench, but grant no permissions, as anybody may have written them.

    Args:
        trust_remote_code, allow_pickle: what the user of this command permits, as the model settings of a run.

    Yields:
        `at` (run, question, choice, turn, token), `gap` (first minus second logit, in the run's own type), `picked`
        (how far the logit of the method's token is below the largest).

    Raises:
        UserError: a run's model needs a permission; nothing is loaded then.
    """
    differing = [audit for audit in audits(pools(runs)) if audit.different]
    permitted = {"trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle}
    for audit in differing:
        model = audit.pool.first.metadata["config"]["model"]
        for key, granted in permitted.items():
            if model.get(key) and not granted:
                raise UserError(
                    f"{audit.pool.first.folder}: was run with model.{key}=true; if you trust {model['path']}, "
                    f"say so: --{key.replace('_', '-')}"
                )
    for audit in differing:
        first = audit.pool.first
        dtype = {"dtype": first.settings["model"]["dtype"]}  # the one that `auto` chose there
        settings = ModelSettings(**first.metadata["config"]["model"] | permitted | dtype)
        with exclusive(settings) as settings:
            loaded = load_model(settings)
            if first.files and (other := difference(first.files, loaded.files)):
                raise UserError(f"{first.folder}: its model is no longer the one in {settings.path} ({other})")
            involved = {id(turn.run): turn.run for turn in audit.different}  # shards have different questions
            questions = {i: _questions(run) for i, run in involved.items()}
            rows = {i: {row["question_id"]: row for row in run.answers} for i, run in involved.items()}
            for turn in audit.different:
                run, token = id(turn.run), turn.differs_at or 0
                choice = rows[run][turn.question_id]["choices"][turn.choice]
                turns = list(questions[run][turn.question_id].turns[: turn.turn + 1])
                *before, ids = choice["output_ids"][: turn.turn + 1]  # compact records hold no texts
                answers = [answer_text(loaded.template, loaded.tokenizer, tokens) for tokens in before]
                prompt = prompt_ids(loaded.template, loaded.tokenizer, turns, answers)
                logits = next_logits(loaded.target.model, prompt + ids[:token])
                best = logits.topk(2).values
                picked = float(best[0] - logits[ids[token]]) if token < len(ids) else math.nan
                yield {"at": list(turn.key), "gap": float(best[0] - best[1]), "picked": picked}
            del loaded  # before loading another model


def _questions(run: Run) -> dict[int | str, Question]:
    """Return a run's questions by id. Nothing is fetched, as the folder's metadata name the path."""
    settings = run.metadata["config"]["bench"] | {"url": None}
    bench = load_bench(**settings)
    if bench.sha256 != run.settings["bench"]["sha256"]:
        raise UserError(f"{run.folder}: its questions are no longer those of {settings['path']}")
    return {question.question_id: question for question in bench.questions}


@torch.inference_mode()
def next_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the target's logits after these tokens, by a plain forward: float32 (V,)."""
    device = next(model.parameters()).device
    return model(torch.tensor([ids], device=device)).logits[0, -1].float()  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evaluation.audit", description=__doc__)
    parser.add_argument("folder", type=Path, help="an experiment's results, e.g. results/precision")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--allow-pickle", action="store_true", help="also read *.bin weights (as weights only)")
    arguments = parser.parse_args()
    permitted = {"trust_remote_code": arguments.trust_remote_code, "allow_pickle": arguments.allow_pickle}
    with user_errors("no gap was written"):
        runs = read_runs(arguments.folder)
        if not audits(pools(runs)):
            raise UserError(f"{arguments.folder}: no vanilla run to compare with; add method=vanilla to the sweep")
        with keep_devices():  # several audits may use the same model
            write_json(arguments.folder / GAPS, list(measure_gaps(runs, **permitted)))
        print("\n".join(write_audit(runs, arguments.folder)))


if __name__ == "__main__":
    main()
