"""Dynamic recycling: a best-first tree from unigram and bigram tables, suffix matches and rejected siblings.

The paper asks whether dynamic trees can outperform its static one (2408.08696, limitations). Here a row keeps its
candidates' probabilities, a second table has rows by pairs of tokens, text is copied (SAM-Decoding, 2411.10666), and
the root has two sources that cost nothing: what followed its rejected siblings in the step before, and these siblings.
The acceptance probability of each kind of candidate is learnt (`weights`).
"""

from __future__ import annotations

import math
from bisect import insort
from typing import Any

import numpy as np
import torch

from .. import jit
from ..copying.history import History, TextSession
from ..copying.suffix_automaton import SuffixAutomaton, automaton_class
from ..decoding import Draft, Drafter, Needs, Tree, Verification
from ..decoding.tree import breadth_first
from ..errors import UserError
from ..sizing import Sizing, budget_of
from .rows import LEVELS, PairRows, TokenRows, on_host, top_k_levels
from .weights import (
    ALONE,
    AND_SIBLING,
    AND_SIBLING_CHILD,
    BACKOFF,
    COPIED,
    FIRST_CELL,
    PAIR,
    SIBLING,
    SIBLING_CHILD,
    TOKEN,
    Weights,
    bucket,
    cell,
    is_alone,
)

MAX_NODES = 4096
UNLISTED = 8  # the level of a sibling that has left its parent's candidates
Candidate = tuple[int, int]  # a token and its level


class DynamicRecycling(Drafter):
    """Drafts the most likely nodes, best first; learns from every node of every step.

    A node's likelihood is the product of the weights along its path. Kept between prompts: the rows, the weights and
    the newest text. Each step has a tree of its own; static steps pad it to a fixed shape.

    Args:
        vocab_size: V.
        nodes: of every draft, the root not counted; fewer where nothing suggests so many. auto: as many as pay, found
            while decoding; `auto:N`: at most N.
        k: candidates kept a row.
        pairs: rows by pairs of tokens, a power of two; 0: none.
        copy: also continue the longest match of text and path.
        siblings: at the root also try its rejected siblings, and what followed these.
        calibrate: learn the weights; False: they stay at the prior, or as saved.
        history_tokens: earlier prompts and answers are copied from, too, up to so many tokens; 0: the prompt alone.
        recycle_prompt: also keep rows of the prompt's own logits.

    Raises:
        UserError: a setting out of range.
    """

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
        device: torch.device | str = "cpu",
    ) -> None:
        sized, nodes = nodes, budget_of(nodes)
        if not isinstance(nodes, int) or not 0 <= nodes <= MAX_NODES:
            raise UserError(f"dynamic: nodes={nodes} must be from 0 to {MAX_NODES}")
        if not isinstance(k, int) or not 1 <= k <= vocab_size:
            raise UserError(f"k={k}: must be from 1 to the vocabulary's size ({vocab_size})")
        super().__init__(torch.device(device))
        if isinstance(sized, str):
            self.sizing = Sizing(sized, self.device)
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
        """Write the candidates (m, k) after `tokens`, int64 (m,), and after their pairs with `before`, in order."""
        self.rows.write(tokens, ids, levels)
        if self.pairs is not None:
            self.pairs.write_pairs(before, tokens, ids, levels)

    def candidates(self, before: int, token: int, copied: int | None, match: int) -> dict[int, int]:
        """Return the candidates after `before` and `token`: token ids and their cells.

        Args:
            copied: the token that followed a match of `match` tokens; None and 0: no match.
        """
        length_bucket = bucket(match)
        cells: dict[int, int] = {}
        pair = None if self.pairs is None else self.pairs.find_pair(before, token)
        row = self.rows.find(token)
        if row is not None:
            cells = self._row_cells(self.rows, row, FIRST_CELL[TOKEN if pair is None else BACKOFF][length_bucket])
        if self.pairs is not None and pair is not None:
            cells |= self._row_cells(self.pairs, pair, FIRST_CELL[PAIR][length_bucket])
        if copied is not None:
            cells[copied] = cells[copied] + LEVELS if copied in cells else FIRST_CELL[COPIED][length_bucket] + LEVELS
        return cells

    @staticmethod
    def _row_cells(rows: TokenRows, row: int, first: int) -> dict[int, int]:
        """Return the candidates of a row and their cells; `first` is the cell of level 0."""
        return dict(zip(rows.ids[row].tolist(), [first + level for level in rows.levels[row].tobytes()], strict=True))

    def reset(self) -> None:
        self.rows.reset()
        if self.pairs is not None:
            self.pairs.reset()
        self.weights.reset()
        self.history.reset()
        if self.sizing is not None:
            self.sizing.reset()

    def state_dict(self) -> dict[str, torch.Tensor]:
        tables = {"token": self.rows} | ({} if self.pairs is None else {"pair": self.pairs})
        named = {f"{table}_{name}": t for table, rows in tables.items() for name, t in rows.state_dict().items()}
        sizes = {} if self.sizing is None else self.sizing.state_dict()
        return named | self.weights.state_dict() | self.history.state_dict() | sizes

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
        if self.sizing is not None:
            self.sizing.load_state_dict(state)

    def describe(self) -> dict[str, Any]:
        nbytes = self.rows.nbytes + (0 if self.pairs is None else self.pairs.nbytes)
        return {"rows_bytes": nbytes} | ({} if self.sizing is None else self.sizing.describe())


class DynamicSession(TextSession[SuffixAutomaton]):
    """A sequence's text, and the last step's siblings of the next root."""

    method: DynamicRecycling

    def begin(self, prompt: list[int]) -> Draft | None:
        """The first step is like all others: it drafts, and it learns."""
        super().begin(prompt)
        self._prompt_at = len(self.text.tokens) - len(prompt)
        self._before = prompt[-2] if len(prompt) > 1 else prompt[-1]
        self._sibling_children, self._siblings = list[Candidate](), list[Candidate]()
        return None

    def observe_prompt(self, prompt: list[int], logits: torch.Tensor) -> None:
        """With `recycle_prompt`: keep rows of the prompt's tokens, and the siblings of the first root."""
        ids, levels = top_k_levels(logits, self.method.k)  # (m, k)
        tokens = np.array(prompt, dtype=np.int64)
        at = len(self.text.tokens) - 1 - len(prompt)  # the root is behind them
        before = self.text.tokens[at - 1] if at > self._prompt_at else prompt[0]  # of a prompt's first token: itself
        self.method.keep(np.concatenate(([before], tokens[:-1])), tokens, ids, levels)
        self._note_siblings(ids[-1:], levels[-1:], 0, [], self.text.tokens[-1])

    def draft(self, root: int) -> Draft:
        """Draft best first: add the most likely candidate of all nodes so far, until there are n nodes."""
        method, text, weights = self.method, self.text, self.method.weights.probs_view
        tokens, parents, likelihoods = [root], [0], [1.0]
        matches = [text.match if method.copy else (0, 0)]  # of each node: the automaton's state and the match's length
        child_cells = [self._root_candidates(root, *matches[0])]  # of each node: its candidates and their cells
        # The best candidates so far, at most as many as nodes are left, best last: likelihood, -serial, parent, token
        frontier: list[tuple[float, int, int, int]] = []
        serial, left, least = 0, method.nodes, -1.0
        for node in range(method.nodes):
            node_likelihood = likelihoods[node]
            for token, kind in child_cells[node].items():
                likelihood = node_likelihood * weights[kind]
                if likelihood > least:
                    serial -= 1
                    insort(frontier, (likelihood, serial, node, token))
                    if len(frontier) > left:
                        del frontier[0]
                        least = frontier[0][0]
            if not frontier or (method.sizing is not None and method.sizing.enough(likelihoods, frontier[-1][0])):
                break
            likelihood, _, parent, token = frontier.pop()
            left -= 1
            match = text.transfer(*matches[parent], token) if method.copy else (0, 0)
            tokens.append(token)
            parents.append(parent)
            likelihoods.append(likelihood)
            matches.append(match)
            child_cells.append(method.candidates(tokens[parent], token, *text.following(*match)))
        size = len(likelihoods) - 1 if method.sizing is None else method.sizing.choose(likelihoods)
        order, parents = breadth_first(parents[: 1 + size])
        self._child_cells = [child_cells[node] for node in order]
        return Draft(Tree(parents, once=True), torch.tensor([tokens[node] for node in order]))

    def _root_candidates(self, root: int, state: int, length: int) -> dict[int, int]:
        """Return the root's candidates: those that any node has, the last step's siblings and what followed them."""
        cells = self.method.candidates(self._before, root, *self.text.following(state, length))
        if self.method.siblings:
            for suggested, source, listed in (
                (AND_SIBLING_CHILD, SIBLING_CHILD, self._sibling_children),
                (AND_SIBLING, SIBLING, self._siblings),
            ):
                for token, level in listed:
                    kind = cells.get(token)
                    if kind is None:
                        cells[token] = cell(source, ALONE, 0, False, level)
                    elif is_alone(kind):
                        cells[token] = kind + cell(PAIR, suggested, 0, False)
        return cells

    def observe(self, verification: Verification) -> None:
        method, draft = self.method, verification.draft
        assert verification.candidates is not None and verification.bits is not None
        ids, levels = on_host(verification.candidates, verification.bits)  # (n, k)
        choices = verification.choices.tolist()
        method.weights.learn(
            [kind for cells in self._child_cells for kind in cells.values()],
            [cells[choice] for cells, choice in zip(self._child_cells, choices, strict=True) if choice in cells],
        )
        tokens = draft.tokens.numpy()
        before = tokens[draft.tree.parent_of]
        before[0] = self._before
        order = np.argsort(verification.accepted.numpy(), kind="stable")  # accepted nodes are written last, so they win
        method.keep(before[order], tokens[order], ids[order], levels[order])
        node = verification.node
        rejected = [child for child, parent in enumerate(draft.tree.parent_of) if child and parent == node]
        self._note_siblings(ids, levels, node, [(child, int(tokens[child])) for child in rejected], choices[node])
        self._before = int(tokens[node])
        self.read(verification.tokens)

    def passed(self, tokens: list[int]) -> None:
        """Append the tokens and forget the siblings: a plain step says nothing of the next root's."""
        newest = [*self.text.tokens[-1:], *tokens]
        self._before, self._sibling_children, self._siblings = newest[-2], [], []
        self.read(tokens)

    def _note_siblings(self, ids: Any, levels: Any, node: int, rejected: list[tuple[int, int]], root: int) -> None:
        """Keep the siblings of the next root, and what followed the rejected ones, from the last step's rows (n, k).

        Args:
            node: the deepest accepted node, parent of the next root.
            rejected: drafted children of `node`, and their tokens.
        """
        level_of = dict(zip(ids[node].tolist(), levels[node].tolist(), strict=True))
        self._siblings = [(token, level) for token, level in level_of.items() if token != root]
        mass: dict[int, float] = {}
        total = 0.0
        for child, token in rejected:
            weight = 2.0 ** -level_of.get(token, UNLISTED)
            total += weight
            for candidate, level in zip(ids[child].tolist(), levels[child].tolist(), strict=True):
                mass[candidate] = mass.get(candidate, 0.0) + weight * 2.0**-level
        best = sorted(mass.items(), key=lambda item: -item[1])[: self.method.k]
        self._sibling_children = [(token, min(int(math.log2(total / part)), LEVELS - 1)) for token, part in best]
