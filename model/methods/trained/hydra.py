"""Hydra: Medusa's heads that also read the drafted path (arXiv 2402.05109).

The heads are as github.com/zankner/Hydra publishes them (`prefix-mlp`, grounded). Typical
acceptance, which changes sampled output, is not offered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from ...engine import Target
from .heads import (
    Head,
    HeadSession,
    StaticTree,
    flat,
    layer_config,
    load_weights,
    published_tree,
    read_head,
    run_layer,
)
from .medusa import ResBlock

WEIGHTS = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")  # ours, public
# not read by the public code, and the target's
UNUSED = ("prefix_embeding_layer.embed_tokens.weight", "input_embed_fn.weight")
SUPPORTED = {"hydra_head_arch": "prefix-mlp", "grounded_heads": True, "hidden_state_offset": 0}


class HydraHeads(Head):
    """Heads over the layer's output at the last token before the root, the root and the path."""

    def __init__(
        self, config: Any, embedding: Tensor, *, heads: int, blocks: int, vocab_size: int
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

    def forward(self, features: Tensor, tokens: Tensor, *attention: Any) -> Tensor:
        prefix: Any = self.prefix_embeding_layer
        return prefix["norm"](run_layer(prefix["layers"][0], features, *attention))  # type: ignore[no-any-return]

    def logits(self, i: int, inputs: Tensor) -> Tensor:
        return self.hydra_lm_head[i](self.hydra_mlp[i](inputs))  # type: ignore[no-any-return]


def load_heads(path: str, target: Target) -> HydraHeads:
    files = read_head(path, "hydra", target, WEIGHTS, SUPPORTED)
    for name in UNUSED:
        files.state.pop(name, None)
    head, block = files.largest(r"hydra_mlp\.(\d+)\.(\d+)\.")

    config = layer_config(flat(target.model.config.get_text_config().to_dict()))
    embedding = target.model.get_input_embeddings().weight.detach()
    with torch.device("meta"):
        heads = HydraHeads(
            config,
            embedding,
            heads=head + 1,
            blocks=(block + 1) // 2,
            vocab_size=target.logits_size,
        )
    return load_weights(heads, files, target)


class Hydra(StaticTree):
    """Drafts a tree of fixed shape; default: the published 63 nodes, cut to the heads' depth."""

    head: HydraHeads

    def __init__(self, target: Target, *, hydra_path: str, tree_path: str | None = None) -> None:
        heads = load_heads(hydra_path, target)
        tree = published_tree("medusa-63", tree_path, len(heads.hydra_mlp))
        super().__init__(target, heads, tree)

    def after(
        self, session: HeadSession, depth: int, state: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs = torch.cat((state, self.head.embed(tokens)), dim=-1)  # (w, (depth + 2) H)
        return inputs, self.head.logits(depth, inputs)
