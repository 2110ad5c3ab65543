"""The decoding loop, the same for every method."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...errors import UserError
from ..contract.drafter import Drafter, Session
from ..graphs.static_step import Forwarded
from ..rule.sampling import Choice
from ..target.target import Target
from .answer import Decoding, Generation, Request, StepRecord
from .step import Step, conclude

Answers = TypeVar("Answers")
ROOM = 1024  # tokens of an answer that a cache has room for at first


def decode(
    target: Target, session: Session, prompt: list[int], **settings: Any
) -> Generator[StepRecord, None, Generation]:
    """Decode a step at a time: the output is the target's own, whatever is drafted.

    Other sequences may be decoded between two steps, and by other threads: the model's lock is held
    per step. Times include the consumer's work between steps, and waits for the lock.

    Args:
        session: always closed once iteration has started.
        prompt: token ids, at least one.
        settings: as `Request` has them.

    Yields:
        The record of each step as soon as its tokens are known.

    Raises:
        UserError: the request does not fit the model, or as `step.Executor`.
    """
    request = Request(**settings)
    ends = ExitStack()
    ends.callback(session.close)
    try:
        with target.turns, torch.inference_mode():  # released while the consumer works
            sequence = open_sequence(target, session, prompt, request, ends)
            out = sequence.out
            step = Step(sequence)
            target.synchronize()
            sequence.start = time.perf_counter()
            if not first_forward(sequence):
                step()
            out.prefill_s = out.ends_s[0]
            request.mark("loop")
        yield out.steps[-1]
        while not out.stop:
            with target.turns, torch.inference_mode():
                step()
                request.mark("loop")
            yield out.steps[-1]
        with target.turns:
            target.synchronize()
            out.decode_s = time.perf_counter() - sequence.start - out.prefill_s
    finally:
        with target.turns:
            ends.close()
    return out


def generate(target: Target, drafter: Drafter, prompt: list[int], **settings: Any) -> Generation:
    """Return the whole answer; settings as `Request` has them."""
    with target.turns:
        session = drafter.session()
    return exhaust(decode(target, session, prompt, **settings))


def exhaust(
    steps: Generator[Any, None, Answers], seen: Callable[[Any], None] = lambda step: None
) -> Answers:
    """Run a stream to its end and return its answers; `seen` is called with what it yields."""
    while True:
        try:
            seen(next(steps))
        except StopIteration as end:
            out: Answers = end.value
            return out


def open_sequence(
    target: Target, session: Session, prompt: list[int], request: Request, ends: ExitStack
) -> Decoding:
    """Return the sequence, on a borrowed cache that `ends` gives back."""
    limit = target.token_budget(prompt, request.max_new_tokens)
    drafter = session.drafter
    needs = drafter.needs
    if drafter.vocab_size not in (None, target.vocab_size):
        raise UserError(
            f"{type(drafter).__name__}: was made for {drafter.vocab_size} token ids, {target.name}"
            f" has {target.vocab_size}; make it for this model"
        )
    if target.recurrent and needs.tree:
        raise UserError(
            f"{target.name}: keeps recurrent states, so that drafts are chains;"
            f" {type(drafter).__name__} needs its tree"
        )
    target.check_hidden(needs.hidden)
    relearns_prompt = needs.prompt_logits and not drafter.stateful  # each sequence anew
    reusable = prompt if request.reuse and not (relearns_prompt or needs.hidden) else ()
    reader = drafter if needs.prompt_logits else None  # reuse only what this drafter has read
    room = len(prompt) + min(limit, ROOM) if request.execution == "eager" else None
    cache = ends.enter_context(target.cache(drafter.max_nodes, reusable, reader, tokens=room))
    session.choice = Choice(request.sampling, target.device)
    sequence = Decoding(target, cache, session, request, list(prompt), limit)
    ends.callback(lambda: cache.record(sequence.text))  # also if a step fails
    return sequence


def first_forward(sequence: Decoding) -> bool:
    """Forward the prompt, and the session's draft if it begins with one; True if it was a step."""
    target = sequence.target
    session = sequence.session
    cache = sequence.cache
    sizing = session.drafter.sizing
    needs = session.drafter.needs
    prompt = list(sequence.text)
    kept = cache.length
    chain = session.begin(prompt)
    rows = len(prompt)
    if sizing is not None:  # the root alone gives a token even where drafts do not pay
        rows = sizing.begin()
        chain = session.drafter.root_alone(prompt[-1])
    # the prompt's logits, for a session that observes them after `skip`
    later: list[tuple[int, Tensor]] = []

    def read(start: int, logits: Tensor) -> None:
        if sizing is None:
            session.observe_prompt(prompt, start, logits)
        else:
            later.append((start, logits))

    rows = rows if needs.prompt_logits else 0
    logits, hidden = target.prefill(
        cache, prompt, chain, rows=rows, kept=kept, read=read, hidden=needs.hidden
    )
    forwarded_prompt = prompt[kept:] if chain is not None else prompt[kept:-1]
    if forwarded_prompt and hidden is not None:  # (P - 1 + n, H)
        session.observe_prompt_hidden(forwarded_prompt, hidden[: len(forwarded_prompt)])
    if chain is None:
        sequence.request.mark("prefill")
        sequence.out.forwards = int(bool(forwarded_prompt))
        return False
    forwarded = Forwarded(None, logits, hidden)
    verification = conclude(sequence, session.drafter, chain, forwarded)
    cache.commit(verification.path[: len(verification.tokens)])
    if sizing is None:
        session.observe(verification)
    else:
        session.skip(verification.tokens)
        for start, of_prompt in later:
            session.observe_prompt(prompt, start, of_prompt)
    sequence.request.mark("prefill")
    sequence.add(verification)
    return True
