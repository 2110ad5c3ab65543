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
from ..loading.devices import PhaseClock, peak_bytes, restart_peak
from ..loading.models import LoadedModel
from ..records.questions import Question, read_questions
from ..records.rows import SCHEMA, Row, between, repeated_ngrams
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


def answer(question: Question, methods: Sequence[tuple[Method, dict[str, Any]]]) -> list[Row]:
    """Answer all turns of a question, `num_choices` times: by a timed method, or by untimed ones in shared forwards.

    Args:
        methods: each with its configuration; several are untimed, and have the same `num_choices`.

    Returns:
        A row in Spec-Bench's answer format of each.
    """
    method, config = methods[0]
    devices = [torch.device(device) for device in method.loaded.target.devices]
    restart_peak(devices)
    choices: list[list[Conversation]] = []
    for index in range(config["num_choices"]):
        choices.append([Conversation(question, method, config, index) for method, config in methods])
        for _ in question.turns:
            answer_turn(choices[-1])
    peak = peak_bytes(devices) if config["timed"] else None
    return [build_row(question, conversations, peak) for conversations in zip(*choices, strict=True)]


def answer_turn(conversations: Sequence[Conversation]) -> None:
    """Answer the next turn of each. Of the same prompt, limit and sampling the answers are equal: they share forwards.

    `hf`, which does not run on this engine, answers alone.
    """
    same: dict[tuple[Any, ...], list[Conversation]] = {}
    for conversation in conversations:
        if conversation.timed or not conversation.on_engine:
            conversation.answer_next()
        elif conversation.fits(prompt := conversation.next_prompt()):
            same.setdefault((conversation.config["max_new_tokens"], conversation.sampling, *prompt), []).append(
                conversation
            )
        else:
            conversation.add(prompt, Generation(stop="context"))
    for (most, sampling, *prompt), sharing in same.items():
        for conversation in sharing:
            conversation.method.begin_prompt()
        loaded = sharing[0].method.loaded
        drafters = [drafter for conversation in sharing if (drafter := conversation.method.drafter) is not None]
        generations = generate_together(
            loaded.target, drafters, prompt, max_new_tokens=most, eos=loaded.eos, sampling=sampling
        )
        for conversation, generation in zip(sharing, generations, strict=True):
            conversation.add(prompt, generation)


def sampling_of(config: dict[str, Any], question: Question, index: int) -> Sampling:
    """Return the sampling of one choice: its noise differs by choice and is the same for all methods and turns."""
    name = f"{config['seed']} {question.key} {index}".encode()
    return Sampling(**config["sampling"], seed=int.from_bytes(hashlib.sha256(name).digest()[:7], "big"))


def build_row(question: Question, choices: Sequence[Conversation], peak: int | None) -> Row:
    """Build a question's record: Spec-Bench's keys and this project's."""
    method = choices[0].method
    return {
        "question_id": question.question_id,
        "schema": SCHEMA,
        "category": question.category,
        "question_sha256": question.sha256,
        "answer_id": uuid.uuid4().hex,
        "model_id": f"{method.loaded.settings.name}-{method.label}".replace(" ", "-"),
        "choices": [conversation.record(index) for index, conversation in enumerate(choices)],
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
        self.accept_lengths: list[int] = []
        self.turns: list[dict[str, Any]] = []  # what is recorded of each

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
        self.add(prompt, generation, seconds, dict(clock.seconds) if clock else None)

    def add(
        self, prompt: list[int], generation: Generation, seconds: float = 0.0, phases: dict[str, float] | None = None
    ) -> None:
        """Add a turn's answer; `seconds` is the time to build its prompt."""
        loaded, steps, by_phase = self.method.loaded, generation.steps, self.timed and self.on_engine
        self.answers.append(answer_text(loaded.template, loaded.tokenizer, generation.tokens))
        self.accept_lengths += generation.accept_lengths
        self.turns.append(
            {
                "decoding_steps": len(steps),
                "new_tokens": len(generation.tokens),
                "wall_time": generation.prefill_s + generation.decode_s if self.timed else 0.0,
                "prompt_tokens": len(prompt),
                "prompt_time": seconds if self.timed else None,
                "prefill_time": generation.prefill_s if by_phase else None,
                "decode_time": generation.decode_s if by_phase else None,
                "setup_time": generation.setup_s if by_phase else None,  # in none of the other times
                "step_us": between(generation.ends_s),
                "forwards": generation.forwards,
                "stop": generation.stop,
                "output_ids": generation.tokens,
                "repeated_3grams": repeated_ngrams(prompt, generation.tokens),  # earlier in the prompt or the answer
                # nodes forwarded, rank path accepted, and the source of the draft if there are several
                "step_nodes": [step.nodes for step in steps],
                "step_paths": [list(step.rank_path) for step in steps],
                "step_sources": [step.source for step in steps],
                "phase_time": phases or {},  # seconds by phase of its steps, where `phases` asks for them
            }
        )

    def record(self, index: int) -> Row:
        """Return Spec-Bench's keys of a choice and this project's, which have one entry per turn."""
        columns: Row = {key: [turn[key] for turn in self.turns] for key in self.turns[0]}
        if not self.on_engine:
            columns["step_paths"] = None
        if not (self.timed and self.on_engine):
            columns["step_us"] = None
        if not any(source for turn in columns["step_sources"] for source in turn):
            columns["step_sources"] = None
        if not (self.config["phases"] and self.on_engine):
            columns["phase_time"] = None
        return {"index": index, "turns": self.answers, "accept_lengths": self.accept_lengths, **columns}
