"""Spine: a copied continuation with recycled candidates as its branches.

Both are one tree of a fixed number of nodes.

RACER (2604.14885) and Goose (2604.02047) join retrieved and recycled drafts in one tree, too. This
project's own part
is the choice between the two: the most likely nodes of both, by a prior of two parts (see
`spine_tree`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any, Literal

import torch

from ..engine import Tree
from ..engine.devices import fastest
from ..engine.drafter import Device
from ..engine.sizing import Sizing, budget_of
from ..engine.tree import RankPath
from ..errors import UserError
from ..recycling import RecyclingSession, TokenRecycling
from ..recycling.templates import best_first, best_order, likelihood
from ..structures import check_whole
from ..structures.history import History, TextSession
from ..structures.suffix_automaton import SuffixAutomaton


class Spine(TokenRecycling):
    """Token Recycling whose tree grows off a copied continuation.

    It is that of the longest suffix match in prompt and output.

    There is one topology for each length of match; a step chooses one and fills in its tokens.
    Without a match, it has the best nodes of the published order. Kept between prompts: the matrix
    and the newest text.

    Rank paths in step records: a spine token has rank 0, and the other candidates of a node that
    the spine goes through have ranks 1, 2, ..., best first. Elsewhere ranks are the matrix's own.

    Args:
        nodes: of every draft, the root not counted. auto: the size is tuned while decoding;
            `auto:N`: at most N.
        accept_probs: probability that the token that followed a match of 1, 2, 3, ... tokens
            follows it again; the last one holds for longer matches. 0: such a match is not copied
            from.
        history_tokens: maximum tokens of earlier prompts and answers that are matched, too; 0: the
            prompt alone.
        others: as TokenRecycling.
    """

    sizing: Sizing | None = None
    joins = False  # each sequence has a topology of its own

    def __init__(
        self,
        vocab_size: int,
        *,
        nodes: int | str = 24,
        accept_probs: Sequence[float] = (0.0, 0.2, 0.45, 0.55, 0.65, 0.75, 0.85),
        history_tokens: int = 32768,
        k: int = 8,
        recycle_prompt: bool = False,
        device: Device = "cpu",
        dtype: Literal["int64", "int32"] = "int64",
        eos: Collection[int] = (),
    ) -> None:
        sized = nodes
        nodes = budget_of(nodes)
        check_whole("spine", 1, nodes=nodes)
        if not accept_probs or not all(map(_is_probability, accept_probs)):
            raise UserError(
                f"spine: accept_probs={accept_probs} must be a list of probabilities, for matches"
                " of 1, 2, ... tokens"
            )

        settings = dict(k=k, recycle_prompt=recycle_prompt, device=device, dtype=dtype, eos=eos)
        super().__init__(vocab_size, Tree.chain(0), **settings)  # type: ignore[arg-type]
        self.nodes = nodes
        self.accept_probs = accept_probs
        self.draft_tree = None
        self.history = History(history_tokens, SuffixAutomaton, vocab_size)
        self.stores = [self.matrix, self.history]
        # lengths of a match, each with topologies of its own
        matches = range(len(accept_probs) + 1)
        self._topologies: dict[tuple[int, int], Topology] = {}  # by kind and nodes
        if isinstance(sized, str):
            self.sizing = Sizing(sized, self.device, teaches=True)
            self.stores.append(self.sizing)
            self._likelihoods = []
            for match in matches:
                best = most_likely(match, nodes, k, accept_probs)
                self._likelihoods.append([1.0, *(prob for prob, _ in best)])
        else:
            for match in matches:
                self._topology(match, nodes)

        self.max_nodes = 1 + nodes
        # the root and the spine, filled each step
        self._line = torch.zeros(1 + nodes, dtype=torch.long, device=self.device)
        self._line_cells = fastest(self._line)
        self._chosen = self._topology(0, nodes)
        self.tree = self._chosen.tree

    def session(self) -> SpineSession:
        return SpineSession(self)

    def choose_topology(self, text: SuffixAutomaton) -> None:
        """Choose the topology by the length of the text's match.

        Copy the match's continuation into the spine.
        """
        match = min(text.length, len(self.accept_probs))
        nodes = self.nodes if self.sizing is None else self.sizing.choose(self._likelihoods[match])
        chosen = self._chosen = self._topology(match if nodes else 0, nodes)
        self.tree = chosen.tree
        if chosen.spine:
            copied = torch.tensor(text.copy(text.end, chosen.spine))
            self._line[1 : 1 + chosen.spine].copy_(copied, non_blocking=True)

    def _topology(self, match: int, nodes: int) -> Topology:
        """Return the topology for a match of this length; built when first needed."""
        if (match, nodes) not in self._topologies:
            tree, spine = spine_tree(match, nodes, self.matrix.k, self.accept_probs)
            self._topologies[match, nodes] = Topology(tree.on(self.device), spine)
        return self._topologies[match, nodes]

    def grow(self, root: torch.Tensor) -> torch.Tensor:
        """Fill in the spine, then all other children of its nodes at once.

        Then fill lower levels as recycling does.

        The other children of a spine node are its candidates except the spine's next token.
        """
        topology = self._chosen
        cells = self._chosen.cells
        matrix = self.matrix
        self._line_cells[:1] = fastest(root)
        line = self._line_cells[: 1 + topology.spine]  # (1 + L,)
        cells[topology.spine_nodes] = line
        for generation, (nodes, parents, ranks) in enumerate(topology.generations):
            if generation == 0 and topology.spine:
                rows = matrix.rows(line[:-1])  # (L, k)
                # (L,): rank of the spine's next token among the candidates; k if it is none of them
                topology.spine_ranks[:-1] = (rows != line[1:, None]).cumprod(1).sum(1)
                # rank r is candidate r - 1 before the spine's token, and candidate r after it
                ranks = ranks - 1 * (ranks <= topology.spine_ranks[topology.depths])
            cells[nodes] = matrix.look_up(cells[parents], ranks)

        return topology.tokens.clone()


class SpineSession(TextSession, RecyclingSession):
    """A sequence's text."""

    drafter: Spine

    def choose(self) -> None:
        self.drafter.choose_topology(self.text)


class Topology:
    """A tree whose nodes (0,), (0, 0), ... down to depth `spine` are copied.

    It has the arrays of its look-up.

    On the CPU all arrays but `tree` and `tokens` are NumPy's, see `fastest`.
    """

    def __init__(self, tree: Tree, spine: int) -> None:
        self.tree = tree
        self.spine = spine
        node = {path: i for i, path in enumerate(tree.rank_paths)}
        generations: dict[int, list[int]] = {}
        for path, i in node.items():
            distance = len(path) - spine_depth(path, spine)
            if distance:
                generations.setdefault(distance, []).append(i)

        def numbers(values: list[int]) -> Any:
            return fastest(torch.tensor(values, dtype=torch.long, device=tree.device))

        # int64 (1 + L,), the root included
        self.spine_nodes = numbers([node[(0,) * depth] for depth in range(spine + 1)])
        # nodes, parents and ranks by their distance from the spine, 1 first; int64 (m,) each
        self.generations = [
            (numbers(nodes), fastest(tree.parents[nodes]), fastest(tree.ranks[nodes]))
            for _, nodes in sorted(generations.items())
        ]
        # depths of the first generation's parents
        self.depths = numbers([len(tree.rank_paths[i]) - 1 for i in generations.get(1, [])])
        # filled each step; -1 at the tip, which has no next token
        self.spine_ranks = numbers([-1] * (spine + 1))
        self.tokens = torch.zeros(len(tree), dtype=torch.long, device=tree.device)
        self.cells = fastest(self.tokens)


def _is_probability(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


def spine_depth(path: RankPath, spine: int) -> int:
    """Return how many nodes of a spine of this length a rank path follows."""
    return next((i for i, rank in enumerate(path[:spine]) if rank), min(len(path), spine))


def spine_tree(match: int, nodes: int, k: int, accept_probs: Sequence[float]) -> tuple[Tree, int]:
    """Build the tree of the `nodes` most likely nodes for a match of `match` tokens.

    Also return the spine's length.

    The prior: after a match of m tokens the copied token is right with probability accept_probs(m);
    then the match is one longer. Otherwise, the other candidates and all nodes below them follow
    recycling's power law, `likelihood`.
    """
    listed = most_likely(match, nodes, k, accept_probs)
    paths = [path for _, path in listed]
    if not copies(match, accept_probs):
        return Tree.from_rank_paths(paths), 0

    spine = max((len(path) for path in paths if not any(path)), default=0)
    # The tip has no spine token among its candidates: its children begin with rank 0.
    at_tip = [path[:spine] == (0,) * spine and len(path) > spine for path in paths]
    return (
        Tree.from_rank_paths(
            (*path[:spine], path[spine] - 1, *path[spine + 1 :]) if below else path
            for path, below in zip(paths, at_tip, strict=True)
        ),
        spine,
    )


def copies(match: int, accept_probs: Sequence[float]) -> bool:
    """True if a match of so many tokens is copied from."""
    return match > 0 and accept_probs[min(match, len(accept_probs)) - 1] > 0


def most_likely(
    match: int, nodes: int, k: int, accept_probs: Sequence[float]
) -> list[tuple[float, RankPath]]:
    """List the `nodes` most likely nodes by the prior of `spine_tree`.

    Each has its likelihood and its rank path.

    The spine's next token has rank 0, a node's other candidates have ranks from 1 on.
    """
    if not copies(match, accept_probs):
        return [(likelihood(path), path) for path in best_order(nodes, k)]

    law = [likelihood((rank,)) for rank in range(k)]

    def children(path: RankPath) -> list[float]:
        if any(path):  # off the spine
            return law
        prob = accept_probs[min(match + len(path), len(accept_probs)) - 1]
        return [prob, *((1 - prob) * share for share in law[:-1])]

    return list(islice(best_first(children), nodes))
