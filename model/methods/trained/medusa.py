"""Medusa-1: heads on the target's last hidden state (arXiv 2401.10774).

The checkpoints' layout and the tree are github.com/FasterDecoding/Medusa's. The paper's typical
acceptance, which changes the output, is not offered.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...engine import LAST, DeviceDrafter, DeviceSession, Needs, Target, Verification
from .heads import hidden_size, load_weights, published_tree, read_head

WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")  # ours, public


class ResBlock(nn.Module):
    """x + SiLU(W x + b); x of another `width` is projected before the sum (Hydra's first block)."""

    def __init__(self, hidden: int, width: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(width or hidden, hidden)
        self.res_connection = nn.Linear(width, hidden) if width else nn.Identity()
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + F.silu(self.linear(x))  # type: ignore[no-any-return]


class MedusaHeads(nn.ModuleList):
    """Head i: residual blocks, then a projection to the vocabulary, or the target's (shared)."""

    def __init__(
        self, heads: int, layers: int, hidden: int, vocab_size: int, *, shared: bool
    ) -> None:
        super().__init__()
        for _ in range(heads):
            modules: list[nn.Module] = [ResBlock(hidden) for _ in range(layers)]
            if not shared:
                modules.append(nn.Linear(hidden, vocab_size, bias=False))
            self.append(nn.Sequential(*modules))
        self.shared = shared

    def logits(self, i: int, hidden: Tensor, lm_head: nn.Module) -> Tensor:
        x: Tensor = self[i](hidden)
        return lm_head(x) if self.shared else x


def load_heads(path: str, target: Target) -> MedusaHeads:
    """Load the heads from a folder, as many as its weights have: public configurations err."""
    files = read_head(path, "medusa", target, WEIGHTS, {"hidden_act": "silu"})
    shared = bool(files.config.get("shared_lm_head", False))
    head, layer = files.largest(r"(\d+)\.(\d+)\.")
    with torch.device("meta"):
        heads = MedusaHeads(
            head + 1, layer + shared, hidden_size(target), target.logits_size, shared=shared
        )
    return load_weights(heads, files, target)


class Medusa(DeviceDrafter):
    """Drafts from the state that chose the root: rank r at depth d is head d's r-th token."""

    needs = Needs(hidden=(LAST,))

    def __init__(self, target: Target, *, heads_path: str, tree_path: str | None = None) -> None:
        super().__init__(target.device, target.vocab_size)
        heads = load_heads(heads_path, target)
        tree = published_tree("medusa-63", tree_path, len(heads))
        target.prepare(heads)
        self.heads = heads
        self.lm_head = target.model.get_output_embeddings()
        self.tree = tree.on(target.device)
        self.max_nodes = len(tree)
        self._candidates = tree.max_rank + 1
        # index of each node's token among the flattened candidates (depths, ranks), without the
        # root: (n - 1,)
        self._pick = ((self.tree.depths - 1) * self._candidates + self.tree.ranks)[1:]
        # (1, H), the state that chose the root, of the sequence whose step it is
        self.hidden = torch.zeros(1, hidden_size(target), dtype=target.dtype, device=target.device)

    def session(self) -> MedusaSession:
        return MedusaSession(self)

    def set_hidden(self, hidden: Tensor) -> None:
        self.hidden.copy_(hidden)

    def grow(self, root: Tensor) -> Tensor:
        logits = torch.cat(  # (depths, V)
            [self.heads.logits(i, self.hidden, self.lm_head) for i in range(self.tree.max_depth)]
        )
        candidates = logits.topk(self._candidates, dim=-1).indices  # (depths, ranks)
        return torch.cat((root, candidates.view(-1).index_select(0, self._pick)))

    def step_state(self) -> dict[str, Tensor]:
        return {"hidden": self.hidden}


class MedusaSession(DeviceSession):
    drafter: Medusa

    def __init__(self, drafter: Medusa) -> None:
        super().__init__(drafter)
        self._hidden = torch.zeros_like(drafter.hidden)

    def choose(self) -> None:
        self.drafter.hidden.copy_(self._hidden)

    def settle(self, verification: Verification) -> None:
        self._hidden.copy_(self.drafter.hidden)
