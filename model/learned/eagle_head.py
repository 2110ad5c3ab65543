"""EAGLE's auto-regressive head: one LLaMA decoder layer that continues the target's features (arXiv 2401.15077, 4.1).

The feature of a position is the target's last hidden state there. From the feature f_t and the token t + 1 the head
predicts f_(t+1), from which the target's own head gives the token t + 2. EAGLE-2 (2406.16858) uses the same head.
Checkpoint layout: github.com/SafeAILab/EAGLE.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from ..decoding import Target
from ..decoding.cache import LayerShape, TreeCache
from ..errors import UserError
from .head_files import check_shapes, check_sizes, hidden_size, locate, read_config, read_weights

WEIGHTS = "model.safetensors"
PUBLIC_WEIGHTS = "pytorch_model.bin"
EMBEDDING = "embed_tokens.weight"
_ROPE = ("default", "linear", "llama3")  # angles that depend on the position alone


class EagleHead(nn.Module):
    """fc over (embedding of the next token, feature), then one decoder layer without its input norm, as published.

    The state dict is the public layout but for `embed_tokens.weight`, which is given: `fc.weight`, `fc.bias`,
    `layers.0.*`.

    Args:
        config: of LLaMA kind, one layer.
        embedding: (V, H), of the tokens; frozen.
        bias: whether fc has one.
    """

    embedding: torch.Tensor

    def __init__(self, config: Any, embedding: torch.Tensor, *, bias: bool = True) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        layer = LlamaDecoderLayer(config, layer_idx=0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("embedding", embedding, persistent=False)

    def forward(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None = None,
        cache: TreeCache | None = None,
    ) -> torch.Tensor:
        """Predicted features (B, n, H), each of the position behind its own.

        Args:
            features: (B, n, H), of n positions.
            tokens: int64 (B, n), the token behind each.
            angles: of the n positions, see `angles`; of one position where all share it.
            mask: additive (1, 1, n, past + n), or None where each attends to all before it and nothing is cached.
            cache: of the keys and values before these, which are added; it can take one sequence.
        """
        x = self.fc(torch.cat((F.embedding(tokens, self.embedding), features), dim=-1))
        out = self.layers[0](
            hidden_states=x,
            attention_mask=mask,
            position_embeddings=angles,
            past_key_values=cache,
        )
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    def angles(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of rotary positions 0 to count - 1: (1, count, head_dim) each."""
        weight = self.fc.weight
        cos, sin = self.rotary(weight, torch.arange(count, device=weight.device)[None])
        return cos, sin

    def new_cache(self, capacity: int) -> TreeCache:
        """Room for so many positions."""
        c, weight = self.config, self.fc.weight
        shape = LayerShape(c.num_key_value_heads, c.head_dim, c.head_dim, weight.dtype, weight.device)
        return TreeCache([shape], capacity)


def head_config(values: dict[str, Any]) -> Any:
    """The configuration of a head from a LLaMA-like config.json. Raises UserError where no head can be made of it."""
    if values.get("num_hidden_layers", 1) != 1:
        raise UserError(f"eagle: num_hidden_layers={values['num_hidden_layers']}; heads of one layer are supported")
    fields = set(LlamaConfig().to_dict()) | {"rope_theta", "rope_scaling"}
    try:
        config = LlamaConfig(
            **{k: v for k, v in values.items() if k in fields and k not in ("torch_dtype", "dtype")},
            attn_implementation="sdpa",
        )
        config.num_hidden_layers = 1
    except Exception as error:  # whatever transformers' own checks raise, which differs between its versions
        raise UserError(f"eagle: config.json describes no LLaMA layer ({' '.join(str(error).split())[:160]})") from None
    kind = config.rope_parameters["rope_type"]
    if kind not in _ROPE:
        raise UserError(f"eagle: rope_type={kind}: there is {', '.join(_ROPE)}")
    return config


def load_head(path: str, target: Target) -> EagleHead:
    """A head from a folder: config.json and model.safetensors (ours, or public) or pytorch_model.bin (public).

    Without an embedding in the file, or with an equal one, the target's own is used.

    Raises:
        UserError: missing, corrupt, cut short, of another kind, or made for another model.
    """
    folder = locate(path, "eagle")
    values = read_config(folder)
    check_sizes(folder, values, target)
    file, state = read_weights(folder, WEIGHTS, PUBLIC_WEIGHTS)
    state = {name: tensor for name, tensor in state.items() if not name.endswith("rotary_emb.inv_freq")}
    target_embedding: torch.Tensor = target.model.get_input_embeddings().weight.detach()
    embedding = state.pop(EMBEDDING, target_embedding)
    if embedding is not target_embedding:
        check_shapes(file, {EMBEDDING: embedding}, {EMBEDDING: tuple(target_embedding.shape)}, target.name)
        embedding = embedding.to(target_embedding.device, target_embedding.dtype)
        embedding = target_embedding if torch.equal(embedding, target_embedding) else embedding
    head = EagleHead(head_config(values), target_embedding, bias="fc.bias" in state)
    if head.config.hidden_size != hidden_size(target):
        raise UserError(f"{folder}: hidden_size {head.config.hidden_size}, {target.name} has {hidden_size(target)}")
    check_shapes(file, state, {name: tuple(p.shape) for name, p in head.state_dict().items()}, "its config.json")
    head.load_state_dict(state)
    head = head.to(target.device, target.dtype)
    head.embedding = embedding
    return head.eval().requires_grad_(False)
