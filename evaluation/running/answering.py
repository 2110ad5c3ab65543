"""Answer turn by turn: a question by one method, or by several in shared forwards, or a batch."""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from model.engine import Generation, Sampling
from model.engine.loop.answer import acceptance_record, unmarked
from model.engine.rule.sampling import hashed_seed

from ..loading.answerers import Answerer, Served, ServedAnswer
from ..loading.bench import answer_text, chat_of, prompt_ids
from ..loading.devices import PhaseClock, peak_bytes, restart_peak
from ..records.rows import SCHEMA, Question, Row, between, ids_sha256, novel_tokens
from .shared_text import generate_together


def answer(
    questions: Sequence[Question], answerers: Sequence[tuple[Answerer, dict[str, Any]]]
) -> list[Row]:
    """Return the rows of one question by each answerer, or of several questions by one as a batch.

    Each answerer has its configuration. If several, they share forwards: they are untimed, on this
    engine, and have the same `num_choices`.
    """
    first, config = answerers[0]
    devices = [torch.device(device) for device in first.loaded.target.devices]
    restart_peak(devices)

    choices: list[list[Conversation]] = []
    for index in range(config["num_choices"]):
        conversations = list[Conversation]()
        for question in questions:
            conversations += [Conversation(question, *pair, index) for pair in answerers]

        for turn in range(max(len(question.turns) for question in questions)):
            answer_turn([one for one in conversations if turn < len(one.question.turns)])
        choices.append(conversations)

    peak = peak_bytes(devices) if config["timed"] and not isinstance(first, Served) else None
    return [build_row(of_question, peak) for of_question in zip(*choices, strict=True)]


def answer_turn(conversations: Sequence[Conversation]) -> None:
    """Answer the next turn of each conversation, of equal requests and of a batch together."""
    groups = defaultdict[Any, list[Conversation]](list)
    for one in conversations:
        if not one.fits_next_prompt():  # a later turn after long answers: recorded as such
            one.add(Generation(stop="context"))
        else:
            groups["batch" if one.batched else (*one.request.values(), *one.prompt)].append(one)

    for together in groups.values():
        one = together[0]
        if one.batched:
            prompts = [each.prompt for each in together]
            samplings = [each.request["sampling"] for each in together]
            limit = one.request["max_new_tokens"]
            answers = one.answerer.answer_batch(prompts, limit, samplings)
        elif len(together) == 1:
            answers = [one.answerer.answer(one.prompt, mark=one.mark, **one.request)]
        else:
            for each in together:
                each.answerer.begin()
            loaded = one.answerer.loaded
            drafters = [each.answerer.drafter for each in together]
            answers = generate_together(
                loaded.target, drafters, one.prompt, eos=loaded.eos, **one.request
            )

        for each, generation in zip(together, answers, strict=True):
            each.add(generation)


class Conversation:
    """The turns of a question with one answerer, and their record.

    Attributes:
        request: arguments of `Answerer.answer`, the same for all turns.
        answers: the text of each answered turn.
        turns: the record of each answered turn, by the keys of a choice.
    """

    def __init__(
        self,
        question: Question,
        answerer: Answerer,
        config: dict[str, Any],
        index: int,
    ) -> None:
        self.question = question
        self.answerer = answerer
        self.timed = bool(config["timed"])
        self.in_phases = bool(config["phases"] and answerer.on_engine)
        self.batched = config["batch"] > 1

        # noise differs by choice and is the same for all methods and turns
        seed = hashed_seed(config["seed"], question.key, index)
        self.request: dict[str, Any] = {
            "max_new_tokens": config["max_new_tokens"],
            "sampling": Sampling(**config["sampling"], seed=seed),
        }

        self.answers: list[str] = []
        self.accept_lengths: list[int] = []
        self.turns: list[dict[str, Any]] = []

    def fits_next_prompt(self) -> bool:
        """Build the next turn's prompt; True if it leaves room for an answer."""
        loaded = self.answerer.loaded
        turns = list(self.question.turns[: len(self.answers) + 1])

        start = time.perf_counter()
        chat = chat_of(turns, self.answers)
        self.prompt = prompt_ids(loaded.template, loaded.tokenizer, chat, self.answerer.date)
        self.prompt_s = time.perf_counter() - start

        self.clock = PhaseClock(loaded.target) if self.in_phases else None
        self.mark = self.clock.mark if self.clock else unmarked
        return len(self.prompt) < loaded.target.context

    def add(self, generation: Generation) -> None:
        loaded = self.answerer.loaded
        steps = generation.steps
        by_phase = self.timed and self.answerer.streams

        turn = {
            "decoding_steps": len(steps),
            "new_tokens": len(generation.tokens),
            "wall_time": generation.prefill_s + generation.decode_s if self.timed else 0.0,
            "prompt_tokens": len(self.prompt),
            "novel_tokens": novel_tokens(self.prompt, generation.tokens),
            "prompt_sha256": ids_sha256(self.prompt),
            "prompt_time": self.prompt_s if self.timed else None,
            "prefill_time": generation.prefill_s if by_phase else None,
            "decode_time": generation.decode_s if by_phase else None,
            # in none of the other times
            "setup_time": generation.setup_s if by_phase else None,
            "step_us": between(generation.ends_s),
            "forwards": generation.forwards,
            "stop": generation.stop,
            "output_ids": generation.tokens,
            # nodes forwarded, rank path accepted, and the source of the draft if there are
            # several
            "step_nodes": [step.nodes for step in steps],
            "step_paths": [list(step.rank_path) for step in steps],
            "step_sources": [step.source for step in steps],
            # sequences in its forward
            **({"step_batch": [step.batch for step in steps]} if self.batched else {}),
            # seconds by phase of its steps
            "phase_time": dict(self.clock.seconds) if self.clock else {},
        }

        text = None
        if isinstance(generation, ServedAnswer):
            text = generation.text
            turn |= generation.recorded

        text = text or answer_text(loaded.template, loaded.tokenizer, generation.tokens)
        self.answers.append(text)
        self.accept_lengths += generation.accept_lengths
        self.turns.append(turn)

    def record(self, index: int) -> Row:
        keys = max(self.turns, key=len)  # a turn that has no room in the context has fewer
        columns: Row = {key: [turn.get(key) for turn in self.turns] for key in keys}

        # columns that this run does not record are null
        there = {
            "step_paths": self.answerer.on_engine,
            "step_us": self.timed and self.answerer.streams,
            "step_sources": any(any(turn) for turn in columns["step_sources"]),
            "phase_time": self.in_phases,
        }
        columns |= {key: None for key, recorded in there.items() if not recorded}

        return {
            "index": index,
            "turns": self.answers,
            "accept_lengths": self.accept_lengths,
            **columns,
        }


def build_row(choices: Sequence[Conversation], peak: int | None) -> Row:
    question = choices[0].question
    answerer = choices[0].answerer
    return {
        "question_id": question.question_id,
        "schema": SCHEMA,
        "category": question.category,
        "question_sha256": question.sha256,
        "answer_id": uuid.uuid4().hex,
        "model_id": f"{answerer.loaded.settings.name}-{answerer.label}".replace(" ", "-"),
        "choices": [conversation.record(index) for index, conversation in enumerate(choices)],
        "tstamp": time.time(),
        "peak_memory": peak,
    }


def acceptance_lines(row: Row, most: int) -> Iterator[str]:
    """Yield a question's lines of acceptance.jsonl, with `usage` and `metrics` as of vLLM."""
    for choice in row["choices"]:
        for turn, (nodes, paths) in enumerate(
            zip(choice["step_nodes"], choice["step_paths"], strict=True),
        ):
            prompt = choice["prompt_tokens"][turn]
            new = choice["new_tokens"][turn]
            # the root is no draft token
            record = acceptance_record([n - 1 for n in nodes], [len(path) for path in paths], most)
            line = {
                "question_id": row["question_id"],
                "category": row["category"],
                "choice": choice["index"],
                "turn": turn,
                "usage": {"prompt_tokens": prompt, "completion_tokens": new},
                "metrics": {"speculative_decoding": record},
            }
            yield json.dumps(line, ensure_ascii=False) + "\n"
