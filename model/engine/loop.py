"""The decoding loop, the same for every method, and its raw datum: the step record."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .cache import TreeCache
from .drafter import Drafter, Session
from .sampling import GREEDY, Sampling
from .step import DeviceStep, Executor, Forwarded, HostStep, Mark, Sequence, conclude, make_step, unmarked
from .target import Target
from .tree import RankPath
from .verification import Verification

Clock = Callable[[], float]


@dataclass(slots=True)
class StepRecord:
    """What one step added to the output; every metric derives from these records.

    Attributes:
        tokens: those added: the accepted drafts and the target's own next token, cut at the answer's end. Plain
            decoding adds one.
        nodes: nodes forwarded, root included.
        rank_path: ranks of the accepted nodes from the root down.
        source: where the draft came from, for a drafter with several sources.
    """

    tokens: list[int]
    nodes: int
    rank_path: RankPath
    source: str | None = None

    @property
    def accepted(self) -> int:
        """The accepted length."""
        return len(self.tokens)


@dataclass(slots=True)
class Generation:
    """One answer.

    Attributes:
        tokens: new tokens, EOS included if it came. sum(accept_lengths) == len(tokens).
        steps: one record a step.
        stop: eos | length (max_new_tokens) | context (the model's or the setting's limit).
        forwards: target forwards: the steps, and the prompt's own where it is one more.
        prefill_s, decode_s: seconds until the first step's tokens are known, and from then on, without setup_s.
        setup_s: seconds spent on steps of a shape not met before, capturing included; 0 if eager.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    stop: str = ""
    forwards: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    setup_s: float = 0.0

    @property
    def accept_lengths(self) -> list[int]:
        return [step.accepted for step in self.steps]

    def add(self, verification: Verification, limit: int, eos: Collection[int]) -> bool:
        """Add a step's tokens, which are cut at the answer's end. Returns True if the answer goes on."""
        draft, tokens = verification.draft, verification.tokens
        path = draft.tree.rank_path(verification.node)[: len(tokens)]
        self.tokens += tokens
        self.steps.append(StepRecord(tokens, len(draft.tree), path, draft.source))
        return not (tokens[-1] in eos or len(self.tokens) == limit)

    def end(self, limit: int, max_new_tokens: int, eos: Collection[int]) -> None:
        """Set `stop` after the last step; `limit` is what the context left of max_new_tokens."""
        self.stop = "eos" if self.tokens[-1] in eos else "length" if limit == max_new_tokens else "context"


def decode(
    target: Target,
    session: Session,
    prompt: list[int],
    *,
    max_new_tokens: int,
    eos: Collection[int] = (),
    sampling: Sampling = GREEDY,
    execution: str = "eager",
    mark: Mark = unmarked,
    reuse: bool = False,
    clock: Clock | None = None,
) -> Generator[StepRecord, None, Generation]:
    """Decode a step at a time: the output is the target's own, whatever is drafted.

    The root is the last token known, at first the prompt's last one. A step forwards it with a draft below it, commits
    it with the accepted drafts, and puts out these and the target's own next token, which is the next root.

    Other sequences may be decoded between two steps, on the same target and method, too, and by other threads: a step
    is a turn of the model's. Its times count what its consumer does between them, and what it waits.

    Args:
        session: closed at the end, however it comes, once the first step was asked for.
        prompt: token ids, at least one.
        max_new_tokens: at most so many new tokens.
        eos: ids that end an answer (it is part of the output).
        sampling: how the next token is drawn; the target's choices are the same whatever is drafted.
        execution: how steps are executed: eager, static or graph; see `step.Executor`.
        mark: called with a phase's name when it ends: prefill, then for each step draft, forward, verify, commit,
            observe and loop; in static steps setup (when one is made), step and loop.
        reuse: what the last sequence committed of this prompt's beginning is not forwarded again (a conversation's
            earlier turns), unless the method needs something of that forward which it did not keep.
        clock: times the steps for the method's `Sizing`; default: `step_clock`.

    Yields:
        Each step's record, as soon as its tokens are known.

    Returns:
        The whole answer.

    Raises:
        UserError: max_new_tokens < 1, the prompt leaves no room for an answer, or as `step.Executor`.
    """
    out, turns = Generation(), target.turns
    steps = _decode(
        target, session, prompt, max_new_tokens, eos, sampling, execution, mark, reuse, out, clock or step_clock(target)
    )
    try:
        while True:
            with turns, torch.inference_mode():  # for one step, and not while the consumer is at work
                record = next(steps, None)
            if record is None:
                return out
            yield record
    finally:
        with turns:
            steps.close()


def generate(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    *,
    max_new_tokens: int,
    eos: Collection[int] = (),
    sampling: Sampling = GREEDY,
    execution: str = "eager",
    mark: Mark = unmarked,
    clock: Clock | None = None,
) -> Generation:
    """The whole answer at once: `decode` from the first step to the last, in a session of its own."""
    with target.turns:
        session = drafter.session()
    settings: dict[str, Any] = dict(max_new_tokens=max_new_tokens, eos=eos, sampling=sampling, mark=mark, clock=clock)
    return whole(decode(target, session, prompt, execution=execution, **settings))


def whole(steps: Generator[StepRecord, None, Generation]) -> Generation:
    """Run a stream to its end and return the answer."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            out: Generation = end.value
            return out


def _decode(
    target: Target,
    session: Session,
    prompt: list[int],
    max_new_tokens: int,
    eos: Collection[int],
    sampling: Sampling,
    execution: str,
    mark: Mark,
    reuse: bool,
    out: Generation,
    clock: Clock,
) -> Generator[StepRecord, None, None]:
    """Yield step after step until the answer ends, each added to `out`."""

    def with_hidden(run: Callable[..., Verification], *args: Any) -> Verification:
        """Run a step with the hook that it needs; the hook is off between steps, which other sequences may use."""
        if not session.method.needs.hidden:
            return run(*args)
        target.keep_hidden(True)
        try:
            return run(*args)
        finally:
            target.keep_hidden(False)

    try:
        limit = target.token_budget(prompt, max_new_tokens)
        needs = session.method.needs
        relearns_prompt = needs.prompt_logits and not session.method.stateful  # anew in each sequence
        reusable = prompt if reuse and not (relearns_prompt or needs.hidden) else ()
        reader = session.method if needs.prompt_logits else None  # reuse only what this method has read
        with target.cache(session.method.max_nodes, reusable, reader) as cache, recorded_text(cache, prompt, out):
            sequence = Sequence(
                target, cache, session, list(prompt), sampling, execution, mark, len(prompt) + limit, eos
            )
            step = make_step(sequence)
            executor = step.executor
            session.choice, made = executor.choice, executor.setup_s
            if session.method.sizing is not None:
                session.method.sizing.opened()
            target.synchronize()
            start = time.perf_counter()
            verification = with_hidden(_first_step, sequence, step, out)
            out.prefill_s = time.perf_counter() - start - (executor.setup_s - made)
            goes_on = out.add(verification, limit, eos)
            mark("loop")
            yield out.steps[-1]
            while goes_on:
                sequence.text += out.steps[-1].tokens
                verification = _timed(lambda: with_hidden(step), session, executor, clock)
                out.forwards += 1
                goes_on = out.add(verification, limit, eos)
                mark("loop")
                yield out.steps[-1]
            target.synchronize()
            out.setup_s = executor.setup_s - made
            out.decode_s = time.perf_counter() - start - out.prefill_s - out.setup_s
    finally:
        session.close()
    out.end(limit, max_new_tokens, eos)


def step_clock(target: Target) -> Clock:
    """What tells the time that a step takes: on a CPU this thread's own clock, which stops while others run.

    So what a draft costs is known from fewer steps: on two cores that three processes want, plain steps of 1 ms took
    0.9 to 5 by the wall's.
    """
    elsewhere = any(device.type != "cpu" for device in target.devices)
    coarse = sys.platform == "win32"  # there a thread's clock moves by 16 ms at a time
    return time.perf_counter if elsewhere or coarse else time.thread_time


def _timed(run: Callable[[], Verification], session: Session, executor: Executor, clock: Clock) -> Verification:
    """Run a step and report its seconds to the method's `Sizing`, unless it made a new shape."""
    sizing, made = session.method.sizing, executor.setup_s
    if sizing is None:
        return run()
    begun = clock()
    verification = run()
    seconds = clock() - begun
    if executor.setup_s == made and seconds > 0:  # a clock may stand still for a step
        sizing.took(len(verification.draft.tree) - 1, len(verification.tokens), seconds)
    return verification


@contextmanager
def recorded_text(cache: TreeCache, prompt: list[int], out: Generation) -> Iterator[None]:
    """Record in a cache, when a sequence ends or fails, which text it has committed."""
    try:
        yield
    finally:
        cache.text = (prompt + out.tokens)[: cache.length]


def _first_step(sequence: Sequence, step: HostStep | DeviceStep, out: Generation) -> Verification:
    """Take the prompt and the first step, in one forward or in two.

    In one if the session begins with a chain. Also if the size of drafts is found while decoding: then without a draft,
    as that forward gives a token whatever drafts are worth here. Else in two.
    """
    target, session, prompt = sequence.target, sequence.session, list(sequence.text)
    draft, sizing = session.begin(prompt), session.method.sizing
    rows = len(prompt) if session.method.needs.prompt_logits else 0
    first_session = session
    if sizing is not None:
        first_session, rows = step.executor.idle.session(), min(rows, sizing.prompt_rows)
        draft = first_session.draft(prompt[-1])
    kept = sequence.cache.length
    first = prompt[kept:] if draft is not None else prompt[kept:-1]  # tokens that are forwarded as the prompt's own
    rows = min(rows, len(first))
    logits = target.prefill(sequence.cache, prompt, draft, rows=rows, kept=kept)
    nodes = 0 if draft is None else len(draft.tree)
    of_prompt = logits[len(logits) - nodes - rows + bool(nodes) :][:rows]  # the root's row is the prompt's last one
    if rows and sizing is None:
        session.observe_prompt(first[-rows:], of_prompt)
    if first and target.hidden is not None:  # (P - 1 + n, H)
        session.observe_prompt_hidden(first, target.hidden[: len(first)])
    if draft is None:
        sequence.mark("prefill")
        out.forwards = 1 + bool(first)
        return step()
    out.forwards = 1
    logits = logits[-len(draft.tree) :]
    forwarded = Forwarded(step.executor.chosen(sequence, draft, logits, first_session.method), logits, target.hidden)
    verification = conclude(first_session, draft, forwarded, left=sequence.left, eos=sequence.eos, cache=sequence.cache)
    if first_session is not session:
        session.passed(verification.tokens)
        if rows:
            session.observe_prompt(first[-rows:], of_prompt)
    sequence.mark("prefill")
    return verification
