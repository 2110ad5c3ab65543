"""A tree for the machine: the size of the draft tree follows from measured step times and observed acceptance.

Verifying n nodes takes T(n), and a tree of n nodes is expected to have E(n) drafts accepted. Tokens a second are
(1 + E(n)) / T(n): few nodes where nodes are dear (a CPU), many where they are almost free (a large GPU), none where
drafting does not pay. T is measured once a machine; E starts from a profile and follows what is observed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import torch

from .decoding import Drafter, Target, Tree, Verification, decode
from .decoding.tree import RankPath
from .errors import UserError
from .recycling import TokenRecycling
from .recycling.templates import best_order, likelihood

SIZES = (0, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80)  # nodes below the root that are ever considered
PRIOR_STEPS = 16.0  # the profile counts as so many observed steps
MEMORY_STEPS = 256.0  # and the observations of about so many steps are remembered
RECONSIDER = 16  # steps between two choices
PROBE = 12  # every so many steps a larger tree than the one in use is tried, to see what it would give;
PROBE_IDLE = 48  # more rarely where drafting does not pay, as a probe then costs most
PROBE_UP = 4  # larger by so many sizes
LEARN, LEARN_NODES = 8, 24  # the first steps use this many nodes, whatever the profile promises
SWITCH_GAIN = 1.02  # a change of size must promise this much


class AutoRecycling(TokenRecycling):
    """Token Recycling whose tree is the best n nodes of one order, n chosen while running.

    The trees are nested, so a step with n nodes also shows what every smaller tree would have accepted; larger ones are
    extrapolated by the profile.

    Args:
        step_seconds: measured T(n) by nodes below the root; must hold 0.
        budget: at most so many nodes.
        profile: probability that a rank path's node stands; default: the power law of `templates.likelihood`.
        others: as TokenRecycling.

    Raises:
        UserError: no step time for 0 nodes, or a negative budget.
    """

    _sums: torch.Tensor
    _counts: torch.Tensor
    _clock: torch.Tensor

    def __init__(
        self,
        vocab_size: int,
        *,
        step_seconds: Mapping[int, float],
        budget: int = 80,
        profile: Mapping[RankPath, float] | None = None,
        k: int = 8,
        recycle_prompt: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.int64,
        update: str = "all",
    ) -> None:
        if budget < 0 or 0 not in step_seconds:
            raise UserError(f"tree=auto: needs a budget of at least 0 (is {budget}) and the step time of 0 nodes")
        self.sizes = [n for n in SIZES if n <= budget and n in step_seconds]
        self.seconds = [step_seconds[n] for n in self.sizes]
        self._order = nested_order(profile, self.sizes[-1], k)
        self._trees = [Tree.from_rank_paths(self._order[:n]).on(torch.device(device)) for n in self.sizes]
        self.largest = self._trees[-1]
        settings = dict(k=k, recycle_prompt=recycle_prompt, device=device, dtype=dtype, update=update)
        super().__init__(vocab_size, self._trees[-1], **settings)  # type: ignore[arg-type]
        place = {path: i for i, path in enumerate(self._order)}
        # For each node: how deep its path reaches inside each of the nested trees.
        self._reach = {
            path: torch.tensor(
                [sum(place[path[: d + 1]] < n for d in range(len(path))) for n in self.sizes], dtype=torch.float64
            )
            for path in [(), *self._order]
        }
        stands = [(profile or {}).get(path, likelihood(path)) for path in self._order]
        self.prior = torch.tensor([sum(stands[:n]) for n in self.sizes], dtype=torch.float64)
        self.reset()

    def reset(self) -> None:
        super().reset()
        # (sizes, sizes): row j, over the steps with at least j's nodes: accepted drafts of each nested tree, decayed
        self._sums = (self.prior * PRIOR_STEPS).expand(len(self.sizes), -1).clone()
        self._counts = torch.full((len(self.sizes),), PRIOR_STEPS, dtype=torch.float64)
        self._clock = torch.zeros(2, dtype=torch.int64)  # steps seen; index of the size in use

    @property
    def size(self) -> int:
        """Nodes below the root now."""
        return self.sizes[int(self._clock[1])]

    def expected(self) -> list[float]:
        """E(n) by size: expected accepted drafts a step, as known now."""
        now = max(int(self._clock[1]), min(1, len(self.sizes) - 1))  # the size with the freshest figures
        sums, level = self._sums, float(self._sums[now, now] / self._counts[now])
        smaller = (sums[now] / self._counts[now])[: now + 1].tolist()
        # A larger tree was tried on few and older steps, but on those beside the size in use: their ratio holds longer.
        larger = [level * float(sums[j, j] / sums[j, now].clamp(min=1e-9)) for j in range(now + 1, len(self.sizes))]
        return smaller + larger

    def predicted_speedup(self) -> list[float]:
        """Decoding speed by size, over plain decoding on the same engine."""
        return [(1 + e) / (t / self.seconds[0]) for e, t in zip(self.expected(), self.seconds, strict=True)]

    def choose(self) -> None:
        steps, index = self._clock.tolist()
        if steps < LEARN:
            index = sum(n <= LEARN_NODES for n in self.sizes) - 1
        elif steps % (PROBE if index else PROBE_IDLE) == 0:
            index = min(index + PROBE_UP, len(self.sizes) - 1)
        elif steps % RECONSIDER == 1 or steps == LEARN:
            index = self._reconsider()
        if self.tree is not self._trees[index]:
            self.use_tree(self._trees[index])

    def account(self, verification: Verification) -> None:
        tree = verification.draft.tree
        self._clock[0] += 1
        tried = sum(n < len(tree) for n in self.sizes)  # the nested trees that this step shows, its own included
        if tried > 1:
            keep = 1 - 1 / MEMORY_STEPS
            self._sums[:tried] = self._sums[:tried] * keep + self._reach[tree.rank_paths[verification.node]]
            self._counts[:tried] = self._counts[:tried] * keep + 1

    def _reconsider(self) -> int:
        speeds = self.predicted_speedup()
        best, now = max(range(len(speeds)), key=speeds.__getitem__), int(self._clock[1])
        if speeds[best] > SWITCH_GAIN * speeds[now]:
            self._clock[1] = best
        return int(self._clock[1])

    def state_dict(self) -> dict[str, torch.Tensor]:
        return super().state_dict() | {"sums": self._sums, "counts": self._counts, "clock": self._clock}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes a plain matrix, too: then the choice starts from the profile."""
        super().load_state_dict({"candidates": state["candidates"]} if "candidates" in state else state)
        if "clock" in state:
            if state["sums"].shape != self._sums.shape:
                raise UserError("tree=auto: the saved state considered other sizes; start from another one or cold")
            self._sums, self._counts = state["sums"].clone(), state["counts"].clone()
            self._clock = state["clock"].clone()


def nested_order(profile: Mapping[RankPath, float] | None, n: int, k: int) -> Sequence[RankPath]:
    """The n nodes likeliest to stand, each behind its parent; without a profile the published order."""
    if not profile:
        return best_order(n, k)
    known = sorted((p for p in profile if max(p) < k), key=lambda p: (-profile[p], len(p), p))
    order: list[RankPath] = []
    taken: set[RankPath] = {()}
    for path in [*known, *best_order(n + len(known), k)]:
        if path not in taken and path[:-1] in taken and len(order) < n:
            order.append(path)
            taken.add(path)
    return tuple(order)


def measure_step_seconds(
    target: Target, prompt: list[int], *, budget: int, k: int, tokens: int = 32, rounds: int = 5
) -> dict[int, float]:
    """T(n): median seconds of a whole step by nodes below the root, sizes taking turns so that drift favours none.

    Args:
        prompt: sets the context; a few hundred tokens are typical.
        budget: sizes above it are not measured.
        tokens: decoded a size and round.
    """
    sizes = [n for n in SIZES if n <= budget]
    drafters: dict[int, Drafter] = {
        n: TokenRecycling(target.vocab_size, Tree.from_rank_paths(best_order(n, k)), k=k, device=target.device)
        for n in sizes
    }
    target.reserve(1 + max(sizes))
    seconds: dict[int, list[float]] = {n: [] for n in sizes}
    for turn in range(rounds + 1):
        for n, drafter in drafters.items():
            drafter.reset()
            out = decode(target, drafter, prompt, max_new_tokens=tokens)
            if turn:  # the first round warms up
                seconds[n].append(out.decode_s / max(out.forwards - 1, 1))
    return {n: statistics.median(values) for n, values in seconds.items()}
