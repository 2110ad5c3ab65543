"""The decoding loop, the same for every method, and its raw datum: the step record."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..errors import UserError
from .drafter import DeviceDrafter, Drafter, Session
from .sampling import GREEDY, Choice, Sampling
from .static_step import Forwarded
from .step import Ends, Mark, Sequence, Step, conclude, unmarked
from .target import Target
from .tree import RankPath
from .verification import Verification

Clock = Callable[[], float]
Answers = TypeVar("Answers")
ROOM = 1024  # tokens of an answer that a cache has room for at first


@dataclass(slots=True)
class StepRecord:
    """What one step added to the output; every metric derives from these records."""

    # the accepted drafts and the target's own next token, cut at the answer's end
    tokens: list[int]
    nodes: int  # nodes forwarded, root included
    rank_path: RankPath  # ranks of the accepted nodes from the root down
    source: str | None = None  # where the draft came from, for a drafter with several sources
    batch: int = 1  # sequences in its forward

    @property
    def accepted(self) -> int:
        """The accepted length."""
        return len(self.tokens)


@dataclass(slots=True)
class Generation:
    """One answer. All other times exclude setup_s.

    In a batch, a step's seconds are divided equally among its sequences, so that sums over answers
    are the whole's; `ends_s` is what each sequence waited.
    """

    tokens: list[int] = field(default_factory=list)  # new ones, EOS included if it came
    steps: list[StepRecord] = field(default_factory=list)
    # eos | length (max_new_tokens) | context (the model's or the setting's limit) | stop
    # (`Request.ends`)
    stop: str = ""
    forwards: int = 0  # forwards of the target: one per step, and the prompt's if separate
    prefill_s: float = 0.0  # until the first step's tokens are known
    decode_s: float = 0.0  # from then on
    # spent on static steps of a shape not met before, capturing included; 0 if eager
    setup_s: float = 0.0
    ends_s: list[float] = field(default_factory=list)  # until each step's tokens were known

    @property
    def accept_lengths(self) -> list[int]:
        return [step.accepted for step in self.steps]

    def add(
        self, verification: Verification, limit: int, eos: Collection[int], batch: int = 1
    ) -> bool:
        """Add a step's tokens, which are cut at the answer's end. Returns True if the answer goes
        on.
        """
        draft = verification.draft
        tokens = verification.tokens
        path = draft.tree.rank_path(verification.node)[: len(tokens)]
        self.tokens += tokens
        self.forwards += 1
        self.steps.append(StepRecord(tokens, len(draft.tree), path, draft.source, batch))
        return not (tokens[-1] in eos or len(self.tokens) == limit)

    def end(
        self, limit: int, max_new_tokens: int, eos: Collection[int], ended: bool = False
    ) -> None:
        """Set `stop` after the last step; `limit` is what the context left of max_new_tokens."""
        full = "length" if limit == max_new_tokens else "context"
        self.stop = "eos" if self.tokens[-1] in eos else "stop" if ended else full


def acceptance_record(
    drafted: Collection[int], accepted: Collection[int], max_drafted: int
) -> dict[str, Any]:
    """Return an answer's acceptance as engines and benchmarks exchange it; steps without a draft
    are left out.

    It is `metrics.speculative_decoding` of vLLM's responses at the level `detailed` (vLLM PR 48915,
    merged), which AIPerf reads since its PR 1191. The later `acceptance_histogram_by_draft_length`
    (vLLM PR 56278) is left out.

    A tree's draft tokens are all its nodes but the root, so that `draft_acceptance_rate` falls with
    its breadth.

    Args:
        drafted: (S,) draft tokens of each step.
        accepted: (S,) draft tokens of each step that the answer kept; of a step cut at the end,
            those before the cut.
        max_drafted: maximum draft tokens of a step; the histogram has one bin more.
    """
    steps = [(draft, kept) for draft, kept in zip(drafted, accepted, strict=True) if draft]
    histogram = [0] * (max_drafted + 1)
    for _, kept in steps:
        histogram[kept] += 1
    proposed = sum(draft for draft, _ in steps)
    kept_in_all = sum(kept for _, kept in steps)
    return {
        "mean_acceptance_length": 1 + kept_in_all / len(steps) if steps else 1.0,
        "draft_acceptance_rate": kept_in_all / proposed if steps else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": kept_in_all,
        "num_draft_tokens": proposed,
        "num_spec_tokens": max_drafted,
        "per_step_accepted": [kept for _, kept in steps],
        "per_step_drafted": [draft for draft, _ in steps],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The settings of one answer.

    Attributes:
        max_new_tokens: maximum number of new tokens.
        eos: ids that end an answer (it is part of the output).
        sampling: how the next token is drawn; the target's choices are the same whatever is
            drafted.
        execution: how steps are executed: eager, static or graph; see `step.Executor`.
        mark: called with a phase's name when it ends: prefill, then for each step draft, forward,
            verify, commit, observe and loop; on the device setup (when a static step is made), step
            and loop.
        reuse: do not forward again what the last sequence committed of the prompt's beginning (a
            conversation's earlier turns), unless the drafter needs outputs of that forward and did
            not keep them.
        clock: times the steps for the drafter's `Sizing`; default: `step_clock`. A batch takes its
            last request's.
        ends: asked after each token, given prompt and answer so far: True if the answer ends there
            (stop strings).
    """

    max_new_tokens: int
    eos: Collection[int] = ()
    sampling: Sampling = GREEDY
    execution: str = "eager"
    mark: Mark = unmarked
    reuse: bool = False
    clock: Clock | None = None
    ends: Ends | None = None


def decode(
    target: Target, session: Session, prompt: list[int], **settings: Any
) -> Generator[StepRecord, None, Generation]:
    """Decode a step at a time: the output is the target's own, whatever is drafted.

    The root is the last known token, at first the prompt's last one. A step forwards the root with
    a draft below it, commits the root and the accepted drafts, and outputs these drafts and the
    target's next token, the next root.

    Other sequences may be decoded between two steps, on the same target and drafter, too, and by
    other threads: the model's lock is held per step. Times include the consumer's work between
    steps, and waits for the lock.

    Args:
        session: always closed once iteration has started.
        prompt: token ids, at least one.
        settings: as `Request` has them.

    Yields the record of each step as soon as its tokens are known; returns the whole answer.

    Raises:
        UserError: max_new_tokens < 1, the prompt leaves no room for an answer, or as
            `step.Executor`.
    """
    request = Request(**settings)
    out = Generation()
    ends = ExitStack()
    turns = target.turns
    clock = request.clock or step_clock(target)
    ends.callback(session.close)
    try:
        with turns, torch.inference_mode():  # released while the consumer works
            sequence = open_sequence(target, session, prompt, request, out, ends)
            step = Step(sequence)
            limit = sequence.left
            executor = step.executor
            session.choice = executor.choice
            setup_before = executor.setup_s
            target.synchronize()
            start = time.perf_counter()
            verification = first_forward(sequence, executor.choice, out) or step()
            goes_on = out.add(verification, limit, request.eos) and not sequence.ended
            out.prefill_s = time.perf_counter() - start - (executor.setup_s - setup_before)
            out.ends_s.append(out.prefill_s)
            request.mark("loop")
        yield out.steps[-1]
        while goes_on:
            with turns, torch.inference_mode():
                sequence.text += out.steps[-1].tokens
                goes_on = out.add(_timed(step, clock), limit, request.eos) and not sequence.ended
                out.ends_s.append(time.perf_counter() - start - (executor.setup_s - setup_before))
                request.mark("loop")
            yield out.steps[-1]
        with turns:
            target.synchronize()
            out.setup_s = executor.setup_s - setup_before
            out.decode_s = time.perf_counter() - start - out.prefill_s - out.setup_s
    finally:
        with turns:
            ends.close()
    out.end(limit, request.max_new_tokens, request.eos, sequence.ended)
    return out


def generate(target: Target, drafter: Drafter, prompt: list[int], **settings: Any) -> Generation:
    """Return the whole answer, in a session of its own; settings as `Request` has them."""
    with target.turns:
        session = drafter.session()
    return whole(decode(target, session, prompt, **settings))


def whole(
    steps: Generator[Any, None, Answers], seen: Callable[[Any], None] = lambda step: None
) -> Answers:
    """Run a stream to its end and return the answer, or a batch's answers; `seen` is called with
    what it yields.
    """
    while True:
        try:
            seen(next(steps))
        except StopIteration as end:
            out: Answers = end.value
            return out


def open_sequence(
    target: Target,
    session: Session,
    prompt: list[int],
    request: Request,
    out: Generation,
    ends: ExitStack,
) -> Sequence:
    """Return the sequence, on a borrowed cache that `ends` gives back."""
    limit = target.token_budget(prompt, request.max_new_tokens)
    drafter = session.drafter
    needs = session.drafter.needs
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
    end = len(prompt) + limit
    how = (request.sampling, request.execution, request.mark)
    sequence = Sequence(target, cache, session, list(prompt), *how, end, request.eos, request.ends)
    # also if a step fails
    ends.callback(lambda: cache.record([] if sequence.overflowed else prompt + out.tokens))
    return sequence


def step_clock(target: Target) -> Clock:
    """Return the clock that times steps: on a CPU this thread's own, which stops while others run.

    So the cost of drafts is known from fewer steps: with three processes on two cores, plain steps
    of 1 ms took 0.9 to
    5 ms by the wall clock.
    """
    elsewhere = any(device.type != "cpu" for device in target.devices)
    coarse = sys.platform == "win32"  # there a thread's clock moves by 16 ms at a time
    return time.perf_counter if elsewhere or coarse else time.thread_time


def _timed(step: Step, clock: Clock) -> Verification:
    """Take a step and report its seconds to the drafter's `Sizing`, unless it made a new shape."""
    executor = step.executor
    sizing = step.sequence.session.drafter.sizing
    if sizing is None:
        return step()
    setup_before = executor.setup_s
    start = clock()
    verification = step()
    seconds = clock() - start
    if executor.setup_s == setup_before and seconds > 0:  # a clock may stand still for a step
        sizing.observe(len(verification.draft.tree) - 1, len(verification.tokens), seconds)
    return verification


def first_forward(sequence: Sequence, choice: Choice, out: Generation) -> Verification | None:
    """Forward the prompt. If the session begins with a chain, forward this draft, too, and return
    the first step.

    If the size of drafts is tuned while decoding, the chain is the root alone: this forward gives a
    token even where drafts do not pay.
    """
    target = sequence.target
    session = sequence.session
    sizing = sequence.session.drafter.sizing
    prompt = list(sequence.text)
    needs = session.drafter.needs
    kept = sequence.cache.length
    chain = session.begin(prompt)
    first_session = session
    rows = len(prompt)
    if sizing is not None:
        rows = sizing.begin()
        first_session = DeviceDrafter(target.device).session()
        chain = first_session.draft(prompt[-1])
    # the prompt's logits, for a session that observes them after `skip`
    later: list[tuple[int, torch.Tensor]] = []

    def read(start: int, logits: torch.Tensor) -> None:
        if first_session is session:
            session.observe_prompt(prompt, start, logits)
        else:
            later.append((start, logits))

    rows = rows if needs.prompt_logits else 0
    outputs = target.prefill(
        sequence.cache, prompt, chain, rows=rows, kept=kept, read=read, hidden=needs.hidden
    )
    logits, hidden = outputs
    committed = range(kept, sequence.cache.length)
    sequence.overflowed = sequence.cache.sound(committed) < len(committed)
    forwarded_prompt = prompt[kept:] if chain is not None else prompt[kept:-1]
    if forwarded_prompt and hidden is not None:  # (P - 1 + n, H)
        session.observe_prompt_hidden(forwarded_prompt, hidden[: len(forwarded_prompt)])
    if chain is None:
        sequence.mark("prefill")
        out.forwards = int(bool(forwarded_prompt))
        return None
    every = first_session.drafter.needs.choices
    choices = choice.after(logits, chain, prompt, every=every, over=sequence.over)
    forwarded = Forwarded(choices, logits, hidden)
    verification = conclude(
        first_session, chain, forwarded, over=sequence.over, cache=sequence.cache
    )
    sequence.settle(
        verification.tokens,
        sequence.cache,
        range(committed.stop, committed.stop + len(verification.tokens)),
    )
    if first_session is not session:
        session.skip(verification.tokens)
        for start, of_prompt in later:
            session.observe_prompt(prompt, start, of_prompt)
    sequence.mark("prefill")
    return verification
