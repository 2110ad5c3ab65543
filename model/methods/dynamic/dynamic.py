"""Dynamic recycling: a best-first tree from rows, copied text and rejected siblings."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...compiled import NONE
from ...engine import Device, Draft, Drafter, Needs, Sizing, Tree, Verification, verify
from ...engine.contract.sizing import budget_of
from ...engine.rule.sampling import top_k_log_probs
from ..copying.history import History, TextSession
from ..copying.suffix_automaton import SuffixAutomaton
from ..limits import check_whole
from . import dynamic_loops as loops
from .rows import AcceptRates, CandidateRows, on_host


class DynamicRecycling(Drafter):
    """Drafts the most likely nodes, best first; learns from every node of every step."""

    stateful = True
    sizing: Sizing | None = None

    def __init__(
        self,
        vocab_size: int,
        *,
        nodes: int | str = 24,
        k: int = 8,
        pairs: int = 65536,
        copy: bool = True,
        siblings: bool = True,
        calibrate: bool = True,
        history_tokens: int = 32768,
        recycle_prompt: bool = True,
        device: Device = "cpu",
        eos: Collection[int] = (),
    ) -> None:
        setting = nodes
        nodes = budget_of(nodes)
        check_whole("dynamic", 0, nodes=nodes)
        check_whole("dynamic", 1, vocab_size, k=k)
        super().__init__(device, vocab_size)

        self.nodes = nodes
        self.k = k
        self.copy = copy
        self.siblings = siblings
        self.max_nodes = 1 + nodes
        self.needs = Needs(candidates=k, log_probs=True, prompt_logits=recycle_prompt)
        self.rows = CandidateRows(vocab_size, k, pairs, eos)
        self.rates = AcceptRates(calibrate)
        self.history = History(history_tokens, SuffixAutomaton, vocab_size)
        self.stores = [self.rows, self.rates, self.history]
        if isinstance(setting, str):
            self.sizing = Sizing(setting, self.device)
            self.stores.append(self.sizing)

    def session(self) -> DynamicSession:
        compile_loops()
        return DynamicSession(self)


class DynamicSession(TextSession):
    drafter: DynamicRecycling

    def begin(self, prompt: list[int]) -> Draft | None:
        super().begin(prompt)
        drafter = self.drafter
        self._prompt_at = len(self.text.tokens) - len(prompt)
        self._before = prompt[-2] if len(prompt) > 1 else prompt[-1]
        self.growth = new_growth(drafter.nodes, len(drafter.rows.rows.ends), drafter.k)
        self.rows = drafter.rows.arrays
        return None

    def observe_prompt(self, prompt: list[int], start: int, logits: Tensor) -> None:
        end = start + len(logits)
        before = prompt[max(start - 1, 0)]  # for the prompt's first token: itself
        following = self.text.tokens[self._prompt_at + end]
        outcome = (
            np.array(prompt[start:end], dtype=np.int64),
            *on_host(*top_k_log_probs(logits, self.drafter.k)),
        )
        loops.learn_prompt(
            before, following, self.drafter.siblings, *outcome, self.growth, self.rows
        )

    def draft(self, root: int) -> Draft:
        drafter = self.drafter
        nodes = self.growth[0]
        state = (
            self._before,
            root,
            drafter.copy,
            self.growth,
            self.rows,
            self.text.arrays,
            drafter.rates.rates,
        )
        if drafter.sizing is None:
            count, _ = loops.grow(0, drafter.nodes, *state)
        else:
            count = size = 0
            while count <= size:
                count, following = loops.grow(count, size, *state)
                size = drafter.sizing.choose(nodes["likelihood"][:count], following)
            count = 1 + size

        self._arranged = np.empty((3, count), dtype=np.int64)
        loops.arrange(nodes, self._arranged)
        _, parents, tokens = self._arranged
        return Draft(Tree(parents.tolist()), torch.from_numpy(tokens))

    def likeliest_chain(self, draft: Draft) -> Draft:
        self._arranged = np.ascontiguousarray(self._arranged[:, draft.tree.first_path])
        self._arranged[1] = [0, *range(self._arranged.shape[1] - 1)]
        return super().likeliest_chain(draft)

    def observe(self, verification: Verification) -> None:
        rates = self.drafter.rates
        node = verification.node
        assert verification.candidates is not None and verification.log_probs is not None
        choices = verification.choices.numpy()
        accepted = verification.accepted.numpy()
        # after rejected nodes it may be unknown
        if not self.choice.greedy:
            choices = np.where(accepted, choices, NONE)

        outcome = (
            np.ascontiguousarray(choices),
            accepted,
            *on_host(verification.candidates, verification.log_probs),
        )
        loops.learn(
            self._before,
            node,
            rates.learning,
            self.drafter.siblings,
            self._arranged,
            outcome,
            self.growth,
            self.rows,
            (rates.counts, rates.rates),
        )
        self._before = int(self._arranged[2, node])
        self.text.extend(verification.tokens)

    def skip(self, tokens: list[int]) -> None:
        newest = [*self.text.tokens[-1:], *tokens]
        self._before = newest[-2]
        forget_siblings(self.growth)  # a plain step does not show the next root's
        self.text.extend(tokens)


def new_growth(nodes: int, vocab_size: int, k: int) -> tuple[Any, ...]:
    # two rows and a copy per node, and the root's siblings
    limit = (1 + nodes) * (2 * k + 1) + 2 * k
    growth = loops.Growth(
        nodes=np.zeros(2 + nodes, dtype=loops.NODE),
        candidates=np.empty(limit, dtype=loops.CANDIDATE),
        heap=np.empty(limit, dtype=loops.LISTED),
        sibling_children=np.empty(1 + k, dtype=loops.GUESS),
        siblings=np.empty(1 + k, dtype=loops.GUESS),
        mass=np.zeros(vocab_size),
        met=np.empty(nodes * k, dtype=np.int64),
    )
    forget_siblings(growth)
    return tuple(growth)


def forget_siblings(growth: tuple[Any, ...]) -> None:
    for guesses in (loops.Growth(*growth).sibling_children, loops.Growth(*growth).siblings):
        guesses["token"][0] = NONE


@cache  # before a sequence is timed
def compile_loops() -> None:
    session = DynamicSession(DynamicRecycling(2, nodes=1, k=1, pairs=2))
    session.begin([0, 0])
    session.observe_prompt([0, 0], 0, torch.zeros(1, 2))
    draft = session.draft(0)
    verification = verify(draft, torch.zeros(len(draft.tree), dtype=torch.int64))
    verification.candidates = torch.zeros(len(draft.tree), 1, dtype=torch.int64)
    verification.log_probs = torch.zeros(len(draft.tree), 1)
    session.observe(verification)
