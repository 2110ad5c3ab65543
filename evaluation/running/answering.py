"""Answering a question, turn after turn, as often as the configuration says."""

from __future__ import annotations

import time
import uuid
from typing import Any

import torch

from model.decoding import Generation

from ..records.questions import Question
from ..records.rows import RECORDS, Row
from .conversation import answer_text, prompt_ids
from .memory import cache_bytes, peak_bytes, restart_peak
from .methods import Method
from .phases import PhaseClock
from .step_times import warm_up_prompt


def warm_up(method: Method) -> None:
    """Answer a held-out question, then forget it: allocation and first-call costs stay out of the timings."""
    method.answer(warm_up_prompt(method.loaded), 48)
    method.prepare()


def answer_question(question: Question, method: Method, config: dict[str, Any], others: int = 0) -> Row:
    """All turns of a question, `num_choices` times, as a row in Spec-Bench's answer format.

    Args:
        others: bytes that other methods hold on the CUDA devices meanwhile.
    """
    devices = [torch.device(device) for device in method.loaded.target.devices]
    restart_peak(devices)
    not_its_own = others + (0 if method.drafter is not None else cache_bytes(method.loaded.target))
    return {
        "question_id": question.question_id,
        "records": RECORDS,
        "category": question.category,
        "question_sha256": question.sha256,
        "answer_id": uuid.uuid4().hex,
        "model_id": f"{method.loaded.settings.name}-{method.label}".replace(" ", "-"),
        "choices": [_converse(question, method, config, index) for index in range(config["num_choices"])],
        "tstamp": time.time(),
        "peak_memory": peak_bytes(devices, not_its_own),
    }


def _converse(question: Question, method: Method, config: dict[str, Any], index: int) -> Row:
    loaded, answers = method.loaded, list[str]()
    own = method.drafter is not None  # decoded by this engine: there are step records, phases and a prefill's time
    generations: list[Generation] = []
    prompts: list[int] = []  # tokens of each turn's prompt
    prompt_times: list[float] = []
    phases: list[dict[str, float]] = []
    for turn in range(len(question.turns)):
        start = time.perf_counter()
        prompt = prompt_ids(loaded.template, loaded.tokenizer, list(question.turns[: turn + 1]), answers)
        prompt_times.append(time.perf_counter() - start)
        prompts.append(len(prompt))
        if len(prompt) < loaded.target.context:
            clock = PhaseClock(loaded.target) if config["phases"] and own else None
            generation = method.answer(prompt, config["max_new_tokens"], clock.mark if clock else None)
            phases.append(dict(clock.seconds) if clock else {})
        else:  # a later turn, behind long answers: no room is left, which is a result and no reason to stop
            generation = Generation(stop="context")
            phases.append({})
        generations.append(generation)
        answers.append(answer_text(loaded.template, loaded.tokenizer, generation.tokens))
    sources = any(step.source for generation in generations for step in generation.steps)
    return {
        "index": index,
        "turns": answers,
        "decoding_steps": [len(g.steps) for g in generations],
        "new_tokens": [len(g.tokens) for g in generations],
        "wall_time": [g.prefill_s + g.decode_s for g in generations],
        "accept_lengths": [n for g in generations for n in g.accept_lengths],
        # beyond Spec-Bench's keys, one entry a turn:
        "prompt_tokens": prompts,
        "prompt_time": prompt_times,
        "prefill_time": [g.prefill_s if own else None for g in generations],
        "decode_time": [g.decode_s if own else None for g in generations],
        "setup_time": [g.setup_s if own else None for g in generations],  # in none of the others
        "forwards": [g.forwards for g in generations],
        "stop": [g.stop for g in generations],
        "output_ids": [g.tokens for g in generations],
        # the step records: nodes forwarded, rank path accepted, and where the draft came from, if from several
        "step_nodes": [[s.nodes for s in g.steps] for g in generations],
        "step_paths": [[list(s.rank_path) for s in g.steps] for g in generations] if own else None,
        "step_sources": [[s.source for s in g.steps] for g in generations] if sources else None,
        # seconds of a turn by phase of its steps, where `phases` asks for them
        "phase_time": phases if config["phases"] and own else None,
    }
