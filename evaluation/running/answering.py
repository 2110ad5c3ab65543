"""Answer a question turn by turn, `num_choices` times: by one method, or by several in shared forwards."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch

from model.engine import Generation
from model.engine.sampling import Sampling
from model.engine.step import unmarked
from model.files import ROOT

from ..configuration.methods import Method
from ..loading.bench import answer_text, prompt_ids
from ..loading.devices import PhaseClock, cache_bytes, peak_bytes, restart_peak
from ..loading.models import LoadedModel
from ..records.questions import Question, read_questions
from ..records.rows import SCHEMA, Row, repeated_ngrams
from .shared_text import generate_together

WARM_UP = ROOT / "data/sample/warmup.jsonl"  # held out from every bench


def warm_up_prompt(loaded: LoadedModel) -> list[int]:
    """Return a held-out prompt, cut to half the context."""
    question = read_questions(WARM_UP)[0]
    prompt = prompt_ids(loaded.template, loaded.tokenizer, [question.turns[0]], [])
    return prompt[: max(loaded.target.context // 2, 1)]


def warm_up(method: Method) -> None:
    """Answer a held-out question, then reset: allocation and first-call costs stay out of the timings."""
    method.answer(warm_up_prompt(method.loaded), 48)
    method.prepare()


def answer_question(question: Question, method: Method, config: dict[str, Any], other_bytes: int = 0) -> Row:
    """Answer all turns of a question, `num_choices` times. Returns a row in Spec-Bench's answer format.

    Args:
        other_bytes: memory of other methods on the CUDA devices.
    """
    devices = [torch.device(device) for device in method.loaded.target.devices]
    restart_peak(devices)
    if method.drafter is None:  # transformers' own generate does not use the engine's cache
        other_bytes += cache_bytes(method.loaded.target)
    choices = []
    for index in range(config["num_choices"]):
        talk = Conversation(question, method, config, index)
        for _ in question.turns:
            talk.answer_next()
        choices.append(talk)
    return row(question, choices, peak_bytes(devices, other_bytes))


def answer_together(question: Question, methods: Sequence[tuple[Method, dict[str, Any]]]) -> list[Row]:
    """Answer by several methods, each with its configuration, in shared forwards. Returns their rows, without times.

    `hf`, which does not run on this engine, answers alone.
    """
    choices: list[list[Conversation]] = [[] for _ in methods]
    for index in range(methods[0][1]["num_choices"]):
        talks = [Conversation(question, method, config, index) for method, config in methods]
        for _ in question.turns:
            # Prompt, limit and sampling are equal, so the answers will be, too.
            same: dict[tuple[Any, ...], list[Conversation]] = {}
            for talk in talks:
                prompt = talk.next_prompt()
                if talk.on_engine and talk.fits(prompt):
                    same.setdefault((talk.config["max_new_tokens"], talk.sampling, *prompt), []).append(talk)
                else:
                    talk.answer_next()
            for (most, sampling, *prompt), group in same.items():
                for talk in group:
                    talk.method.begin_prompt()
                target, eos = group[0].method.loaded.target, group[0].method.loaded.eos
                drafters = [drafter for talk in group if (drafter := talk.method.drafter) is not None]
                generations = generate_together(
                    target, drafters, prompt, max_new_tokens=most, eos=eos, sampling=sampling
                )
                for talk, generation in zip(group, generations, strict=True):
                    talk.add(prompt, generation)
        for conversations, talk in zip(choices, talks, strict=True):
            conversations.append(talk)
    return [row(question, conversations, None) for conversations in choices]


def sampling_of(config: dict[str, Any], question: Question, index: int) -> Sampling:
    """Return the sampling of one choice: its noise differs by choice and is the same for all methods and turns."""
    name = f"{config['seed']} {question.key} {index}".encode()
    return Sampling(**config["sampling"], seed=int.from_bytes(hashlib.sha256(name).digest()[:7], "big"))


def row(question: Question, choices: Sequence[Conversation], peak: int | None) -> Row:
    """Build a question's record: Spec-Bench's keys and this project's."""
    method = choices[0].method
    return {
        "question_id": question.question_id,
        "schema": SCHEMA,
        "category": question.category,
        "question_sha256": question.sha256,
        "answer_id": uuid.uuid4().hex,
        "model_id": f"{method.loaded.settings.name}-{method.label}".replace(" ", "-"),
        "choices": [talk.record(index) for index, talk in enumerate(choices)],
        "tstamp": time.time(),
        "peak_memory": peak,
    }


class Conversation:
    """One method's turns on a question and their record.

    Attributes:
        on_engine: True if decoded by this engine, which gives step records, phases and a prefill time.
    """

    def __init__(self, question: Question, method: Method, config: dict[str, Any], index: int) -> None:
        self.question, self.method, self.config = question, method, config
        self.on_engine, self.timed = method.drafter is not None, bool(config["timed"])
        self.sampling = sampling_of(config, question, index)
        self.answers: list[str] = []
        self.generations: list[Generation] = []
        self._prompts: list[int] = []  # tokens of each turn's prompt
        self._repeated: list[float | None] = []  # share of each answer's 3-grams
        self._prompt_times: list[float] = []
        self._phases: list[dict[str, float]] = []

    def next_prompt(self) -> list[int]:
        """Return the next turn's prompt, with the answers so far."""
        loaded, turns = self.method.loaded, self.question.turns[: len(self.answers) + 1]
        return prompt_ids(loaded.template, loaded.tokenizer, list(turns), self.answers)

    def fits(self, prompt: list[int]) -> bool:
        """True if the prompt leaves room for an answer."""
        return len(prompt) < self.method.loaded.target.context

    def answer_next(self) -> None:
        """Answer the next turn by this method alone."""
        loaded, start = self.method.loaded, time.perf_counter()
        prompt = self.next_prompt()
        seconds = time.perf_counter() - start
        if not self.fits(prompt):  # a later turn after long answers: recorded, the run goes on
            self.add(prompt, Generation(stop="context"), seconds)
            return
        clock = PhaseClock(loaded.target) if self.config["phases"] and self.on_engine else None
        mark = clock.mark if clock else unmarked
        generation = self.method.answer(prompt, self.config["max_new_tokens"], mark, self.sampling)
        self.add(prompt, generation, seconds, dict(clock.seconds) if clock else {})

    def add(
        self, prompt: list[int], generation: Generation, seconds: float = 0.0, phases: dict[str, float] | None = None
    ) -> None:
        """Add a turn's answer; `seconds` is the time to build its prompt."""
        loaded = self.method.loaded
        self._prompts.append(len(prompt))
        self._repeated.append(repeated_ngrams(prompt, generation.tokens))
        self._prompt_times.append(seconds)
        self._phases.append(phases or {})
        self.generations.append(generation)
        self.answers.append(answer_text(loaded.template, loaded.tokenizer, generation.tokens))

    def record(self, index: int) -> Row:
        """Return Spec-Bench's keys of a choice and this project's, which have one entry per turn."""
        generations, timed = self.generations, self.timed
        sources = any(step.source for generation in generations for step in generation.steps)
        return {
            "index": index,
            "turns": self.answers,
            "decoding_steps": [len(g.steps) for g in generations],
            "new_tokens": [len(g.tokens) for g in generations],
            "wall_time": [g.prefill_s + g.decode_s if timed else 0.0 for g in generations],
            "accept_lengths": [n for g in generations for n in g.accept_lengths],
            "prompt_tokens": self._prompts,
            "prompt_time": self._prompt_times if timed else [None for _ in generations],
            "prefill_time": [g.prefill_s if timed and self.on_engine else None for g in generations],
            "decode_time": [g.decode_s if timed and self.on_engine else None for g in generations],
            # in none of the other times
            "setup_time": [g.setup_s if timed and self.on_engine else None for g in generations],
            "forwards": [g.forwards for g in generations],
            "stop": [g.stop for g in generations],
            "output_ids": [g.tokens for g in generations],
            "repeated_3grams": self._repeated,  # share that occurred earlier, in the prompt or the answer
            # the step records: nodes forwarded, rank path accepted, and the source of the draft if there are several
            "step_nodes": [[s.nodes for s in g.steps] for g in generations],
            "step_paths": [[list(s.rank_path) for s in g.steps] for g in generations] if self.on_engine else None,
            "step_sources": [[s.source for s in g.steps] for g in generations] if sources else None,
            # seconds of a turn by phase of its steps, where `phases` asks for them
            "phase_time": self._phases if self.config["phases"] and self.on_engine else None,
        }
