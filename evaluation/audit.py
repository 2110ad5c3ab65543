"""python -m evaluation.audit FOLDER: is the output still the model's own? Each method against vanilla, turn by turn.

The comparison is made from the records alone, in every report (tables/audit.csv and .md). This command loads the model,
too, and adds the target's top-2 logit gap where answers part, so that a tie in float16 is told from a defect.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from model.errors import UserError
from model.files import write_text

from .answers import write_json
from .cli import user_errors
from .conversation import prompt_ids
from .equal import common_turns, diverge
from .locks import exclusive, keeping
from .metrics import Row
from .models import ModelSettings, load_model
from .questions import load_bench
from .runs import row_key
from .tables import Pool, Run, baseline, pools, read_runs

GAPS = "audit_gaps.json"
Gaps = dict[tuple[str, ...], float]


@dataclass(frozen=True)
class Parting:
    """Where an answer leaves vanilla's: question, choice and turn, and the first new token that differs, from 0."""

    question_id: Any
    choice: int
    turn: int
    token: int

    def key(self, run: Run) -> tuple[str, ...]:
        return run.folder.name, *map(str, (self.question_id, self.choice, self.turn, self.token))


@dataclass
class Audit:
    """A configuration against vanilla.

    Attributes:
        turns, identical: turns that both answered from the same prompt, and those with the same tokens.
        tokens: vanilla's tokens in these turns.
        left_out: turns behind one that differed: their prompts differ, so they say nothing.
        partings: of each run, where its answers leave vanilla's.
    """

    pool: Pool
    turns: int = 0
    identical: int = 0
    tokens: int = 0
    left_out: int = 0
    partings: list[tuple[Run, Parting]] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.identical / self.turns if self.turns else math.nan


def audits(runs: Sequence[Run]) -> list[Audit]:
    """Every configuration whose folder has a vanilla run of the same model, bench and device, against it."""
    pooled = pools(runs)
    found = []
    for pool in pooled:
        base = baseline(pool, "vanilla", pooled)
        if base is not None and pool.label != "vanilla":
            any_of_theirs = {key: row for answers in reversed(base.answers.values()) for key, row in answers.items()}
            audit = Audit(pool)
            for repeat, shards in pool.repeats.items():
                theirs = any_of_theirs | base.answers.get(repeat, {})  # the same repeat's, where it has the question
                for run in shards:
                    for row in run.answers:
                        if row_key(row) in theirs:
                            _compare(audit, run, row, theirs[row_key(row)])
            found.append(audit)
    return found


def _compare(audit: Audit, run: Run, row: Row, theirs: Row) -> None:
    turns, left_out = common_turns(row, theirs)
    audit.left_out += left_out
    for index, turn, mine, base in turns:
        audit.turns += 1
        audit.tokens += len(base)
        if mine == base:
            audit.identical += 1
        else:
            audit.partings.append((run, Parting(row["question_id"], index, turn, diverge(mine, base))))


def audit_table(runs: Sequence[Run], gaps: Gaps) -> pd.DataFrame:
    """One row a configuration; the first parting and the largest gap at one, where gaps are known."""
    rows = []
    for audit in audits(runs):
        settings = audit.pool.first.settings
        known = [gaps[parting.key(run)] for run, parting in audit.partings if parting.key(run) in gaps]
        first = audit.partings[0][1] if audit.partings else None
        rows.append(
            {
                "model": settings["model"]["name"],
                "dtype": settings["model"]["dtype"],
                "bench": settings["bench"]["name"],
                "bench_questions": audit.pool.questions,
                "method": audit.pool.label,
                "variant": audit.pool.variant,
                "turns": audit.turns,
                "identical_turns": audit.identical,
                "identical_share": audit.share,
                "tokens": audit.tokens,
                "turns_left_out": audit.left_out,
                "first_difference_question": first.question_id if first else None,
                "first_difference_turn": first.turn if first else None,
                "first_difference_token": first.token if first else None,
                "gaps_known": len(known),
                "largest_logit_gap": max(known, default=math.nan),
            }
        )
    return pd.DataFrame(rows)


def wording(table: pd.DataFrame, folder: Path) -> list[str]:
    """The claim in its three layers: the rule, the implementation in float32, what happens in other types."""
    lines = [
        "The rule is exact: a drafted token stands only where it is the token that the target itself picks "
        "(greedy; model/decoding/verification.py)."
    ]
    for dtype in ["float32", *sorted(set(table["dtype"]) - {"float32"})]:
        own = table[table["dtype"] == dtype]
        turns, same = int(own["turns"].sum()), int(own["identical_turns"].sum())
        if not turns:
            if dtype == "float32":
                lines.append("The implementation in float32: not measured in this folder.")
            continue
        about = f"{int(own['tokens'].sum())} tokens in {turns} turns of {len(own)} configuration(s)"
        if same == turns:
            exact = "The implementation is exact in float32" if dtype == "float32" else f"In {dtype} all is identical"
            lines.append(f"{exact} on {about}: every turn equals vanilla's.")
            continue
        known, apart = int(own["gaps_known"].sum()), turns - same
        text = f"In {dtype} {100 * same / turns:.2f} % of the turns equal vanilla's ({about})"
        if known == apart:
            text += (
                f", and every difference starts at a top-2 logit gap of at most {own['largest_logit_gap'].max():.3g}."
            )
        else:
            text += (
                f"; the gap at {apart - known} of {apart} differences is not known: python -m evaluation.audit {folder}"
            )
        lines.append(text)
    return lines


def write_audit(runs: Sequence[Run], folder: Path) -> list[str]:
    """Write tables/audit.csv and audit.md of an experiment's folder; returns the wording, nothing without vanilla."""
    table = audit_table(runs, read_gaps(folder))
    if table.empty:
        return []
    lines = wording(table, folder)
    target = folder / "tables"
    write_text(target / "audit.csv", table.to_csv(index=False))
    head = "| " + " | ".join(table.columns) + " |\n|" + "---|" * len(table.columns)
    body = "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in table.itertuples(index=False))
    write_text(target / "audit.md", "\n\n".join(["# Audit", *lines, f"{head}\n{body}"]) + "\n")
    return lines


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read_gaps(folder: Path) -> Gaps:
    """What the command has measured in this folder; nothing if it was not given yet."""
    try:
        found = json.loads((folder / GAPS).read_text(encoding="utf-8"))
        return {tuple(entry["at"]): float(entry["gap"]) for entry in found}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def measure_gaps(
    runs: Sequence[Run], *, trust_remote_code: bool = False, allow_pickle: bool = False
) -> Iterator[dict[str, Any]]:
    """The target's two greatest logits where an answer parts from vanilla's; the model is loaded once a model and type.

    What a folder's metadata say was written by whoever ran it: they name a model and a bench, and permit nothing.

    Args:
        trust_remote_code, allow_pickle: what the user of this command permits, as model.X of a run.

    Yields:
        `at` (run, question, choice, turn, token), `gap` (first minus second logit, in the run's own type), `picked`
        (how far below the greatest the logit of the method's token is).

    Raises:
        UserError: a run's model needs what is not permitted; nothing is loaded then.
    """
    parted = [audit for audit in audits(runs) if audit.partings]
    permitted = {"trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle}
    for audit in parted:
        model = audit.pool.first.metadata["config"]["model"]
        for key, granted in permitted.items():
            if model.get(key) and not granted:
                raise UserError(
                    f"{audit.pool.first.folder}: was run with model.{key}=true; if you trust {model['path']}, "
                    f"say so: --{key.replace('_', '-')}"
                )
    for audit in parted:
        first = audit.pool.first
        own = {"dtype": first.settings["model"]["dtype"]}  # what `auto` was there
        settings = ModelSettings(**first.metadata["config"]["model"] | permitted | own)
        with exclusive(settings) as settings:
            loaded = load_model(settings)
            runs_of = {id(run): run for run, _ in audit.partings}  # shards differ in their questions
            benches = {i: run.metadata["config"]["bench"] | {"url": None} for i, run in runs_of.items()}
            # nothing is fetched to where a folder says
            loaded_benches = {i: load_bench(**bench) for i, bench in benches.items()}
            for i, bench in loaded_benches.items():
                if bench.sha256 != runs_of[i].settings["bench"]["sha256"]:
                    raise UserError(f"{runs_of[i].folder}: its questions are no longer those of {benches[i]['path']}")
            questions = {i: {q.question_id: q for q in bench.questions} for i, bench in loaded_benches.items()}
            rows = {i: {row["question_id"]: row for row in run.answers} for i, run in runs_of.items()}
            for run, parting in audit.partings:
                choice = rows[id(run)][parting.question_id]["choices"][parting.choice]
                turns = list(questions[id(run)][parting.question_id].turns[: parting.turn + 1])
                prompt = prompt_ids(loaded.template, loaded.tokenizer, turns, choice["turns"][: parting.turn])
                ids = choice["output_ids"][parting.turn]
                logits = next_logits(loaded.target.model, prompt + ids[: parting.token])
                best = logits.topk(2).values
                at = ids[parting.token] if parting.token < len(ids) else None
                picked = float(best[0] - logits[at]) if at is not None else math.nan
                yield {"at": list(parting.key(run)), "gap": float(best[0] - best[1]), "picked": picked}
            del loaded  # before another model comes


@torch.inference_mode()
def next_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """The target's logits after these tokens, by a plain forward: float32 (V,)."""
    device = next(model.parameters()).device
    return model(torch.tensor([ids], device=device)).logits[0, -1].float()  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evaluation.audit", description=__doc__)
    parser.add_argument("folder", type=Path, help="an experiment's results, e.g. results/precision")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--allow-pickle", action="store_true", help="also read *.bin weights (as weights only)")
    arguments = parser.parse_args()
    permitted = {"trust_remote_code": arguments.trust_remote_code, "allow_pickle": arguments.allow_pickle}
    with user_errors():
        runs = read_runs(arguments.folder)
        if not audits(runs):
            raise UserError(f"{arguments.folder}: no vanilla run to compare with; add method=vanilla to the sweep")
        with keeping():  # one model after the other stays, where several audits are of one
            write_json(arguments.folder / GAPS, list(measure_gaps(runs, **permitted)))
        print("\n".join(write_audit(runs, arguments.folder)))


if __name__ == "__main__":
    main()
