"""python -m evaluation.audit FOLDER: is the output still the model's own?

Every report compares each method with vanilla by turn (tables/audit.csv and .md). This command adds
the target's top-2 logit gap where answers first differ: it distinguishes a tie in float16 from a
defect.

With --answers FILE --model NAME: compares each token of any engine's answers with the model's own
choice after the same text. Exit code 1 if a token is wrong or an answer is empty.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from model.errors import Parser, UserError, visible
from model.files import local_path, write_json

from .configuration.jobs import group_settings, named, quoted
from .errors import user_errors
from .loading.bench import answer_text, chat_of, load_bench, prompt_ids
from .loading.devices import exclusive, keep_devices
from .loading.engine_answers import EngineAnswer, Forced, force, noise, read_requests, tokenised
from .loading.models import LoadedModel, ModelSettings, devices_in_words, load_model
from .records.rows import Question, difference, read_object
from .records.runs import SERVED, Run, recorded_date, runs_at
from .running.scheduling import progress_bar
from .statistics.agreement import GAPS, Turn
from .tables.experiment import Experiment
from .tables.rendering import aligned, write_audit
from .tables.tables import AUDITED

TYPES = ("float32", "float16", "bfloat16")
PERMISSIONS = ("trust_remote_code", "allow_pickle")  # of a model's settings
SHOWN = 3  # differing positions of an answer that are put into words
END = -1  # in place of a token's id: the end of an answer, whichever EOS it would be
# number of answers in which noise is measured, and of their first tokens
SAMPLES = 4
SAMPLED = 32


def main() -> None:
    parser = Parser(prog="python -m evaluation.audit", description=__doc__)
    flag = parser.add_argument
    flag("words", nargs="*", help="FOLDER, as results/precision; model.KEY=VALUE, bench.KEY=VALUE")
    flag("--answers", type=local_path, metavar="FILE", help="answers of any engine instead")
    flag("--model", metavar="NAME", help="one of configs/model, a folder, or a hub name")
    flag("--bench", metavar="NAME", help="of answers without prompts: of configs/bench, or a file")
    flag("--made-in", choices=TYPES, help="the type they were computed in, if another one")

    with user_errors("no gap was written"):
        options = parser.parse_intermixed_args()
        grants = [f"model.{key}=true" for key in PERMISSIONS]
        if options.answers is not None and options.model is not None:
            judged = audit_file(
                options.answers, options.model, options.bench, options.made_in, options.words
            )
            sys.exit(int(not all(one.places and not one.wrong for one in judged)))

        folders = [word for word in options.words if word not in grants]
        of_file = (options.answers, options.model, options.bench, options.made_in)
        if len(folders) != 1 or any(of_file):
            raise UserError("name an experiment's folder, or --answers FILE and --model NAME")
        permitted = {key: f"model.{key}=true" in options.words for key in PERMISSIONS}
        audit_folder(local_path(folders[0]), permitted)


def audit_file(
    path: Path, model: str, bench: str | None, made_in: str | None, words: list[str]
) -> list[Judged]:
    settings = named("model", model) | {"model.linear": "torch"}  # as in transformers
    if bench is not None:
        settings |= named("bench", bench)
    chosen = [f"{key}={quoted(value)}" for key, value in settings.items()]
    config = group_settings([*chosen, *words], "model", "bench")

    of_bench = load_bench(**config["bench"]).questions if bench is not None else ()
    questions = {question.question_id: question for question in of_bench}
    return audit_answers(path, ModelSettings(**config["model"]), questions, made_in)


def audit_folder(folder: Path, permitted: dict[str, bool]) -> None:
    experiment = Experiment.read(folder)
    if not experiment.audits:
        raise UserError(
            f"{folder}: no vanilla run to compare with; add method=vanilla to the sweep"
        )

    with keep_devices():  # several audits may use the same model
        write_json(folder / GAPS, list(measure_gaps(experiment, permitted)))
    print("\n".join(write_audit(experiment, folder / "tables")))


def measure_gaps(experiment: Experiment, permitted: dict[str, bool]) -> Iterator[dict[str, Any]]:
    """Measure the gap of the two largest logits where an answer first differs from vanilla's.

    Args:
        permitted: by PERMISSIONS, what this command's user grants. A folder's metadata grant
            nothing, as anybody may have written them.

    Yields:
        `at` (run, question, choice, turn, token), `gap` (in the run's own type).

    Raises UserError if a model needs a permission, or its files or questions have changed.
    """
    for audit in experiment.audits:
        if not audit.different:
            continue
        first = audit.pool.first
        dtype = {"dtype": first.settings["model"]["dtype"]}  # the type that the run used
        settings = ModelSettings(**first.metadata["config"]["model"] | permitted | dtype)

        with exclusive(settings) as settings:
            loaded = load_model(settings)
            files = first.files
            changed = difference(files, loaded.files) if files else ""
            if changed:
                raise UserError(
                    f"{first.folder}: its model is no longer the one in {settings.path} ({changed})"
                )

            for run in audit.pool.runs:  # shards have different questions
                turns = [turn for turn in audit.different if turn.run is run]
                if turns:
                    yield from _gaps(run, turns, loaded)

            del loaded  # before loading another model


def _gaps(run: Run, turns: list[Turn], loaded: LoadedModel) -> Iterator[dict[str, Any]]:
    questions = _questions(run)
    rows = {row["question_id"]: row for row in run.answers}

    for turn in turns:
        choice = rows[turn.question_id]["choices"][turn.choice]
        *before, ids = choice["output_ids"][: turn.turn + 1]
        # of the ids, as compact records hold no texts
        answers = [answer_text(loaded.template, loaded.tokenizer, tokens) for tokens in before]
        chat = chat_of(questions[turn.question_id].turns[: turn.turn + 1], answers)
        prompt = prompt_ids(loaded.template, loaded.tokenizer, chat, run.metadata.get("date"))

        forced = force(loaded.target, prompt, ids[: turn.differs_at])
        yield {"at": list(turn.key), "gap": forced.margins[-1]}


def _questions(run: Run) -> dict[int | str, Question]:
    # nothing is fetched, as anybody may have written the address
    settings = run.metadata["config"]["bench"] | {"url": None}
    bench = load_bench(**settings)
    if bench.sha256 != run.settings["bench"]["sha256"]:
        raise UserError(f"{run.folder}: its questions are no longer those of {settings['path']}")
    return {question.question_id: question for question in bench.questions}


class Judged(NamedTuple):
    answer: EngineAnswer
    places: int
    ties: list[float]  # the gaps of its near ties
    wrong: int  # number of its wrong tokens
    words: str

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.places - len(self.ties) - self.wrong, len(self.ties), self.wrong


def judge(answer: EngineAnswer, forced: Forced, tie: float, loaded: LoadedModel) -> Judged:
    """Judge each position of an answer, and its end if the engine reports an EOS there."""
    ends = forced.choices[-1] in loaded.eos
    tokens = list(answer.ids)
    if answer.finish == "stop":  # a position of its own
        tokens.append(forced.choices[-1] if ends else END)

    apart = [i for i, token in enumerate(tokens) if token != forced.choices[i]]
    wrong = [i for i in apart if not forced.gaps[i] <= tie]  # NaN is wrong
    ties = [i for i in apart if i not in wrong]

    words = []
    for i in (wrong or ties)[:SHOWN]:
        token = "the end" if tokens[i] == END else spelt(tokens[i], loaded)
        choice = spelt(forced.choices[i], loaded)
        words.append(f"token {i + 1} is {token}, the model's {choice} (gap {forced.gaps[i]:.3g})")

    if not ends and answer.finish not in ("stop", "length"):
        why = visible(answer.finish)[:30] or "no reason given"
        words.append(f"ends early ({why}), the model goes on")
    if answer.behind:
        words.append(f"{answer.behind} tokens behind EOS are left out")

    return Judged(
        answer,
        places=len(tokens),
        ties=[forced.gaps[i] for i in ties],
        wrong=len(wrong),
        words="; ".join(words),
    )


def spelt(token: int, loaded: LoadedModel) -> str:
    text = loaded.tokenizer.decode([token])
    return visible(json.dumps(text, ensure_ascii=False))[:40]


def without_eos(answer: EngineAnswer, loaded: LoadedModel) -> EngineAnswer:
    """Return the answer without its EOS; of several, a server may hide which it was."""
    if not loaded.eos.intersection(answer.ids[-1:]):
        return answer
    return replace(answer, ids=answer.ids[:-1], finish="stop")


def audit_served(folder: Path, permitted: dict[str, bool]) -> None:
    """Audit each finished server run of a folder, once for a number type."""
    served = []
    for path in folder.glob("runs/*/summary.json"):
        metadata = read_object(path.with_name("metadata.json"))
        if metadata.get("execution_used") == SERVED:
            served.append(path.parent)

    for run in runs_at(served):
        method = run.metadata["config"]["method"]
        made_in = method["dtype"]
        if not method.get("audit", True):
            continue
        if run.summary.get("audit", {}).get("made_in", "none") == made_in:
            continue
        # as in `audit_file`
        model = run.metadata["config"]["model"] | permitted | {"linear": "torch"}
        answers = run.folder / "answers.jsonl"
        judged = audit_answers(answers, ModelSettings(**model), _questions(run), made_in)

        counts = np.sum([one.counts for one in judged], axis=0).tolist()
        audit = dict(zip(AUDITED, counts, strict=True)) | {"made_in": made_in}
        write_json(run.folder / "summary.json", run.summary | {"audit": audit})


def audit_answers(
    path: Path,
    settings: ModelSettings,
    questions: dict[Any, Question],
    made_in: Any,
) -> list[Judged]:
    """Compare a file's answers with the model's own greedy choices, and print the comparison.

    Args:
        made_in: the type that the engine computed in; None: the model's.
    """
    requests = read_requests(path, questions)
    with keep_devices(), exclusive(settings, timed=False) as settings:
        loaded = load_model(replace(settings, dtype=made_in or settings.dtype))
        date = recorded_date(path.parent)
        answers = [tokenised(where, request, loaded, date) for where, request in requests]
        every = -(-len(answers) // SAMPLES)
        sample = [(answer.prompt, answer.ids[:SAMPLED]) for answer in answers[::every]]
        by_steps = [force(loaded.target, *one, by_steps=True) for one in sample]
        made_type = type_of(loaded)
        del loaded  # before another type is loaded

        loaded = load_model(settings)
        at_once = [force(loaded.target, *one) for one in sample]
        tie = 2 * max(map(noise, by_steps, at_once))

        judged = []
        with progress_bar("audit", len(answers)) as progress:
            for answer in answers:
                bare = without_eos(answer, loaded)
                forced = force(loaded.target, bare.prompt, bare.ids, loaded.eos)
                judged.append(judge(bare, forced, tie, loaded))
                progress.update()

    dtype = type_of(loaded)
    print(
        f"{path}: each token next to the greedy choice of {settings.name} in {dtype},"
        f" {devices_in_words(loaded)}"
    )
    print(
        f"near tie: a gap of at most {tie:.2g}, twice what two greatest logits moved against each"
        f" other between one forward and, in {made_type}, a forward a token"
        f" ({sum(len(one.choices) for one in by_steps)} places)"
    )
    print("\n".join(["", *table_of(judged), "", *verdict(judged, dtype)]))
    return judged


def type_of(loaded: LoadedModel) -> str:
    return str(loaded.target.dtype).removeprefix("torch.")


def table_of(judged: Sequence[Judged]) -> list[str]:
    rows = [["question", "tokens", "equal", "near ties", "wrong"]]
    for one in judged:
        rows.append([one.answer.name, *map(str, (one.places, *one.counts))])
    words = ["", *(one.words for one in judged)]
    return [f"{row}  {more}".rstrip() for row, more in zip(aligned(rows), words, strict=True)]


def verdict(judged: Sequence[Judged], dtype: str) -> list[str]:
    ties = list(chain.from_iterable(one.ties for one in judged))
    places = sum(one.places for one in judged)
    wrong = sum(one.wrong for one in judged)
    bad = sum(bool(one.wrong) for one in judged)
    empty = sum(not one.places for one in judged)
    remade = sum(one.answer.remade for one in judged)

    widest = f", the widest {max(ties):.2g}" if ties else ""
    lines = []
    if places:
        begin = "Not lossless" if wrong else "Lossless"
        of_all = f"{wrong:,} of {places:,} tokens are wrong, in {bad} of {len(judged)} answers"
        lines.append(f"{begin} in {dtype}: {of_all}; {len(ties)} near ties{widest}.")
    if empty:
        lines.append(f"Not audited: {empty} of {len(judged)} answers, which hold no token.")
    if remade:
        lines.append(f"Of {remade} answers there is text alone: ids made from it may be others.")
    return lines


if __name__ == "__main__":
    main()
