"""Learned heads: their files, and EAGLE's auto-regressive head (arXiv 2401.15077, 4.1).

A head is a folder with config.json and weights, in the public layouts or as tools.heads writes. EAGLE's is one LLaMA
decoder layer that continues the target's features. The feature of a position is the target's last hidden state there.
From the feature f_t and the token t + 1 the head predicts f_(t+1), from which the target's own head gives the token
t + 2. EAGLE-2 (2406.16858) uses the same head. Checkpoint layout: github.com/SafeAILab/EAGLE.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from ..engine import Target, Tree
from ..engine.cache import LayerShape, TreeCache
from ..engine.tree import read_tree
from ..errors import UserError, one_line
from ..files import located

_TREES = Path(__file__).parent / "trees"  # as published with the heads


def open_head(path: str, kind: str, target: Target) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a head, medusa or eagle, and its config.json.

    Raises UserError if there is none, with the command that trains one, or it is of another hidden size or vocabulary.
    """
    folder = located(path)
    if not folder.is_dir():
        raise UserError(
            f"no {kind} head in {path}: train one with `python -m tools.heads {kind} "
            f"--model MODEL --text FILE --output {shlex.quote(path)}` "
            "(--model data/embedded --text embedded for the shipped model)"
        )
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        sizes = {"hidden_size": hidden_size(target), "vocab_size": target.logits_size}
        wrong = {key: config[key] for key, size in sizes.items() if config.get(key, size) != size}
    except (OSError, ValueError, AttributeError) as error:
        reason = "missing" if isinstance(error, FileNotFoundError) else f"is not a readable JSON object ({error})"
        raise UserError(f"{file}: {reason}; a head is a folder with config.json and weights") from None
    for key, size in wrong.items():
        raise UserError(f"{folder}: made for a {key} of {size}, {target.name} has {sizes[key]}")
    return folder, config


def read_weights(folder: Path, *names: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """The first of the named files that is there, on the CPU; a pickle is read as weights only, so it runs no code.

    Raises UserError if none is there or it is more or less than a file of weights.
    """
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{folder}: has no weights ({' or '.join(names)})")
    try:
        pickled = file.suffix != ".safetensors"
        state = torch.load(file, map_location="cpu", weights_only=True) if pickled else load_file(file)
    except Exception as error:  # whatever torch, pickle and safetensors raise on a damaged file
        reason = one_line(error)[:160] or type(error).__name__
        raise UserError(f"{file}: corrupt or cut short, or a pickle of more than weights ({reason})") from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"{file}: must hold a dictionary of tensors and nothing else")
    return file, state


def load_weights(module: nn.Module, file: Path, state: dict[str, torch.Tensor]) -> None:
    """Load what `read_weights` read. Raises UserError if a tensor is missing, unknown or of another shape."""
    shapes, given = ({name: list(t.shape) for name, t in s.items()} for s in (module.state_dict(), state))
    if wrong := [name for name in shapes | given if shapes.get(name) != given.get(name)]:
        name = wrong[0]
        raise UserError(
            f"{file}: cut short, or not of this kind or model: {name} is {given.get(name, 'missing')} and should be "
            f"{shapes.get(name, 'missing')}; {len(wrong)} of {len(shapes)} tensors differ"
        )
    module.load_state_dict(state)


def hidden_size(target: Target) -> int:
    """H, the width of what enters the target's own head."""
    return int(target.model.get_output_embeddings().weight.shape[1])


def template(name: str, path: str | None, vocab_size: int) -> Tree:
    """The tree of a YAML file, or the published one of that name. Raises UserError if it has more ranks than tokens."""
    tree = read_tree(_TREES / f"{name}.yaml" if path is None else path)
    if tree.max_rank >= vocab_size:
        raise UserError(f"{name}: the tree's rank {tree.max_rank} is beyond the {vocab_size} tokens")
    return tree


WEIGHTS = "model.safetensors"
PUBLIC_WEIGHTS = "pytorch_model.bin"
EMBEDDING = "embed_tokens.weight"
_ROPE = ("default", "linear", "llama3")  # angles that depend on the position alone


class EagleHead(nn.Module):
    """fc over (embedding of the next token, feature), then one decoder layer without its input norm, as published.

    The state dict is the public layout (`fc.weight`, `fc.bias`, `layers.0.*`) but for the frozen embedding, (V, H).
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
        """Predicted features (B, n, H), each of the position after its own.

        Args:
            features: (B, n, H), of n positions.
            tokens: int64 (B, n), the token after each.
            angles: of the n positions, see `angles`; of one position where all share it.
            mask: additive (1, 1, n, past + n), or None where each attends to all before it and nothing is cached.
            cache: of the keys and values before these, which are added; it can take one sequence.
        """
        embedded = F.embedding(tokens, self.embedding).to(features.dtype)  # rows may be held in 16 bits
        x = self.fc(torch.cat((embedded, features), dim=-1))
        out = self.layers[0](x, mask, None, cache, position_embeddings=angles)  # versions name the cache otherwise
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    def angles(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of rotary positions 0 to count - 1: (1, count, head_dim) each."""
        weight = self.fc.weight
        cos, sin = self.rotary(weight, torch.arange(count, device=weight.device)[None])
        return cos, sin

    def new_cache(self, capacity: int) -> TreeCache:
        c, weight = self.config, self.fc.weight
        shape = LayerShape(c.num_key_value_heads, c.head_dim, c.head_dim, weight.dtype, weight.device)
        return TreeCache([shape], capacity)


def head_config(values: dict[str, Any]) -> Any:
    """The configuration of a head from a LLaMA-like config.json. Raises UserError where no head can be made of it."""
    if values.get("num_hidden_layers", 1) != 1:
        raise UserError(f"eagle: num_hidden_layers={values['num_hidden_layers']}; heads of one layer are supported")
    fields = {*LlamaConfig().to_dict(), "rope_theta", "rope_scaling"} - {"torch_dtype", "dtype"}
    of_layer = {name: value for name, value in values.items() if name in fields} | {"num_hidden_layers": 1}
    try:
        config = LlamaConfig(**of_layer, attn_implementation="sdpa")
    except Exception as error:  # whatever transformers' own checks raise, which differs between its versions
        raise UserError(f"eagle: config.json describes no LLaMA layer ({one_line(error)[:160]})") from None
    kind = config.rope_parameters["rope_type"]
    if kind not in _ROPE:
        raise UserError(f"eagle: rope_type={kind}: there is {', '.join(_ROPE)}")
    return config


def load_head(path: str, target: Target) -> EagleHead:
    """A head from a folder: config.json and model.safetensors (ours, or public) or pytorch_model.bin (public).

    Without an embedding in the file, or with an equal one, the target's own is used. Raises UserError if it is missing,
    corrupt, of another kind, or made for another model.
    """
    folder, values = open_head(path, "eagle", target)
    file, state = read_weights(folder, WEIGHTS, PUBLIC_WEIGHTS)
    state = {name: tensor for name, tensor in state.items() if not name.endswith("rotary_emb.inv_freq")}
    target_embedding: torch.Tensor = target.model.get_input_embeddings().weight.detach()
    embedding = state.pop(EMBEDDING, target_embedding)
    if embedding is not target_embedding:
        if embedding.shape != target_embedding.shape:
            raise UserError(
                f"{file}: {EMBEDDING} is {list(embedding.shape)}, the model's {list(target_embedding.shape)}"
            )
        embedding = embedding.to(target.device, target.dtype)
        embedding = target_embedding if torch.equal(embedding, target_embedding.to(target.dtype)) else embedding
    head = EagleHead(head_config(values), target_embedding, bias="fc.bias" in state)
    load_weights(head, file, state)
    head = head.to(target.device, target.dtype)
    head.embedding = embedding
    return head.eval().requires_grad_(False)
