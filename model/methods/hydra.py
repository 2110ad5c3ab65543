"""Hydra: Medusa's heads that also read the drafted path (arXiv 2402.05109).

They come after a layer over the context.

Source: github.com/zankner/Hydra, for its published heads (`prefix-mlp`, grounded) and their tree,
which is Medusa's.
Verification is the engine's; typical acceptance, which changes sampled output, is not offered.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from ..engine import Target
from ..errors import UserError
from ..structures.head_drafter import StaticTree, StaticTreeSession
from ..structures.heads import (
    LAYER_KEYS,
    Head,
    filled,
    flat,
    head_config,
    hidden_size,
    open_head,
    read_weights,
    run_layer,
    template,
)
from .medusa import ResBlock

WEIGHTS = "hydra_lm_head.safetensors"
PUBLIC_WEIGHTS = "hydra_lm_head.pt"
# the latter is the target's
UNUSED = "prefix_embeding_layer.embed_tokens.weight"
EMBEDDING = "input_embed_fn.weight"
LATER_BLOCK = re.compile(r"^(hydra_mlp\.\d+)\.(?!1\.)\d+\.")
SUPPORTED = {"hydra_head_arch": "prefix-mlp", "grounded_heads": True, "hidden_state_offset": 0}


class HydraHeads(Head):
    """Heads over the layer's output, the root and the drafted path.

    The output is that at the last token before the root.

    The state dict is the public layout. As there, all blocks after a head's first one are a single
    module.
    """

    def __init__(
        self, config: Any, embedding: torch.Tensor, *, heads: int, blocks: int, vocab_size: int
    ) -> None:
        super().__init__(config, embedding)
        hidden = config.hidden_size
        dropout = nn.Identity()
        norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        layers = nn.ModuleList([LlamaDecoderLayer(config, layer_idx=0)])
        self.prefix_embeding_layer = nn.ModuleDict({"layers": layers, "norm": norm})
        self.hydra_mlp = nn.ModuleList()
        self.hydra_lm_head = nn.ModuleList()
        for i in range(heads):
            others = [dropout, ResBlock(hidden)] * (blocks - 1)
            self.hydra_mlp.append(
                nn.Sequential(dropout, ResBlock(hidden, (i + 2) * hidden), *others)
            )
            self.hydra_lm_head.append(nn.Sequential(dropout, nn.Linear(hidden, vocab_size)))

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, *attention: Any
    ) -> torch.Tensor:
        prefix: Any = self.prefix_embeding_layer
        return prefix["norm"](run_layer(prefix["layers"][0], features, *attention))  # type: ignore[no-any-return]

    def logits(self, i: int, inputs: torch.Tensor) -> torch.Tensor:
        """Return head i's logits (w, V) from (w, (i + 2) H)."""
        return self.hydra_lm_head[i](self.hydra_mlp[i](inputs))  # type: ignore[no-any-return]


def load_heads(path: str, target: Target) -> HydraHeads:
    """Load the heads from a folder.

    It holds config.json and hydra_lm_head.safetensors, or hydra_lm_head.pt as published.

    The layer has the target's own configuration; the numbers of heads and blocks are read from the
    weights. Raises UserError if the heads are missing, corrupt, of another kind, or made for
    another model.
    """
    of_target = flat(Path(target.name), target.model.config.get_text_config().to_dict())
    of_layer = {key: value for key, value in of_target.items() if LAYER_KEYS.fullmatch(str(key))}
    folder, _ = open_head(path, "hydra", target, of_layer | SUPPORTED)
    if of_target.get("hidden_size") != hidden_size(target):
        raise UserError(
            f"{target.name}: has no hidden_size in its config; Hydra's heads are of models like"
            " LLaMA"
        )

    file, state = read_weights(folder, WEIGHTS, PUBLIC_WEIGHTS)
    embedding = target.model.get_input_embeddings().weight.detach()
    given = state.pop(EMBEDDING, embedding)
    _ = state.pop(UNUSED, None)
    if given.shape == embedding.shape:
        # a sample of the rows
        given, own = (matrix[::16].float().cpu() for matrix in (given, embedding))
        if (given - own).norm() > 0.02 * own.norm():  # 16-bit values are at most 0.4 % off
            raise UserError(
                f"{file}: {EMBEDDING} is not the embedding of {target.name}; heads are of one model"
            )

    for name, tensor in state.items():
        shared = LATER_BLOCK.sub(r"\1.3.", name)
        repeated = state.get(shared, tensor)
        if repeated is not tensor and not torch.equal(repeated, tensor):
            raise UserError(
                f"{file}: {name} and {shared} differ; a head's later blocks are one block, repeated"
            )

    try:
        numbers = [name.split(".")[1:3] for name in state if name.startswith("hydra_mlp.")]
        heads = 1 + max(int(head) for head, _ in numbers)
        blocks = (1 + max(int(block) for _, block in numbers)) // 2
    except ValueError:
        raise UserError(
            f"{file}: keys such as {sorted(state)[:2]} are not Hydra's"
            " (hydra_mlp.0.1.linear.weight)"
        ) from None

    config = head_config(of_target | {"num_hidden_layers": 1})
    made = HydraHeads(config, embedding, heads=heads, blocks=blocks, vocab_size=target.logits_size)
    return filled(made, file, state, target)


class Hydra(StaticTree):
    """Drafts a tree of fixed shape, a depth by each head.

    A node's children are the best tokens after its path.

    Nothing is kept between prompts.

    Args:
        hydra_path: folder of the heads, see `load_heads`.
        tree_path: YAML of rank paths; default: the published 63 nodes, cut to the depth that there
            are heads for.
    """

    head: HydraHeads

    def __init__(self, target: Target, *, hydra_path: str, tree_path: str | None = None) -> None:
        heads = load_heads(hydra_path, target)
        tree = template("medusa-63", tree_path, target.logits_size, heads=len(heads.hydra_mlp))
        super().__init__(target, heads, tree)

    def session(self) -> HydraSession:
        return HydraSession(self)


class HydraSession(StaticTreeSession):
    drafter: Hydra

    def after(
        self, depth: int, state: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads = self.drafter.head
        inputs = torch.cat((state, heads.embed(tokens)), dim=-1)  # (w, (depth + 2) H)
        return inputs, heads.logits(depth, inputs)
