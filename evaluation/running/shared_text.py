"""Many methods on one text: one forward for all of them, and each context is forwarded once.

Greedy output is the target's own whatever is drafted, so methods that answer one prompt follow one text. They differ in
where their steps begin and in what they draft, and much of that is the same, too. So accepted lengths, which do not
depend on time, cost little more for many configurations than for a few. Times cannot be had this way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack

import numpy as np
import torch

from model.engine.cache import TreeCache
from model.engine.drafter import Drafter, Session
from model.engine.loop import Generation
from model.engine.sampling import GREEDY, Choice, Sampling
from model.engine.step import Forwarded, conclude
from model.engine.target import Target
from model.engine.tree import Draft
from model.errors import UserError


class Context:
    """A path of tokens that continues the prompt, and the target's output after it.

    Attributes:
        position: of its last token.
        below: the contexts that are one token longer.
        choice: the token that the target picks; None: not asked yet.
        logits: (V,), hidden: (H,) if kept.
        committed: True if its states are in the cache at its position: it is part of the text.
    """

    __slots__ = ("__weakref__", "below", "choice", "committed", "hidden", "logits", "position")

    def __init__(self, position: int) -> None:
        self.position = position
        self.below: dict[int, Context] = {}
        self.choice: int | None = None
        self.logits: torch.Tensor | None = None
        self.hidden: torch.Tensor | None = None
        self.committed = False

    def then(self, token: int) -> Context:
        """Return the context that is longer by this token."""
        longer = self.below.get(token)
        if longer is None:
            longer = self.below[token] = Context(self.position + 1)
        return longer


class SharedText:
    """One prompt and its answer so far, and the contexts that sequences can still reach.

    A context has no reference to its parent, so contexts out of reach are freed with their logits.

    Args:
        cache: holds the text; its capacity must hold all drafts of one forward behind it.
        prompt: P tokens; all but the last are forwarded now.
        choice: what the target picks, by its seed; one that does not read the text.
        keep: keep the logits of every context; choices are always kept.
        keep_prompt: keep the logits after each of the P - 1 tokens.
    """

    def __init__(
        self,
        target: Target,
        cache: TreeCache,
        prompt: list[int],
        choice: Choice,
        *,
        keep: bool = True,
        keep_prompt: bool = False,
    ) -> None:
        self.target, self.cache, self.choice, self.keep = target, cache, choice, keep
        logits = target.prefill(cache, prompt, rows=len(prompt) if keep_prompt else 0)
        self.prompt_logits = [*logits] if keep_prompt else []  # P - 1 of (V,)
        self.prompt_hidden = [] if target.hidden is None or len(prompt) == 1 else [*target.hidden]  # P - 1 of (H,)
        self._tip = Context(len(prompt) - 2)  # the deepest committed one
        self._tip.choice, self._tip.committed = prompt[-1], True

    def begin(self, root: int) -> Context:
        """Return the context of the prompt's last token, the first root."""
        return self._tip.then(root)

    def ask(self, tries: Sequence[tuple[Context, Draft]]) -> list[list[Context]]:
        """Return the context of every node of these drafts, below the contexts of their roots; forward the new ones."""
        asked: list[list[Context]] = []  # of each try, by node
        rows: dict[Context, int] = {}  # of the forward
        above: list[Context] = []  # of each row
        tokens: list[int] = []
        for root, draft in tries:
            drafted, parents = draft.tokens.tolist(), draft.tree.parent_of
            nodes = [root]
            for token, parent in zip(drafted[1:], parents[1:], strict=True):
                nodes.append(nodes[parent].then(token))
            for node, context in enumerate(nodes):
                if context.choice is None and context not in rows:
                    # also its ancestors without states: forwarded earlier and not accepted
                    missing = [i for i in draft.tree.chain_of[node] if not nodes[i].committed and nodes[i] not in rows]
                    for i in missing:
                        rows[nodes[i]] = len(rows)
                        above.append(nodes[parents[i]] if i else self._tip)
                        tokens.append(drafted[i])
            asked.append(nodes)
        if rows:
            self._forward(rows, above, tokens)
        return asked

    def _forward(self, rows: dict[Context, int], above: list[Context], tokens: list[int]) -> None:
        target, past = self.target, self.cache.length
        visible = np.zeros((len(rows), past + len(rows)), dtype=bool)  # True where a row attends to a column
        for row, parent in enumerate(above):
            if parent in rows:
                visible[row] = visible[rows[parent]]
            else:
                visible[row, : parent.position + 1] = True
            visible[row, past + row] = True
        hidden = torch.from_numpy(~visible).to(target.device)
        mask = torch.zeros(visible.shape, dtype=target.dtype, device=target.device)
        mask.masked_fill_(hidden, torch.finfo(target.dtype).min)
        positions = torch.tensor([context.position for context in rows], device=target.device)
        logits = target.forward_masked(self.cache, torch.tensor(tokens, device=target.device), mask, positions)
        choices = self.choice.among(logits, positions + 1).tolist()
        for context, row, choice in zip(rows, logits, choices, strict=True):
            if context.choice is None:
                context.choice = choice  # and copies, as a view would keep the whole forward's output alive
                context.logits = row.clone() if self.keep else None
                context.hidden = None if target.hidden is None else target.hidden[rows[context]].clone()
        self._commit(rows)

    def _commit(self, rows: dict[Context, int]) -> None:
        """Commit the states of contexts that are part of the text now."""
        past, path = self.cache.length, list[int]()
        while True:
            assert self._tip.choice is not None  # what is committed was asked
            accepted = self._tip.below.get(self._tip.choice)
            if accepted is None or accepted not in rows:
                break
            path.append(rows[accepted])
            accepted.committed = True
            self._tip = accepted
        if path:
            source = torch.tensor(path, device=self.target.device) + past
            self.cache.move(source, torch.arange(past, past + len(path), device=self.target.device))
            self.cache.length += len(path)


class _Sequence:
    """One method's decoding along the text."""

    def __init__(self, session: Session, prompt: list[int], text: SharedText, first: Context) -> None:
        self.session, self.prompt, self.text = session, prompt, text
        self.root, self.context, self.out = prompt[-1], first, Generation()
        self._begun = session.begin(prompt)
        if self._begun is None:
            self.out.forwards = int(len(prompt) > 1)
            self._observe_prompt(prompt[:-1], [])

    def draft(self) -> Draft:
        return self._begun or self.session.draft(self.root)

    def learn(self, draft: Draft, nodes: list[Context], limit: int, eos: Collection[int]) -> bool:
        """Finish a step after the forward. Returns True if the answer goes on."""
        needs = self.session.method.needs
        if self._begun is not None:
            self._begun = None
            self._observe_prompt(self.prompt, [self.context])
        choices = torch.tensor([context.choice for context in nodes], device=draft.tokens.device)
        needs_logits = needs.logits or needs.candidates
        logits = torch.stack([required(context.logits) for context in nodes]) if needs_logits else None
        hidden = torch.stack([required(context.hidden) for context in nodes]) if needs.hidden else None
        forwarded = Forwarded(choices, logits, hidden)
        verification = conclude(self.session, draft, forwarded, left=limit - len(self.out.tokens), eos=eos)
        self.out.forwards += 1
        for token in verification.tokens:
            self.context = self.context.then(token)
        self.root = verification.tokens[-1]
        return self.out.add(verification, limit, eos)

    def _observe_prompt(self, first: list[int], last: list[Context]) -> None:
        """The prompt's own logits and hidden states, with those of its last token if its chain is forwarded with it."""
        needs, text = self.session.method.needs, self.text
        if first and needs.prompt_logits:
            self.session.observe_prompt(first, torch.stack(text.prompt_logits + [required(c.logits) for c in last]))
        if first and needs.hidden:
            hidden = torch.stack(text.prompt_hidden + [required(c.hidden) for c in last])
            self.session.observe_prompt_hidden(first, hidden)


def required(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor of a context that was forwarded."""
    assert tensor is not None
    return tensor


@torch.inference_mode()
def generate_together(
    target: Target,
    drafters: Sequence[Drafter],
    prompt: list[int],
    *,
    max_new_tokens: int,
    eos: Collection[int] = (),
    sampling: Sampling = GREEDY,
) -> list[Generation]:
    """Answer one prompt by each of several methods, with the steps that each takes alone, without times.

    The sequence whose root is furthest back goes first, so that contexts that all have passed are freed. It takes some
    twice as many forwards as all at once, as many rows, and a tenth of the contexts.

    Args:
        drafters: of any kind; no two of them may be one object.
        max_new_tokens, eos, sampling: as `generate` takes them.

    Raises:
        UserError: as `generate`; what is sampled reads the text.
    """
    limit = target.token_budget(prompt, max_new_tokens)
    if sampling.reads_text:
        raise UserError("sampling: a repetition penalty and other processors read the text; say timed=true")
    with ExitStack() as ends:
        ends.enter_context(target.turns)
        cache = ends.enter_context(target.cache(sum(drafter.max_nodes for drafter in drafters)))
        sessions = [drafter.session() for drafter in drafters]
        choice = Choice(sampling, target.device)
        for session in sessions:
            session.choice = choice
            ends.callback(session.close)
        if any(drafter.needs.hidden for drafter in drafters):
            target.keep_hidden(True)
            ends.callback(target.keep_hidden, False)
        of_prompt = any(drafter.needs.prompt_logits for drafter in drafters)
        of_steps = of_prompt or any(drafter.needs.logits or drafter.needs.candidates for drafter in drafters)
        text = SharedText(target, cache, prompt, choice, keep=of_steps, keep_prompt=of_prompt)
        first = text.begin(prompt[-1])
        sequences = [_Sequence(session, prompt, text, first) for session in sessions]
        going = list(sequences)
        del first  # from here on only sequences hold contexts
        while going:
            back = min(sequence.context.position for sequence in going)
            turn = [sequence for sequence in going if sequence.context.position == back]
            drafts = [sequence.draft() for sequence in turn]
            asked = text.ask([(sequence.context, draft) for sequence, draft in zip(turn, drafts, strict=True)])
            for sequence, draft, nodes in zip(turn, drafts, asked, strict=True):
                if not sequence.learn(draft, nodes, limit, eos):
                    going.remove(sequence)
    for sequence in sequences:
        sequence.out.end(limit, max_new_tokens, eos)
    return [sequence.out for sequence in sequences]
