"""Steps of fixed shape, all on the device, which can be compiled, or captured as one CUDA graph and replayed.

Of a drafter that drafts on the device the whole step is one (`WholeStep`). Of any other it is the forward with the
target's choices (`PaddedForward`): its draft is fed in, whatever tree it has.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple, Protocol

import numpy as np
import torch

from .attention import WORD, TreeAttention, packed
from .cache import TreeCache
from .devices import on_host_like, wait
from .drafter import DeviceDrafter, Drafter
from .sampling import Candidates, Choice
from .target import Target
from .tree import Draft, Tree
from .verification import Commit

BUCKET = 256  # a static step attends over the context rounded up to a multiple of this; of a long one to more
# Rows of a forward whose draft is fed in: the least of these that holds it, so that a few forwards serve all drafts.
ROWS = (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def bucket_of(tokens: int) -> int:
    """The bucket that holds so many: multiples of BUCKET up to 4 of them, then 6, 8, 12, 16, ...

    So a context of 4,096 has 8 and not 16, and no more than a third of a bucket is read for nothing.
    """
    buckets = -(-tokens // BUCKET)
    if buckets > 4:
        part = 1 << (buckets - 1).bit_length() - 2
        buckets = -(-buckets // part) * part
    return buckets * BUCKET


class Repeatable(Protocol):
    """What is made once and run again and again."""

    length: torch.Tensor

    def run(self) -> None:
        """One step. No host value is read and nothing of another shape is made."""

    def state(self) -> dict[str, torch.Tensor]:
        """What a run writes into that outlives it."""


class Setup(NamedTuple):
    """What a step of fixed shape is made with.

    Attributes:
        cache: which the step does not keep alive: a larger one may take its place.
        bucket: positions of the cache that can be seen; at least its length and the nodes of the step.
        choice: the target's rule.
        compiled: the model as `devices.compiling` has it compiled.
    """

    target: Target
    cache: TreeCache
    bucket: int
    choice: Choice
    compiled: bool


class StaticForward:
    """Forwards drafts of up to n nodes over one bucket of the cache, with the same shapes every time.

    Place in the cache and tree are known to the device only. Nodes that a smaller tree leaves over see the committed
    tokens and themselves alone, and nobody sees them.

    Args:
        length: int64 (), the committed tokens; the caller's to fill.
    """

    def __init__(self, setup: Setup, nodes: int, length: torch.Tensor) -> None:
        self.target, cache, self.bucket, _, self.compiled = setup
        self._cache, self.length = weakref.ref(cache), length
        target, bucket, device = self.target, self.bucket, self.target.device
        self.depths = torch.zeros(nodes, dtype=torch.long, device=device)
        self._nodes = torch.arange(nodes, device=device)
        self._columns = torch.arange(bucket, device=device)
        self._word, self._bit = self._nodes // WORD, self._nodes % WORD  # of a node in a row of packed ancestors
        self._attention = _tree_attention(target, nodes, bucket, self.length)
        if self._attention is not None:
            return
        self._blocked = torch.finfo(target.dtype).min
        # (n, n + 2): the tree's own mask between a column that all attend to and one that none does
        self._mask = torch.full((nodes, nodes + 2), self._blocked, dtype=target.dtype, device=device)
        self._mask[:, 0] = 0

    def set_tree(self, tree: Tree) -> None:
        """Forward this tree of m nodes, m <= n, from now on."""
        depths = torch.zeros(len(self._nodes), dtype=torch.long)
        depths[: len(tree)] = torch.tensor(tree.depth_of)
        words = packed(tree.host_ancestors, len(depths))
        self.take(depths.to(self.depths.device), words.to(self.depths.device))

    def take(self, depths: torch.Tensor, words: torch.Tensor) -> None:
        """A tree on the device, which no host value is read for: int64 (n,), and (n, ceil(n / 64)) as `packed` has it.

        Nodes that it leaves over have depth 0 and see themselves.
        """
        self.depths.copy_(depths)
        seen = (words.index_select(1, self._word) >> self._bit & 1).bool()  # (n, n)
        if self._attention is None:
            self._mask[:, 1:-1].fill_(self._blocked).masked_fill_(seen, 0)
        else:
            self._attention.take(words, seen)

    @property
    def positions(self) -> torch.Tensor:
        """Of the token that follows each node: int64 (n,)."""
        return self.depths + self.length + 1

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids (n,) -> logits (n, V). No host value is read and nothing of another shape is made."""
        cache, mask = self._cache(), None
        assert cache is not None
        if self._attention is None:
            # committed columns show node -1, the tree's columns its nodes, those behind them node n
            node = (self._columns - self.length + 1).clamp(0, len(self._nodes) + 1)  # (bucket,)
            mask = self._mask.index_select(1, node)  # (n, bucket)
        return self.target.forward_static(
            cache,
            tokens,
            self.depths + self.length,
            self._nodes + self.length,
            self.bucket,
            mask=mask,
            attention=self._attention,
            compiled=self.compiled,
        )


def _tree_attention(target: Target, nodes: int, bucket: int, length: torch.Tensor) -> TreeAttention | None:
    """What a target's static steps of so many nodes attend by; None where it is sdpa with a mask."""
    if target.switch is None:
        return None
    layer, heads = target.layer, target.model.config.get_text_config().num_attention_heads
    heads //= getattr(target.model, "tp_size", None) or 1  # of processes that share the model each has its part of them
    return TreeAttention(heads, layer.heads, layer.key_dim, nodes, bucket, length, layer.dtype)


class WholeStep:
    """The step of one tree over one bucket of the cache, for a drafter that works on the device.

    `run` reads and writes buffers that stay where they are: `root` (1,), `length` () and what else `commit` has.
    """

    def __init__(self, setup: Setup, drafter: DeviceDrafter, tree: Tree) -> None:
        self.target, self.choice, self._cache = setup.target, setup.choice, weakref.ref(setup.cache)
        # the drafter owns its steps: a cycle would keep its tensors until it is collected
        self.drafter, self.tree = weakref.proxy(drafter), tree
        self.length = torch.zeros((), dtype=torch.long, device=self.target.device)
        self.forward = StaticForward(setup, len(tree), self.length)
        self.forward.set_tree(tree)
        self.commit = Commit(tree, self.length)
        self.root, self._k = self.commit.root, drafter.needs.candidates
        self.tokens = self.choices = torch.zeros(len(tree), dtype=torch.long, device=self.target.device)

    def run(self) -> None:
        commit, cache = self.commit, self._cache()
        assert cache is not None
        tokens = self.drafter.grow(self.root)  # (n,)
        logits = self.forward(tokens)
        places = self.forward.positions if self.choice.draws else None
        choices, candidates, _ = self.choice.ranked(logits, places, self._k)  # (n,), (n, k)
        commit(tokens, choices)
        if not self.tree.is_chain:  # what is accepted of a chain is where it belongs
            cache.move(commit.source, commit.to)
        if candidates is not None:
            self.drafter.learn(tokens, candidates, commit.accepted)
        if self.target.hidden is not None:
            self.drafter.take(self.target.hidden.index_select(0, commit.report[:1]))
        self.tokens, self.choices = tokens, choices  # for whoever looks before the next step overwrites them

    def state(self) -> dict[str, torch.Tensor]:
        written: dict[str, torch.Tensor] = self.drafter.step_state()  # a proxy has no types
        return written


class PaddedForward:
    """A forward over one bucket of the cache, and what the target picks, for drafts of up to n nodes.

    Attributes, of the last run:
        logits, choices: (n, V) and int64 (n,).
        hidden: (n, H), where the target keeps it.
    """

    def __init__(self, setup: Setup, drafter: Drafter, nodes: int) -> None:
        self.target, self.choice, self._n = setup.target, setup.choice, nodes
        self._k, self._bits = drafter.needs.candidates, drafter.needs.bits
        # One buffer goes in: length, tokens, depths, ancestors as `packed` has them. One comes out: see `_reported`.
        self._sizes = [1, nodes, nodes, nodes * -(-nodes // WORD)]
        self._fed = torch.zeros(sum(self._sizes), dtype=torch.long, device=self.target.device)
        length, self._tokens, self._depths, words = torch.split(self._fed, self._sizes)
        self.length, self._words = length[0], words.view(nodes, -1)
        self._host = on_host_like(self._fed)
        self._host_report = on_host_like(self._fed.new_zeros(nodes, 1 + self._k * (1 + self._bits)))
        self.forward = StaticForward(setup, nodes, self.length)
        self._words.copy_(packed(torch.ones(1, 1, dtype=torch.bool), nodes))  # for a run before anything is fed
        self._report = self.logits = self.choices = self._tokens
        self.hidden: torch.Tensor | None = None
        self._candidates: Candidates = None, None

    def feed(self, draft: Draft, length: int) -> None:
        """The draft of the next run, and the committed tokens. Nodes that are left over hold any tokens.

        What the last run was fed was used when its report was read.
        """
        tree, n = draft.tree, len(draft.tree)
        host_length, tokens, depths, words = torch.split(self._host, self._sizes)
        host_length.fill_(length)
        depths.zero_()
        depths[:n] = torch.from_numpy(np.array(tree.depth_of))
        words.view(self._n, -1).copy_(packed(tree.host_ancestors, self._n))
        if draft.tokens.device.type == "cpu":
            tokens[:n] = draft.tokens
        self._fed.copy_(self._host, non_blocking=True)
        if draft.tokens.device.type != "cpu":  # a drafter's that works on the device: they are not waited for
            self._tokens[:n].copy_(draft.tokens)

    def run(self) -> None:
        self.forward.take(self._depths, self._words)
        self.logits = self.forward(self._tokens)
        places = self.forward.positions if self.choice.draws else None
        self.choices, *candidates = self.choice.ranked(self.logits, places, self._k, self._bits)
        self._candidates, self.hidden = (candidates[0], candidates[1]), self.target.hidden
        self._report = self._reported()

    def _reported(self) -> torch.Tensor:
        """Choices, candidates and bits side by side, as far as there are any: int64 (n, 1 + k + k)."""
        candidates, bits = self._candidates
        parts = [self.choices[:, None]]
        if candidates is not None:
            parts.append(candidates)
        if bits is not None:
            parts.append(bits.double().view(torch.long))
        return torch.cat(parts, 1)

    def read(self, n: int) -> tuple[torch.Tensor, Candidates]:
        """Choices (n,) and candidates of the first n nodes, on the host, with one transfer."""
        self._host_report.copy_(self._report, non_blocking=True)
        wait(self._report.device)
        choices, candidates, bits = self._host_report[:n].clone().tensor_split((1, 1 + self._k), 1)
        kept = candidates if self._k else None, bits.view(torch.double).float() if self._bits else None
        return choices[:, 0], kept

    def on_device(self, n: int) -> tuple[torch.Tensor, Candidates]:
        """The same on the device, without a transfer."""
        candidates, bits = self._candidates
        kept = None if candidates is None else candidates[:n], None if bits is None else bits[:n]
        return self.choices[:n], kept

    def state(self) -> dict[str, torch.Tensor]:
        return {}
