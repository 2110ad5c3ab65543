"""Dynamic recycling: each step drafts the n likeliest nodes of all that rows and text suggest.

The paper asks whether dynamic trees can outperform its static one (2408.08696, limitations). Here a row keeps how
likely its candidates were, a second table has rows by pairs of tokens, text is copied (SAM-Decoding, 2411.10666), and
the root is given two sources that cost nothing: what followed its rejected siblings in the step before, and these
siblings. What each kind of candidate is worth is learnt (`weights`).
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .. import jit
from ..copying.history import History, TextSession
from ..copying.suffix_automaton import SuffixAutomaton, automaton_class
from ..decoding import Draft, Drafter, Needs, Tree, Verification
from ..decoding.tree import breadth_first
from ..errors import UserError
from ..sizing.draft_size import StepCosts
from ..sizing.online_size import OnlineSize, budget_of
from .machine_size import MachineSize
from .rows import LEVELS, PairRows, TokenRows, likely, on_host
from .weights import (
    ALONE,
    AND_FOLLOWED,
    AND_SIBLING,
    BEHIND,
    COPIED,
    FIRST,
    FOLLOWED,
    PAIR,
    SIBLING,
    TOKEN,
    Weights,
    bucket,
    cell,
    is_alone,
)

MAX_NODES = 4096
UNLISTED = 8  # the level of a sibling that is not among its parent's candidates any more
Likely = tuple[int, int]  # a token and its level


class DynamicRecycling(Drafter):
    """Drafts the likeliest nodes, best first; learns from every node of every step.

    A node's likelihood is the product of the weights along its path. History from prompt to prompt: the rows, the
    weights and the newest text. The tree is another one each step: it is fed into steps of fixed shape where
    they are not eager.

    Args:
        vocab_size: V.
        nodes: of every draft, the root not counted; fewer where nothing suggests so many. auto: as many as pay, found
            while decoding; `auto:N`: at most N.
        k: candidates kept a row.
        pairs: rows by pairs of tokens, a power of two; 0: none.
        copy: continue the longest match of text and path as well.
        siblings: at the root, also what followed its rejected siblings, and these siblings.
        calibrate: learn the weights; else they stay as they are at first, or as they were saved.
        history_tokens: earlier prompts and answers are copied from, too, up to so many tokens; 0: the prompt alone.
        recycle_prompt: also keep rows of the prompt's own logits.
        step_seconds: T(n) by nodes below the root, 0 among them: then each draft has as many nodes, at most `nodes`, as
            give most expected tokens a second. None: each has `nodes`.
        plain_seconds: of a step that neither drafts nor learns, for the prediction; default T(0).

    Raises:
        UserError: a setting out of range.
    """

    stateful = True
    sizing: OnlineSize | None = None

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
        device: torch.device | str = "cpu",
        step_seconds: Mapping[int, float] | None = None,
        plain_seconds: float | None = None,
    ) -> None:
        most = budget_of(nodes)
        nodes = nodes if most is None else most
        if not isinstance(nodes, int) or not 0 <= nodes <= MAX_NODES:
            raise UserError(f"dynamic: nodes={nodes} must be from 0 to {MAX_NODES}")
        if most is not None and step_seconds is not None:
            raise UserError("dynamic: nodes=auto learns step times by itself and takes no step_seconds")
        if not isinstance(k, int) or not 1 <= k <= vocab_size:
            raise UserError(f"k={k}: must be from 1 to the vocabulary's size ({vocab_size})")
        super().__init__(torch.device(device))
        self.size: MachineSize | None = None
        if step_seconds is not None:
            self.size = MachineSize(StepCosts(step_seconds, plain_seconds, nodes))
        elif most is not None:
            self.sizing = OnlineSize(most, self.device)
            self.size = MachineSize(self.sizing)
        if self.size is not None:
            nodes = self.size.sizes[-1]
        self.nodes, self.k, self.copy, self.siblings, self.max_nodes = nodes, k, copy, siblings, 1 + nodes
        self.needs = Needs(candidates=k, bits=True, choices=True, prompt_logits=recycle_prompt)
        self.rows = TokenRows(vocab_size, k)
        self.pairs = PairRows(pairs, k) if pairs else None
        self.weights, self.history = Weights(calibrate), History(history_tokens, automaton_class())
        self.compiled = jit.compiled()
        if self.compiled:  # now, and not while something is timed
            from .compiled_session import compile_loops

            compile_loops()

    def session(self) -> DynamicSession:
        if not self.compiled:
            return DynamicSession(self)
        from .compiled_session import CompiledSession

        return CompiledSession(self)

    def keep(self, before: Any, tokens: Any, ids: Any, levels: Any) -> None:
        """Keep candidates (m, k) seen after `tokens`, int64 (m,), each behind one of `before`, in order."""
        self.rows.write(tokens, ids, levels)
        if self.pairs is not None:
            self.pairs.write_pairs(before, tokens, ids, levels)

    def candidates(self, before: int, token: int, copied: int | None, match: int) -> dict[int, int]:
        """What may follow `token` behind `before`: tokens and their cells.

        Args:
            copied: the token that follows in the text behind a match of `match` tokens; None and 0: there is none.
        """
        at = bucket(match)
        cells: dict[int, int] = {}
        pair = None if self.pairs is None else self.pairs.find_pair(before, token)
        row = self.rows.find(token)
        if row is not None:
            cells = self._kept(self.rows, row, FIRST[TOKEN if pair is None else BEHIND][at])
        if self.pairs is not None and pair is not None:
            cells |= self._kept(self.pairs, pair, FIRST[PAIR][at])
        if copied is not None:
            cells[copied] = cells[copied] + LEVELS if copied in cells else FIRST[COPIED][at] + LEVELS
        return cells

    @staticmethod
    def _kept(rows: TokenRows, row: int, first: int) -> dict[int, int]:
        """The candidates of a row and their cells, of which `first` is that of level 0."""
        return dict(zip(rows.ids[row].tolist(), [first + level for level in rows.levels[row].tobytes()], strict=True))

    def reset(self) -> None:
        self.rows.reset()
        if self.pairs is not None:
            self.pairs.reset()
        self.weights.reset()
        self.history.reset()
        if self.size is not None:
            self.size.reset()

    def state_dict(self) -> dict[str, torch.Tensor]:
        tables = {"token": self.rows} | ({} if self.pairs is None else {"pair": self.pairs})
        named = {f"{table}_{name}": t for table, rows in tables.items() for name, t in rows.state_dict().items()}
        chosen = {} if self.size is None else self.size.state_dict()
        if self.sizing is not None:
            chosen |= self.sizing.state_dict()
        return named | self.weights.state_dict() | self.history.state_dict() | chosen

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for table, rows in (("token_", self.rows), ("pair_", self.pairs)):
            if rows is None and any(name.startswith(table) for name in state):
                raise UserError(
                    "start: the saved rows are by pairs of tokens as well; method.pairs=0 has none of these"
                )
            if rows is not None:
                of_table = {name.removeprefix(table): t for name, t in state.items() if name.startswith(table)}
                rows.load_state_dict(of_table, len(self.rows.ids))
        self.weights.load_state_dict(state)
        self.history.load_state_dict(state, len(self.rows.ids))
        if self.size is not None:
            self.size.load_state_dict(state)
        if self.sizing is not None:
            self.sizing.load_state_dict(state)

    def describe(self) -> dict[str, Any]:
        held = self.rows.nbytes + (0 if self.pairs is None else self.pairs.nbytes)
        return {"rows_bytes": held} | ({} if self.size is None else self.size.describe())


class DynamicSession(TextSession[SuffixAutomaton]):
    """A sequence's text, and what the last step says of what follows the next root."""

    method: DynamicRecycling

    def begin(self, prompt: list[int]) -> Draft | None:
        """The first step is like all others: it drafts, and it learns."""
        super().begin(prompt)
        self._before = prompt[-2] if len(prompt) > 1 else prompt[-1]
        self._followed, self._siblings = list[Likely](), list[Likely]()
        return None

    def observe_prompt(self, prompt: list[int], logits: torch.Tensor) -> None:
        """With `recycle_prompt`: rows of the prompt's tokens, and what the last of them was chosen from."""
        ids, levels = likely(logits, self.method.k)  # (m, k), m = P - 1
        tokens = np.array(prompt, dtype=np.int64)
        self.method.keep(np.concatenate((tokens[:1], tokens[:-1])), tokens, ids, levels)
        self._note_siblings(ids[-1:], levels[-1:], 0, [], self.text.tokens[-1])

    def draft(self, root: int) -> Draft:
        """Best first: the likeliest candidate of all nodes taken so far is the next one, until there are n."""
        method, text, weights = self.method, self.text, self.method.weights.each
        tokens, parents, likelihoods = [root], [0], [1.0]
        matches = [text.match if method.copy else (0, 0)]  # of each node: the automaton's state, and the match's length
        child_cells = [self._below_root(root, *matches[0])]  # of each node: its candidates and their cells
        # The best candidates so far, no more than there is room for, the best last: likelihood, -serial, parent, token
        frontier: list[tuple[float, int, int, int]] = []
        serial, room, least = 0, method.nodes, -1.0
        for node in range(method.nodes):
            above = likelihoods[node]
            for token, at in child_cells[node].items():
                likelihood = above * weights[at]
                if likelihood > least:
                    serial -= 1
                    insort(frontier, (likelihood, serial, node, token))
                    if len(frontier) > room:
                        del frontier[0]
                        least = frontier[0][0]
            if not frontier or (method.size is not None and method.size.enough(likelihoods, frontier[-1][0])):
                break
            likelihood, _, parent, token = frontier.pop()
            room -= 1
            match = text.transfer(*matches[parent], token) if method.copy else (0, 0)
            tokens.append(token)
            parents.append(parent)
            likelihoods.append(likelihood)
            matches.append(match)
            child_cells.append(method.candidates(tokens[parent], token, *text.following(*match)))
        size = len(likelihoods) - 1 if method.size is None else method.size.choose(likelihoods)
        order, parents = breadth_first(parents[: 1 + size])
        self._child_cells = [child_cells[node] for node in order]
        return Draft(Tree(parents, once=True), torch.tensor([tokens[node] for node in order]))

    def _below_root(self, root: int, state: int, length: int) -> dict[int, int]:
        """What may follow the root: what may follow any node, and what the last step says."""
        cells = self.method.candidates(self._before, root, *self.text.following(state, length))
        if self.method.siblings:
            for suggested, source, listed in (
                (AND_FOLLOWED, FOLLOWED, self._followed),
                (AND_SIBLING, SIBLING, self._siblings),
            ):
                for token, level in listed:
                    at = cells.get(token)
                    if at is None:
                        cells[token] = cell(source, ALONE, 0, False, level)
                    elif is_alone(at):
                        cells[token] = at + cell(PAIR, suggested, 0, False)
        return cells

    def observe(self, verification: Verification) -> None:
        method, draft = self.method, verification.draft
        assert verification.candidates is not None and verification.bits is not None
        ids, levels = on_host(verification.candidates, verification.bits)  # (n, k)
        choices = verification.choices.tolist()
        method.weights.learn(
            [at for cells in self._child_cells for at in cells.values()],
            [cells[choice] for cells, choice in zip(self._child_cells, choices, strict=True) if choice in cells],
        )
        tokens = draft.tokens.numpy()
        before = tokens[draft.tree.parent_of]
        before[0] = self._before
        order = np.argsort(verification.accepted.numpy(), kind="stable")  # what is accepted is written last, and counts
        method.keep(before[order], tokens[order], ids[order], levels[order])
        node = verification.node
        rejected = [child for child, parent in enumerate(draft.tree.parent_of) if child and parent == node]
        self._note_siblings(ids, levels, node, [(child, int(tokens[child])) for child in rejected], choices[node])
        self._before = int(tokens[node])
        self.read(verification.tokens)

    def passed(self, tokens: list[int]) -> None:
        """Nothing is known of what stood beside the next root."""
        known = [*self.text.tokens[-1:], *tokens]
        self._before, self._followed, self._siblings = known[-2], [], []
        self.read(tokens)

    def _note_siblings(self, ids: Any, levels: Any, node: int, rejected: list[tuple[int, int]], root: int) -> None:
        """Of the last step's rows (n, k): what was next to the new root below `node`, and what followed there.

        Args:
            rejected: children of `node` that were tried, and their tokens.
        """
        level_of = dict(zip(ids[node].tolist(), levels[node].tolist(), strict=True))
        self._siblings = [(token, level) for token, level in level_of.items() if token != root]
        mass: dict[int, float] = {}
        whole = 0.0
        for child, token in rejected:
            weight = 2.0 ** -level_of.get(token, UNLISTED)
            whole += weight
            for candidate, level in zip(ids[child].tolist(), levels[child].tolist(), strict=True):
                mass[candidate] = mass.get(candidate, 0.0) + weight * 2.0**-level
        likeliest = sorted(mass.items(), key=lambda item: -item[1])[: self.method.k]
        self._followed = [(token, min(int(math.log2(whole / part)), LEVELS - 1)) for token, part in likeliest]
