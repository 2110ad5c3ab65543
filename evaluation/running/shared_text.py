"""Many methods on one text: one forward for all of them, and each context is forwarded once.

Drafts do not change the target's output, so methods that answer one prompt follow one text, and
many draft nodes are the same. Times cannot be measured this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.engine import Draft, Drafter, Generation, Request, Session, Target, generate
from model.engine.attention.cache import TreeCache
from model.engine.attention.sight import additive
from model.engine.graphs.static_step import Forwarded
from model.engine.loop.answer import Decoding
from model.engine.loop.step import conclude
from model.engine.rule.sampling import Choice
from model.errors import UserError


@dataclass(slots=True, eq=False)
class Context:
    """A path of tokens that continues the prompt, and the target's output after it.

    It has no reference to its parent, so contexts out of reach are freed with their logits.
    """

    position: int  # of its last token
    token: int
    # the contexts that are one token longer
    children: dict[int, Context] = field(default_factory=dict)
    choice: int | None = None  # the token that the target picks; None: not forwarded yet
    logits: Any = None  # (V,), if kept
    hidden: Any = None  # (w H,), all that any method needs; None if none does
    # True if its states are in the cache at its position: it is part of the text
    committed: bool = False

    def child(self, token: int) -> Context:
        if token not in self.children:
            self.children[token] = Context(self.position + 1, token)

        return self.children[token]


class SharedText:
    """One prompt and its answer so far, and the contexts that sequences can still reach.

    Args:
        cache: has room for the text and, after it, all drafts of one forward.
        prompt: P tokens; all but the last are forwarded now.
    """

    def __init__(
        self,
        target: Target,
        cache: TreeCache,
        prompt: list[int],
        choice: Choice,
        sessions: Sequence[Session],
    ) -> None:
        self.target = target
        self.cache = cache
        self.choice = choice

        readers = [session for session in sessions if session.drafter.needs.prompt_logits]
        needs = [session.drafter.needs for session in sessions]

        # what any method reads
        self.keeps_logits = bool(readers) or any(need.logits or need.candidates for need in needs)
        self.hidden = tuple(sorted(set[int]().union(*(need.hidden for need in needs))))

        def read(start: int, logits: Tensor) -> None:
            for session in readers:
                session.observe_prompt(prompt, start, logits)

        states = target.prefill(
            cache,
            prompt,
            rows=len(prompt) if readers else 0,
            read=read,
            hidden=self.hidden,
        ).hidden

        self.prompt_hidden = [] if states is None else [*states]  # P - 1 of (w H,)

        # the prompt's last token is the root of the first step
        self.tip = Context(len(prompt) - 2, -1, choice=prompt[-1], committed=True)

    def forward(self, drafts: Sequence[tuple[Context, Draft]]) -> list[list[Context]]:
        """Return the context of every node of these drafts, given with their roots'."""
        contexts: list[list[Context]] = []  # of each draft, by node
        rows: dict[Context, Context] = {}  # of the forward, each with its parent

        for root, draft in drafts:
            parents = draft.tree.parent_of
            nodes = [root]

            for token, parent in zip(draft.tokens.tolist()[1:], parents[1:], strict=True):
                nodes.append(nodes[parent].child(token))

            for node, context in enumerate(nodes):
                if context.choice is not None or context in rows:
                    continue

                # also its ancestors without states: forwarded earlier and not accepted
                for i in draft.tree.chain_of[node]:
                    if not nodes[i].committed and nodes[i] not in rows:
                        rows[nodes[i]] = nodes[parents[i]] if i else self.tip

            contexts.append(nodes)

        if rows:
            self._forward(rows)
            self._commit([*rows])

        return contexts

    def _forward(self, rows: dict[Context, Context]) -> None:
        """Forward n new contexts behind the text, given with their parents, which come first."""
        target = self.target
        past = self.cache.length

        # (n, past + n); True where a row attends to a column
        visible = np.zeros((len(rows), past + len(rows)), dtype=bool)

        row_of: dict[Context, int] = {}
        for row, (context, parent) in enumerate(rows.items()):
            row_of[context] = row
            if parent in row_of:
                visible[row] = visible[row_of[parent]]
            else:
                visible[row, : parent.position + 1] = True  # the text up to the parent
            visible[row, past + row] = True

        mask = additive(torch.from_numpy(visible).to(target.device), target.dtype)
        positions = torch.tensor([context.position for context in rows], device=target.device)
        ids = torch.tensor([context.token for context in rows], device=target.device)
        # (n, V), (n, w H)
        logits, hidden = target.forward_masked(self.cache, ids, mask, positions, hidden=self.hidden)

        choices = self.choice.among(logits, positions + 1).tolist()
        for row, context in enumerate(rows):
            if context.choice is None:
                # clones below: a view would keep the whole forward's output alive
                context.choice = choices[row]
                context.logits = logits[row].clone() if self.keeps_logits else None
                context.hidden = None if hidden is None else hidden[row].clone()

    def _commit(self, rows: list[Context]) -> None:
        past = self.cache.length
        path: list[int] = []  # the rows of the accepted contexts

        while self.tip.choice is not None:
            accepted = self.tip.children.get(self.tip.choice)
            if accepted is None or accepted not in rows:
                break

            path.append(rows.index(accepted))
            accepted.committed = True
            self.tip = accepted

        if path:
            source = torch.tensor(path, device=self.target.device) + past
            self.cache.move(source, past + torch.arange(len(path), device=self.target.device))
            self.cache.length += len(path)


class _Answer:
    """One method's decoding along the text; only answers hold contexts that may be rejected."""

    def __init__(self, sequence: Decoding, chain: Draft | None, text: SharedText) -> None:
        self.sequence = sequence
        self.session = sequence.session
        self.text = text
        self.context = text.tip.child(sequence.text[-1])
        self._first_draft = chain
        if chain is None:
            sequence.out.forwards = int(len(sequence.text) > 1)
            self._observe_hidden(sequence.text[:-1], [])

    def draft(self) -> Draft:
        return self._first_draft or self.session.draft(self.sequence.text[-1])

    def learn(self, draft: Draft, nodes: list[Context]) -> bool:
        drafter = self.session.drafter
        needs = drafter.needs
        if self._first_draft is not None:  # its root is the prompt's last token
            self._first_draft = None
            prompt = list(self.sequence.text)
            if needs.prompt_logits:
                logits = self.context.logits[None]
                self.session.observe_prompt(prompt, len(prompt) - 1, logits)
            self._observe_hidden(prompt, [self.context])

        choices = torch.tensor([context.choice for context in nodes], device=draft.tokens.device)
        logits = None
        if needs.logits or needs.candidates:
            logits = torch.stack([context.logits for context in nodes])

        hidden = self._hidden([context.hidden for context in nodes]) if needs.hidden else None

        forwarded = Forwarded(choices, logits, hidden)
        verification = conclude(self.sequence, drafter, draft, forwarded)
        self.session.observe(verification)

        for token in verification.tokens:
            self.context = self.context.child(token)

        self.sequence.add(verification)
        return not self.sequence.out.stop

    def _observe_hidden(self, tokens: list[int], last: list[Context]) -> None:
        if tokens and self.session.drafter.needs.hidden:
            hidden = self._hidden(self.text.prompt_hidden + [context.hidden for context in last])
            self.session.observe_prompt_hidden(tokens, hidden)

    def _hidden(self, states: list[Tensor]) -> Tensor:
        """Return the hidden states that this method needs: (n, w H)."""
        parts = torch.stack(states).chunk(len(self.text.hidden), -1)
        numbers = self.text.hidden
        needed = self.session.drafter.needs.hidden
        return torch.cat([parts[numbers.index(number)] for number in needed], -1)


@torch.inference_mode()
def generate_together(
    target: Target, drafters: Sequence[Drafter], prompt: list[int], **settings: Any
) -> list[Generation]:
    """Answer one prompt by each of several methods, by the steps that each would take alone.

    Sequences whose root is furthest back go first, so that contexts that all have passed are freed.
    This takes about twice as many forwards as all at once, equally many rows, and a tenth of the
    contexts.

    Args:
        drafters: of any kind; no two of them may be one object.
        settings: max_new_tokens, eos and sampling, as `Request` has them.

    Raises UserError as `generate`, or if sampling reads the text (a repetition penalty).
    """
    if target.recurrent:  # its state cannot branch
        return [generate(target, drafter, prompt, **settings) for drafter in drafters]

    request = Request(**settings)
    limit = target.token_budget(prompt, request.max_new_tokens)
    if request.sampling.reads_text:
        raise UserError(
            "sampling: a repetition penalty and other processors read the text; say timed=true"
        )

    with ExitStack() as ends:
        ends.enter_context(target.turns)
        cache = ends.enter_context(target.cache(sum(drafter.max_nodes for drafter in drafters)))
        choice = Choice(request.sampling, target.device)
        sessions = [drafter.session() for drafter in drafters]

        for session in sessions:
            session.choice = choice
            ends.callback(session.close)

        chains = [session.begin(prompt) for session in sessions]
        text = SharedText(target, cache, prompt, choice, sessions)

        answers = list[_Answer]()
        for session, chain in zip(sessions, chains, strict=True):
            sequence = Decoding(target, cache, session, request, list(prompt), limit)
            answers.append(_Answer(sequence, chain, text))

        unfinished = list(answers)
        while unfinished:
            # those furthest back take a step, in one forward
            back = min(one.context.position for one in unfinished)
            turn = [one for one in unfinished if one.context.position == back]
            drafts = [(one.context, one.draft()) for one in turn]

            for one, (_, draft), nodes in zip(turn, drafts, text.forward(drafts), strict=True):
                if not one.learn(draft, nodes):
                    unfinished.remove(one)

    return [one.sequence.out for one in answers]
