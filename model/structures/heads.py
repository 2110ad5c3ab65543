"""Learned heads: their files, and EAGLE's auto-regressive heads (arXiv 2401.15077, 4.1; EAGLE-3: 2503.01840).

A head is a folder with config.json and weights, in the public layouts or as tools.heads writes. EAGLE's is one LLaMA
decoder layer that continues the target's features. The feature of a position is the target's last hidden state there.
From the feature f_t and the token t + 1 the head predicts f_(t+1), from which the target's own head gives the token
t + 2. EAGLE-2 (2406.16858) uses the same head. EAGLE-3's features are three of the target's hidden states, projected,
and at drafted nodes the head's own outputs. It has an output matrix of its own, over part of the vocabulary.
Checkpoint layout: github.com/SafeAILab/EAGLE.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from ..engine import LAST, Target, Tree
from ..engine.cache import LayerShape, TreeCache
from ..engine.layers import decoder_layers
from ..engine.tree import read_tree
from ..errors import UserError, one_line
from ..files import located
from . import check_whole

TRAINED, UNTRAINED = ("medusa", "eagle"), "no command here trains one; configs/companions names public ones"
_TREES = Path(__file__).parent / "trees"  # as published with the heads


def open_head(path: str, kind: str, target: Target) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a head of this kind, and its config.json.

    Raises UserError if there is none, with the command that trains one, or it is of another hidden size or vocabulary.
    """
    folder = located(path)
    if not folder.is_dir():
        trained = (
            f"train one with `python -m tools.heads {kind} --model MODEL --text FILE --output {shlex.quote(path)}` "
            "(--model data/embedded --text embedded for the shipped model)"
        )
        raise UserError(f"no {kind} head in {path}: {trained if kind in TRAINED else UNTRAINED}")
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        width = "target_hidden_size" if config.get("target_hidden_size") else "hidden_size"
        sizes = {width: hidden_size(target), "vocab_size": target.logits_size}
        wrong = {key: config[key] for key, size in sizes.items() if config.get(key, size) != size}
    except (OSError, ValueError, AttributeError) as error:
        reason = "missing" if isinstance(error, FileNotFoundError) else f"is not a readable JSON object ({error})"
        raise UserError(f"{file}: {reason}; a head is a folder with config.json and weights") from None
    for key, size in wrong.items():
        raise UserError(f"{folder}: made for a {key} of {size}, {target.name} has {sizes[key]}")
    return folder, config


def read_weights(folder: Path, *names: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """Read the first of the named files that exists, onto the CPU; a pickle is read as weights only and runs no code.

    Raises UserError if none exists, or the file is damaged or holds anything but weights.
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
    """Return H, the input width of the target's own head."""
    return int(target.model.get_output_embeddings().weight.shape[1])


def template(name: str, path: str | None, vocab_size: int, *, heads: int | None = None) -> Tree:
    """Return the tree of a YAML file or, without a path, the published one of this name, cut to a depth of `heads`.

    Raises UserError if the tree has more ranks than there are tokens, or a file's tree is deeper than `heads`.
    """
    tree = read_tree(_TREES / f"{name}.yaml" if path is None else path)
    if heads is not None and tree.max_depth > heads:
        if path is not None:
            raise UserError(f"{path}: the tree is {tree.max_depth} deep, and there are {heads} heads")
        tree = Tree.from_rank_paths(path for path in tree.rank_paths[1:] if len(path) <= heads)
    if tree.max_rank >= vocab_size:
        raise UserError(f"{name}: the tree's rank {tree.max_rank} is beyond the {vocab_size} tokens")
    return tree


WEIGHTS = "model.safetensors"
PUBLIC_WEIGHTS = "pytorch_model.bin"
EMBEDDING = "embed_tokens.weight"
_ROPE = ("default", "linear", "llama3")  # angles that depend on the position alone
_ANGLES = "rotary_emb.inv_freq"  # in old files; ignored, as config.json defines the angles
AnyHead = TypeVar("AnyHead", bound="Head")


class Head(nn.Module):
    """A decoder layer over hidden states of the target, with keys and values of its own; subclasses say how it is run.

    Args:
        config: of the layer, see `head_config`.
        embedding: (V, H) of the tokens, frozen.

    Attributes:
        reads: numbers of the target's hidden states that it reads (`engine.target.LAST`).
    """

    embedding: torch.Tensor
    reads: tuple[int, ...] = (LAST,)

    def __init__(self, config: Any, embedding: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("embedding", embedding, persistent=False)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the features (..., H) of the target's hidden states (..., w H)."""
        return hidden

    def forward(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None = None,
        cache: TreeCache | None = None,
    ) -> torch.Tensor:
        """Return the predicted features (B, n, H), each for the position after its own.

        Args:
            features: (B, n, H), of n positions.
            tokens: int64 (B, n), the token after each.
            angles: of the n positions, see `angles`; or of one position that all share.
            mask: additive (1, 1, n, past + n), or None where each attends to all before it and nothing is cached.
            cache: keys and values of earlier positions, to which these are added; it can hold one sequence.
        """
        return self._run(features, tokens, angles, mask, cache)

    def _run(self, features: torch.Tensor, tokens: torch.Tensor, *attention: Any) -> torch.Tensor:
        raise NotImplementedError

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 (...) -> (..., H), in the head's type: rows may be held in 16 bits."""
        return F.embedding(tokens, self.embedding).to(self._weight.dtype)

    def angles(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of rotary positions 0 to count - 1: (1, count, head_dim) each."""
        weight = self._weight
        rotary = LlamaRotaryEmbedding(self.config).to(weight.device)  # outside the head, as casting it would round this
        cos, sin = rotary(weight, torch.arange(count, device=weight.device)[None])
        return cos, sin

    def new_cache(self, capacity: int) -> TreeCache:
        c, weight = self.config, self._weight
        shape = LayerShape(c.num_key_value_heads, c.head_dim, c.head_dim, weight.dtype, weight.device)
        return TreeCache([shape], capacity)

    @property
    def _weight(self) -> torch.Tensor:
        return next(self.parameters())


def run_layer(layer: nn.Module, x: torch.Tensor, angles: Any, mask: Any, cache: Any) -> torch.Tensor:
    """Run a LLaMA layer over (B, n, H); the rest is as `Head.forward` takes it."""
    out = layer(x, mask, None, cache, position_embeddings=angles)  # the cache's name depends on the version
    return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]


class EagleHead(Head):
    """fc over (embedding of the next token, feature), then one decoder layer without its input norm, as published.

    The state dict is the public layout (`fc.weight`, `fc.bias`, `layers.0.*`) but for the frozen embedding, (V, H).
    """

    def __init__(self, config: Any, embedding: torch.Tensor) -> None:
        super().__init__(config, embedding)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        layer = LlamaDecoderLayer(config, layer_idx=0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])

    def _run(self, features: torch.Tensor, tokens: torch.Tensor, *attention: Any) -> torch.Tensor:
        return run_layer(self.layers[0], self.fc(torch.cat((self.embed(tokens), features), dim=-1)), *attention)


class Eagle3Head(Head):
    """A decoder layer whose attention reads (embedding of the next token, feature), each after a norm of its own.

    The state dict is the public layout but for the embedding and the draft vocabulary.

    Args:
        reads: see `Head`.
        width: of these states, concatenated.
        rows: W, tokens of the draft vocabulary.

    Attributes:
        ids: int64 (W,), the target's ids of the draft vocabulary; None: the vocabulary is the target's.
    """

    ids: torch.Tensor | None = None

    def __init__(self, config: Any, embedding: torch.Tensor, *, reads: tuple[int, ...], width: int, rows: int) -> None:
        super().__init__(config, embedding)
        hidden, eps, self.reads = config.hidden_size, config.rms_norm_eps, reads
        self.fc = nn.Linear(width, hidden, bias=False)
        self.midlayer = layer = LlamaDecoderLayer(config, layer_idx=0)
        layer.hidden_norm = LlamaRMSNorm(hidden, eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            size = getattr(layer.self_attn, name).out_features
            setattr(layer.self_attn, name, nn.Linear(2 * hidden, size, bias=False))
        self.norm, self.lm_head = LlamaRMSNorm(hidden, eps), nn.Linear(hidden, rows, bias=False)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc(hidden)  # type: ignore[no-any-return]

    def _run(self, features: torch.Tensor, tokens: torch.Tensor, *attention: Any) -> torch.Tensor:
        layer = self.midlayer
        x = torch.cat((layer.input_layernorm(self.embed(tokens)), layer.hidden_norm(features)), dim=-1)
        out = features + layer.self_attn(x, *attention)[0]
        return out + layer.mlp(layer.post_attention_layernorm(out))  # type: ignore[no-any-return]


def head_config(values: dict[str, Any]) -> Any:
    """Return the configuration of a head from a LLaMA-like config.json. Raises UserError if it describes none."""
    if values.get("num_hidden_layers", 1) != 1:
        raise UserError(f"head: num_hidden_layers={values['num_hidden_layers']}; heads of one layer are supported")
    fields = {*LlamaConfig().to_dict(), "rope_theta", "rope_scaling"} - {"torch_dtype", "dtype"}
    of_layer = {name: value for name, value in values.items() if name in fields} | {"num_hidden_layers": 1}
    try:
        config = LlamaConfig(**of_layer, attn_implementation="sdpa")
    except Exception as error:  # whatever transformers' own checks raise, which differs between its versions
        raise UserError(f"head: config.json describes no LLaMA layer ({one_line(error)[:160]})") from None
    kind = config.rope_parameters["rope_type"]
    if kind not in _ROPE:
        raise UserError(f"head: rope_type={kind}: there is {', '.join(_ROPE)}")
    return config


def load_head(path: str, target: Target) -> EagleHead:
    """Load EAGLE's head from a folder: config.json and model.safetensors (ours, public) or pytorch_model.bin (public).

    Without an embedding in the file, or with an equal one, the target's own is used. Raises UserError if it is missing,
    corrupt, of another kind, or made for another model.
    """
    folder, values = open_head(path, "eagle", target)
    if "draft_vocab_size" in values:
        raise UserError(f"{folder}: config.json has a draft_vocab_size, as EAGLE-3's heads have: use method=eagle3")
    file, state = read_weights(folder, WEIGHTS, PUBLIC_WEIGHTS)
    config = head_config(values)
    head = EagleHead(config, _embedding(file, state, config, target))
    for name, module in head.named_modules():
        if isinstance(module, nn.Linear):  # has a bias if the file has one: of fc, and of q, k and v for Qwen2
            bias = nn.Parameter(torch.zeros(module.out_features)) if f"{name}.bias" in state else None
            module.register_parameter("bias", bias)
    return filled(head, file, state, target)


def load_eagle3_head(path: str, target: Target) -> Eagle3Head:
    """Load EAGLE-3's head from a folder, as `load_head` loads EAGLE's."""
    folder, values = open_head(path, "eagle3", target)
    if "draft_vocab_size" not in values:
        raise UserError(f"{folder}: config.json has no draft_vocab_size, as EAGLE-3's heads have: use method=eagle2")
    check_whole(f"{folder / 'config.json'}", 1, target.logits_size, draft_vocab_size=values["draft_vocab_size"])
    file, state = read_weights(folder, WEIGHTS, PUBLIC_WEIGHTS)
    config, rows, reads = head_config(values), values["draft_vocab_size"], layers_read(values, folder, target)
    ids, embedding = _draft_vocabulary(file, state, rows, target), _embedding(file, state, config, target)
    head = Eagle3Head(config, embedding, reads=reads, width=len(reads) * hidden_size(target), rows=rows)
    head.ids = ids
    return filled(head, file, state, target)


def layers_read(values: dict[str, Any], folder: Path, target: Target) -> tuple[int, ...]:
    """Return the hidden states that an EAGLE-3 head reads, by number: a layer's output enters the next layer.

    config.json names layers from 0 where SpecForge or NVIDIA wrote it; else they are 1, L // 2 - 1 and L - 4 of L.
    Raises UserError if the target does not have them.
    """
    count = len(decoder_layers(target.model, target.name))
    named = values.get("eagle_config") or {}
    named = named.get("eagle_aux_hidden_state_layer_ids") if isinstance(named, dict) else named
    outputs = named or [1, count // 2 - 1, count - 4]
    numbers = sorted({1 + output for output in outputs if type(output) is int}) if isinstance(outputs, list) else []
    if not numbers or len(numbers) < len(outputs) or numbers[0] < 0 or numbers[-1] >= count:
        raise UserError(
            f"{folder}: an EAGLE-3 head that reads the outputs of layers {outputs!r} (from 0), which must differ and "
            f"be before the last of the {count} of {target.name}; a head trained on others lists them in config.json "
            "(eagle_config.eagle_aux_hidden_state_layer_ids)"
        )
    return tuple(numbers)


def _draft_vocabulary(file: Path, state: dict[str, torch.Tensor], rows: int, target: Target) -> torch.Tensor | None:
    """Return the target's ids of the draft vocabulary, from the file's differences; None if it is the whole one."""
    used, offsets = state.pop("t2d", None), state.pop("d2t", None)
    if offsets is None and rows == target.logits_size:
        return None
    if offsets is None or offsets.shape != (rows,) or offsets.dtype not in (torch.int32, torch.int64):
        found = "missing" if offsets is None else f"{list(offsets.shape)} of {offsets.dtype}"
        raise UserError(f"{file}: d2t is {found}, should be [{rows}] of torch.int64")
    ids = torch.arange(rows) + offsets
    if not 0 <= int(ids.min()) <= int(ids.max()) < target.logits_size:
        raise UserError(f"{file}: d2t leads to ids outside the vocabulary of {target.logits_size}")
    if used is not None and not torch.equal(used.nonzero().flatten(), ids.sort().values):
        raise UserError(f"{file}: d2t leads to other ids than those that t2d marks")
    return ids.to(target.device)


def _embedding(file: Path, state: dict[str, torch.Tensor], config: Any, target: Target) -> torch.Tensor:
    """Take the embedding out of a file's tensors; return it, or the target's own where it is missing or equal."""
    own: torch.Tensor = target.model.get_input_embeddings().weight.detach()
    given, shape = state.pop(EMBEDDING, own), [len(own), config.hidden_size]
    if list(given.shape) != shape:
        which = f"has no {EMBEDDING}, and the target's" if given is own else EMBEDDING
        raise UserError(f"{file}: {which} is {list(given.shape)} and should be {shape}")
    given = given if given is own else given.to(target.device, target.dtype)
    return own if given is own or torch.equal(given, own.to(target.dtype)) else given


def filled(head: AnyHead, file: Path, state: dict[str, torch.Tensor], target: Target) -> AnyHead:
    """Load a head's weights and move it to the target. Raises UserError as `load_weights`."""
    load_weights(head, file, {name: tensor for name, tensor in state.items() if not name.endswith(_ANGLES)})
    embedding = head.embedding
    head = head.to(target.device, target.dtype)
    head.embedding = embedding  # the original, neither moved nor cast
    return head.eval().requires_grad_(False)
