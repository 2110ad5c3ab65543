"""python -m evaluation.audit FOLDER: is the output still the model's own? Compares each method with vanilla by turn.

Every report makes this comparison from the records (tables/audit.csv and .md). This command also loads the model and
adds the target's top-2 logit gap where answers first differ, which tells a tie in float16 from a defect.

With --answers FILE --model NAME instead of a folder: answers of any engine, each of their tokens next to the model's
own choice behind the same text. Exit code 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model.errors import UserError
from model.files import write_json

from .configuration.jobs import group_settings, named, quoted
from .errors import user_errors
from .loading.bench import answer_text, load_bench, prompt_ids
from .loading.devices import exclusive, keep_devices
from .loading.engine_answers import force
from .loading.models import load_model
from .loading.settings import ModelSettings
from .records.questions import Question
from .records.rows import difference
from .records.runs import Run
from .running.judging import judge_file
from .statistics.agreement import GAPS
from .statistics.experiment import Experiment
from .statistics.rendering import write_audit

TYPES = ("float32", "float16", "bfloat16")
SHOWN = 3  # places of an answer in words
END = -1  # in place of a token: the end, which any EOS would be
SAMPLES, SAMPLED = 4, 32  # answers in which noise is measured, and the first tokens of each


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.audit", description=__doc__)
    about = "an experiment's results, e.g. results/precision; with --answers: model.KEY=VALUE, bench.KEY=VALUE"
    parser.add_argument("words", nargs="*", metavar="FOLDER", help=about)
    parser.add_argument("--answers", type=Path, metavar="FILE", help="answers of any engine instead")
    parser.add_argument("--model", metavar="NAME", help="--answers: one of configs/model, a folder, or a hub name")
    parser.add_argument("--bench", metavar="NAME", help="--answers without prompts: one of configs/bench, or a file")
    parser.add_argument("--made-in", choices=TYPES, help="--answers: the type they were computed in, if another one")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--allow-pickle", action="store_true", help="also read *.bin weights (as weights only)")
    given = parser.parse_intermixed_args()
    permitted = {"trust_remote_code": given.trust_remote_code, "allow_pickle": given.allow_pickle}
    with user_errors("no gap was written"):
        if (given.answers is None) != (given.model is None) or (given.answers is None and len(given.words) != 1):
            raise UserError("name an experiment's folder, or --answers FILE and --model NAME")
        if given.answers is None and (given.bench or given.made_in):
            raise UserError("--bench, --made-in: with --answers only")
        if given.answers is None:
            audit_folder(Path(given.words[0]), permitted)
            return
        settings = named("model", given.model) | (named("bench", given.bench) if given.bench else {})
        settings["model.linear"] = "torch"  # products as transformers has them
        words = [f"{key}={quoted(value)}" for key, value in settings.items()]
        words += [f"model.{key}=true" for key, granted in permitted.items() if granted]
        config = group_settings([*words, *given.words], "model", "bench")
        questions = load_bench(**config["bench"]).questions if given.bench else ()
        by_id = {question.question_id: question for question in questions}
        sys.exit(int(not audit_answers(given.answers, ModelSettings(**config["model"]), by_id, given.made_in)))


def audit_folder(folder: Path, permitted: dict[str, bool]) -> None:
    """Measure and write the gaps of an experiment's folder, and print its audit."""
    experiment = Experiment.read(folder)
    if not experiment.audits:
        raise UserError(f"{folder}: no vanilla run to compare with; add method=vanilla to the sweep")
    with keep_devices():  # several audits may use the same model
        write_json(folder / GAPS, list(measure_gaps(experiment, permitted)))
    print("\n".join(write_audit(experiment, folder / "tables")))


def measure_gaps(experiment: Experiment, permitted: dict[str, bool]) -> Iterator[dict[str, Any]]:
    """Measure the target's two largest logits where an answer first differs from vanilla's.

    A folder's metadata name the model and bench, but grant no permissions, as anybody may have written them.

    Args:
        permitted: of the model settings trust_remote_code and allow_pickle, what the user of this command grants.

    Yields:
        `at` (run, question, choice, turn, token), `gap` (first minus second logit, in the run's own type), `picked`
        (how far the logit of the method's token is below the largest).

    Raises:
        UserError: a run's model needs a permission; nothing is loaded then.
    """
    differing = [audit for audit in experiment.audits if audit.different]
    for first in (audit.pool.first for audit in differing):
        model = first.metadata["config"]["model"]
        for key in (key for key, granted in permitted.items() if model.get(key) and not granted):
            trusted = f"if you trust {model['path']}, say so: --{key.replace('_', '-')}"
            raise UserError(f"{first.folder}: was run with model.{key}=true; {trusted}")
    for audit in differing:
        first = audit.pool.first
        dtype = {"dtype": first.settings["model"]["dtype"]}  # the one that `auto` chose there
        settings = ModelSettings(**first.metadata["config"]["model"] | permitted | dtype)
        with exclusive(settings) as settings:
            loaded = load_model(settings)
            if first.identity.files and (other := difference(first.identity.files, loaded.files)):
                raise UserError(f"{first.folder}: its model is no longer the one in {settings.path} ({other})")
            for run in {id(turn.run): turn.run for turn in audit.different}.values():  # shards differ in questions
                questions, rows = _questions(run), {row["question_id"]: row for row in run.answers}
                for turn in (turn for turn in audit.different if turn.run is run):
                    token, choice = turn.differs_at or 0, rows[turn.question_id]["choices"][turn.choice]
                    *before, ids = choice["output_ids"][: turn.turn + 1]  # compact records hold no texts
                    answers = [answer_text(loaded.template, loaded.tokenizer, tokens) for tokens in before]
                    turns = list(questions[turn.question_id].turns[: turn.turn + 1])
                    prompt = prompt_ids(loaded.template, loaded.tokenizer, turns, answers)
                    forced = force(loaded.target, prompt, ids[: token + 1])
                    picked = forced.gaps[token] if token < len(ids) else math.nan
                    yield {"at": list(turn.key), "gap": forced.margins[token], "picked": picked}
            del loaded  # before loading another model


def _questions(run: Run) -> dict[int | str, Question]:
    """Return a run's questions by id. Nothing is fetched, as the folder's metadata name the path."""
    settings = run.metadata["config"]["bench"] | {"url": None}
    bench = load_bench(**settings)
    if bench.sha256 != run.settings["bench"]["sha256"]:
        raise UserError(f"{run.folder}: its questions are no longer those of {settings['path']}")
    return {question.question_id: question for question in bench.questions}


def audit_answers(path: Path, settings: ModelSettings, questions: dict[Any, Question], made_in: Any = None) -> bool:
    """Print how far the answers of a file are the model's own greedy ones; return whether each was read and is.

    Args:
        made_in: the type that the engine computed in; None: the model's.
    """
    found = judge_file(path, settings, questions, made_in)
    print("\n".join(found.lines))
    return found.is_lossless


if __name__ == "__main__":
    main()
