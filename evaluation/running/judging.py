"""Judge answers of any engine by the local model: each token next to the model's own choice behind the same text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from model.errors import visible
from model.files import write_json

from ..loading.bench import load_bench
from ..loading.devices import exclusive, keep_devices
from ..loading.engine_answers import EngineAnswer, Forced, force, noise, read_requests, tokenised
from ..loading.models import LoadedModel, devices_in_words, load_model
from ..loading.settings import ModelSettings
from ..records.questions import Question
from ..records.runs import runs_at
from ..statistics.rendering import aligned
from .scheduling import Progress

SHOWN = 3  # places of an answer in words
END = -1  # in place of a token: the end, which any EOS would be
SAMPLES, SAMPLED = 4, 32  # answers in which noise is measured, and the first tokens of each


class Judged(NamedTuple):
    """An answer, place by place against the model's own tokens."""

    answer: EngineAnswer
    places: int
    close: int  # places at which there could be a near tie
    ties: list[float]  # the gaps of its near ties
    wrong: list[float]  # and of the tokens that are wrong
    words: str


def judge(answer: EngineAnswer, forced: Forced, tie: float, loaded: LoadedModel) -> Judged:
    """Judge each place of an answer, and its end if the engine says that EOS is there.

    Args:
        tie: the largest gap of a near tie.
    """

    def spelt(token: int) -> str:
        return visible(json.dumps(loaded.tokenizer.decode([token]), ensure_ascii=False))[:40]

    ended, ends = bool(loaded.eos.intersection(answer.ids[-1:])), forced.own[-1] in loaded.eos
    said = list(answer.ids)
    if stops := answer.finish == "stop" and not ended:  # a place of its own, where EOS is not in the ids
        said.append(forced.own[-1] if ends else END)
    apart = [i for i, (one, own) in enumerate(zip(said, forced.own, strict=False)) if one != own]
    wrong = [i for i in apart if not forced.gaps[i] <= tie]  # NaN is wrong
    words = [f"{len(wrong)} wrong, the first ones:"] if len(wrong) > SHOWN else []
    for i in (wrong or apart)[:SHOWN]:
        token = "the end" if said[i] == END else spelt(said[i])
        words.append(f"token {i + 1} is {token}, the model's {spelt(forced.own[i])} (gap {forced.gaps[i]:.3g})")
    at_limit = answer.finish == "length" if answer.limit is None else len(answer.ids) >= answer.limit
    if not (ended or ends or stops or at_limit):
        words.append(f"ends early ({visible(answer.finish)[:30] or 'no reason given'}), the model goes on")
    words += [f"{answer.behind} tokens behind EOS are left out"] if answer.behind else []
    close = sum(margin <= tie for margin in forced.margins[: len(said)])
    ties = [forced.gaps[i] for i in apart if i not in wrong]
    return Judged(answer, len(said), close, ties, [forced.gaps[i] for i in wrong], "; ".join(words))


class Verdict(NamedTuple):
    """What was judged, and the lines above it."""

    judged: list[Judged]
    heading: list[str]
    dtype: str

    @property
    def is_lossless(self) -> bool:
        """True if each answer was read and no token is wrong."""
        return all(one.places and not one.wrong for one in self.judged)

    @property
    def lines(self) -> list[str]:
        """As they are printed."""
        return ["\n".join(self.heading), "", *table_of(self.judged), "", *verdict(self.judged, self.dtype)]


def judge_file(path: Path, settings: ModelSettings, questions: Mapping[Any, Question], made_in: Any = None) -> Verdict:
    """Judge the answers of a file.

    Args:
        made_in: the type that the engine computed in; None: the model's.
    """
    requests = read_requests(path, questions)
    with keep_devices(), exclusive(settings, timed=False) as settings:
        loaded = load_model(replace(settings, dtype=made_in or settings.dtype))
        answers = [tokenised(where, request, loaded) for where, request in requests]
        sample = [(answer.prompt, answer.ids[:SAMPLED]) for answer in answers[:: -(-len(answers) // SAMPLES)]]
        by_steps = [force(loaded.target, *one, by_steps=True) for one in sample]
        types = [str(loaded.target.dtype).removeprefix("torch.")]
        del loaded  # before another type is loaded
        loaded = load_model(settings)
        types.append(str(loaded.target.dtype).removeprefix("torch."))
        tie = 2 * max(noise(one, force(loaded.target, *given)) for one, given in zip(by_steps, sample, strict=True))
        total = sum(len(answer.prompt) + len(answer.ids) for answer in answers)
        judged = []
        with Progress("audit", total, unit="tokens") as progress:
            for answer in answers:
                forced = force(loaded.target, answer.prompt, answer.ids, loaded.eos)
                judged.append(judge(answer, forced, tie, loaded))
                progress.update(len(answer.prompt) + len(answer.ids))
    heading = [
        f"{path}: each token next to the greedy choice of {settings.name} in {types[1]}, {devices_in_words(loaded)}",
        f"near tie: a gap of at most {tie:.2g}, twice what two greatest logits moved against each other between one "
        f"forward and, in {types[0]}, a forward a token ({sum(len(one.own) for one in by_steps)} places)",
    ]
    return Verdict(judged, heading, types[1])


def judge_served(folders: Iterable[Path], permitted: Mapping[str, bool]) -> list[str]:
    """Judge the finished runs of servers that were not judged yet, and note it in their summaries.

    Args:
        folders: of runs.
        permitted: of the model settings trust_remote_code and allow_pickle, what the user of this command grants.

    Returns:
        Lines for each run: how many tokens are the model's own, near ties, or wrong.
    """
    lines = []
    for run in runs_at(folder for folder in folders if (folder / "summary.json").exists()):
        if not run.identity.is_served or "audit" in run.summary:
            continue
        asked, dtype = run.metadata["config"]["model"], run.settings["model"]["dtype"]
        settings = ModelSettings(**asked | permitted | {"dtype": dtype, "linear": "torch"})  # as transformers has them
        bench = load_bench(**run.metadata["config"]["bench"])
        by_id = {question.question_id: question for question in bench.questions}
        found = judge_file(run.folder / "answers.jsonl", settings, by_id, run.settings["method"]["dtype"])
        ties, wrong = (sum(len(getattr(one, kind)) for one in found.judged) for kind in ("ties", "wrong"))
        places = sum(one.places for one in found.judged)
        counts = {"tokens_equal": places - ties - wrong, "near_ties": ties, "tokens_wrong": wrong}
        answers = {one.answer.name: one.words for one in found.judged if one.words}
        write_json(run.folder / "summary.json", run.summary | {"audit": counts | {"dtype": dtype, "words": answers}})
        lines += [f"{run.label}: {line}" for line in verdict(found.judged, found.dtype)]
        lines += [f"  question {name}: {words}" for name, words in answers.items()]
    return lines


def table_of(judged: Sequence[Judged]) -> list[str]:
    """Return a line an answer: its counts, and the first token that is not the model's."""
    rows = [["question", "tokens", "equal", "near ties", "wrong"]]
    for one in judged:
        counts = (one.places, one.places - len(one.ties) - len(one.wrong), len(one.ties), len(one.wrong))
        rows.append([one.answer.name, *map(str, counts)])
    words = ["", *(one.words for one in judged)]
    return [f"{row}  {more}".rstrip() for row, more in zip(aligned(rows), words, strict=True)]


def verdict(judged: Sequence[Judged], dtype: str) -> list[str]:
    """Say whether the answers are the model's own, and what that rests on."""
    ties, wrong = ([gap for one in judged for gap in getattr(one, kind)] for kind in ("ties", "wrong"))
    places, close = sum(one.places for one in judged), sum(one.close for one in judged)
    empty, remade = sum(not one.places for one in judged), sum(one.answer.remade for one in judged)
    near = f"{len(ties)} near ties at {close} places where two logits are so close"
    near += f", the widest {max(ties):.2g}" if ties else ""
    lines = []
    if wrong:
        bad = f"{sum(bool(one.wrong) for one in judged)} of {len(judged)} answers"
        lines.append(f"Not lossless in {dtype}: {len(wrong):,} of {places:,} tokens are wrong, in {bad}; {near}.")
    elif places:
        lines.append(
            f"Lossless in {dtype}: of {places:,} tokens in {len(judged) - empty} answers none is wrong; {near}."
        )
    if empty:
        lines.append(f"Not audited: {empty} of {len(judged)} answers, which hold no token.")
    if remade:
        alone = "their ids were made from it, and may not be the engine's."
        lines.append(f"Of {remade} answers there is text alone: {alone}")
    return lines
