"""Learned heads: their files, and EAGLE's auto-regressive heads.

EAGLE: arXiv 2401.15077, 4.1; EAGLE-3: 2503.01840.

A head is a folder with config.json and weights, in the public layouts or as tools.heads writes.
EAGLE's is one LLaMA decoder layer that continues the target's features. The feature of a position
is the target's last hidden state there. From the feature f_t and the token t + 1 the head predicts
f_(t+1), from which the target's own head gives the token t + 2. EAGLE-2 (2406.16858) uses the same
head. EAGLE-3's features are three of the target's hidden states, projected, and at drafted nodes
the head's own outputs. It has an output matrix of its own, over part of the vocabulary.
Checkpoint layout: github.com/SafeAILab/EAGLE.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from ..engine import LAST, Target, Tree
from ..engine.cache import LayerShape, TreeCache
from ..engine.layers import decoder_layers
from ..engine.tree import read_tree
from ..errors import UserError, one_line
from ..files import located
from . import check_whole

TRAINED = ("medusa", "eagle")
UNTRAINED = "no command here trains one; configs/companions names public ones"
_TREES = Path(__file__).parent / "trees"  # as published with the heads
LAYER_KEYS = re.compile(  # of a LLaMA layer
    "attention_bias|head_dim|hidden_act|hidden_size|intermediate_size|max_position_embeddings|"
    "mlp_bias|num_(attention|key_value)_heads|rms_norm_eps|rope_theta"
)
_LABELS = re.compile(  # what nested configurations may state differently
    "architectures|model_type|tie_word_embeddings|transformers_version|(torch_)?dtype|"
    "_name_or_path|use_cache|(bos|eos|pad)_token_id|initializer_range"
)
# what a true key of such a name asks for must be computed, whatever it is
_CHANGES_SUMS = re.compile(
    "(?!"
    "rope_(type|scaling|parameters)$|mrope_(section|interleaved)$|"
    "_?attn_implementation(_autoset)?$|attention_dropout$|"
    "max_window_layers$|chunk_size_feed_forward$"
    ").*("
    "norm|bias|scal|multiplier|rope|rotary|attention|attn|alibi|causal|window|chunk|sink|clip|"
    "residual|cap(ping)?$|layer_types|layer_ids|act(ivation)?(_fn|_function)?$|head_dim|lm_head|"
    "quant|parallel_draft(ing|_step)"
    ")"
)
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_ALIASES = {"type": "rope_type", "fusion_bias": "bias", "aux_hidden_state_layer_ids": _LAYER_IDS}
_NEUTRAL = {
    "is_causal": True,
    "logit_scale": 1,
    "partial_rotary_factor": 1,
    "parallel_draft_step": 1,
    "layer_types": ["full_attention"],
}


def open_head(
    path: str, kind: str, target: Target, only: Mapping[str, Any], computed: Collection[str] = ()
) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a head of this kind, and its config.json, `flat`.

    Args:
        only: the one value that is supported, by key.
        computed: keys that are computed, next to those of a LLaMA layer.

    Raises UserError if there is none, with the command that trains one, it is of another hidden
    size or vocabulary, or it has a key that changes its sums and is not computed.
    """
    folder = located(path)
    if not folder.is_dir():
        trained = (
            f"train one with `python -m tools.heads {kind} --model MODEL --text FILE --output"
            f" {shlex.quote(path)}` (--model data/embedded --text embedded for the shipped model)"
        )
        raise UserError(f"no {kind} head in {path}: {trained if kind in TRAINED else UNTRAINED}")

    file = folder / "config.json"
    try:
        config = dict(json.loads(file.read_text(encoding="utf-8")).items())
    except (OSError, ValueError, AttributeError) as error:
        reason = f"is not a readable JSON object ({error})"
        if isinstance(error, FileNotFoundError):
            reason = "missing"
        raise UserError(
            f"{file}: {reason}; a head is a folder with config.json and weights"
        ) from None

    config = flat(file, config)
    width = "target_hidden_size" if config.get("target_hidden_size") else "hidden_size"
    sizes = {width: hidden_size(target), "vocab_size": target.logits_size}
    sizes["truncated_vocab_size"] = target.logits_size
    wrong = {key: config[key] for key, size in sizes.items() if config.get(key, size) != size}

    for key, size in wrong.items():
        raise UserError(f"{folder}: made for a {key} of {size}, {target.name} has {sizes[key]}")

    if config.get("use_sliding_window") is False:
        config.pop("sliding_window", None)

    only = {**_NEUTRAL, "speculators_model_type": kind, **only}
    for key, value in config.items():
        known = key in computed or LAYER_KEYS.fullmatch(key) or not _CHANGES_SUMS.match(key)
        supported = only.get(key, value if known or not value else False)
        if value != supported:
            raise UserError(
                f"{file}: {key}={value} changes a head's sums; those of {supported} are supported"
            )

    return folder, config


def flat(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with those nested in it, of each its true keys, too; without nulls.

    Raises UserError if they contradict each other.
    """
    values: dict[str, Any] = {}
    parts = [config]
    for part in parts:  # grows
        for name, value in part.items():
            key = _ALIASES.get(name, name)
            if isinstance(value, dict):
                parts.append(value)
                value = [_ALIASES.get(inner, inner) for inner in value if value[inner]]
            if (
                value is not None
                and values.setdefault(key, value) != value
                and not _LABELS.fullmatch(key)
            ):
                raise UserError(f"{file}: {key} is {values[key]} and {value}")

    return values


def read_weights(folder: Path, *names: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """Read the first of the named files that exists, onto the CPU.

    A pickle is read as weights only and runs no code.

    Raises UserError if none exists, or the file is damaged or holds anything but weights.
    """
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{folder}: has no weights ({' or '.join(names)})")

    try:
        if file.suffix != ".safetensors":
            state = torch.load(file, map_location="cpu", weights_only=True)
        else:
            state = load_file(file)
    except Exception as error:  # whatever torch, pickle and safetensors raise on a damaged file
        reason = one_line(error)[:160] or type(error).__name__
        raise UserError(
            f"{file}: corrupt or cut short, or a pickle of more than weights ({reason})"
        ) from None

    if not isinstance(state, dict) or not all(
        isinstance(value, torch.Tensor) for value in state.values()
    ):
        raise UserError(f"{file}: must hold a dictionary of tensors and nothing else")
    return file, state


def load_weights(module: nn.Module, file: Path, state: dict[str, torch.Tensor]) -> None:
    """Load what `read_weights` read.

    Raises UserError if a tensor is missing, unknown or of another shape.
    """
    shapes = {name: list(tensor.shape) for name, tensor in module.state_dict().items()}
    given = {name: list(tensor.shape) for name, tensor in state.items()}
    wrong = [name for name in shapes | given if shapes.get(name) != given.get(name)]
    if wrong:
        name = wrong[0]
        wanted = f"should be {shapes[name]}" if name in shapes else "has no place in such a head"
        raise UserError(
            f"{file}: {name} is {given.get(name, 'missing')} and {wanted}; {len(wrong)} of"
            f" {len(shapes)} tensors differ"
        )

    module.load_state_dict(state)


def hidden_size(target: Target) -> int:
    """Return H, the input width of the target's own head."""
    return int(target.model.get_output_embeddings().weight.shape[1])


def template(name: str, path: str | None, vocab_size: int, *, heads: int | None = None) -> Tree:
    """Return the tree of a YAML file.

    Without a path, return the published one of this name, cut to a depth of `heads`.

    Raises UserError if the tree has more ranks than there are tokens, or a file's tree is deeper
    than `heads`.
    """
    tree = read_tree(_TREES / f"{name}.yaml" if path is None else path)
    if heads is not None and tree.max_depth > heads:
        if path is not None:
            raise UserError(
                f"{path}: the tree is {tree.max_depth} deep, and there are {heads} heads"
            )
        tree = Tree.from_rank_paths(path for path in tree.rank_paths[1:] if len(path) <= heads)
    if tree.max_rank >= vocab_size:
        raise UserError(
            f"{name}: the tree's rank {tree.max_rank} is beyond the {vocab_size} tokens"
        )
    return tree


WEIGHTS = "model.safetensors"
PUBLIC_WEIGHTS = "pytorch_model.bin"
EMBEDDING = "embed_tokens.weight"
# angles that depend on the position alone, and their parameters; for text, mrope is the default
_ROPE = {
    "default": (),
    "mrope": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# layers as LLaMA's, but for tensors
_LLAMA = re.compile("llama|qwen[23]|mistral|mixtral|phi3|eagle3?|speculator.*")
# which key of config.json gives a layer a bias
_BIASES = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp_bias") | {"fc": "bias"}
# o_proj: only LLaMA's has one then
_BIASES |= dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attention_bias")
NORMS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
_ANGLES = "rotary_emb.inv_freq"  # in old files; ignored, as config.json defines the angles
AnyHead = TypeVar("AnyHead", bound="Head")


class Head(nn.Module):
    """A decoder layer over hidden states of the target, with keys and values of its own.

    Subclasses say how it is run.

    `forward(features, tokens, angles, mask, cache)` returns the predicted features (B, n, H), each
    for the position after its own, from features (B, n, H) of n positions and tokens, int64 (B, n),
    the token after each. `angles` are those of the n positions, or of one position that all share;
    `mask` is additive (1, 1, n, past + n), or None where each attends to all before it and nothing
    is cached; `cache` has keys and values of earlier positions, to which these are added; it can
    hold one sequence.

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

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 (...) -> (..., H), in the head's type: rows may be held in 16 bits."""
        return F.embedding(tokens, self.embedding).to(self._weight.dtype)

    def angles(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of rotary positions 0 to count - 1.

        Each is (1, count, head_dim).
        """
        weight = self._weight
        # outside the head, as casting it would round this
        rotary = LlamaRotaryEmbedding(self.config).to(weight.device)
        cos, sin = rotary(weight, torch.arange(count, device=weight.device)[None])
        return cos, sin

    def new_cache(self, capacity: int) -> TreeCache:
        c = self.config
        weight = self._weight
        shape = LayerShape(
            c.num_key_value_heads, c.head_dim, c.head_dim, weight.dtype, weight.device
        )
        return TreeCache([shape], capacity)

    @property
    def _weight(self) -> torch.Tensor:
        return next(self.parameters())


def run_layer(
    layer: nn.Module, x: torch.Tensor, angles: Any, mask: Any = None, cache: Any = None
) -> torch.Tensor:
    """Run a LLaMA layer over (B, n, H); the rest is as a `Head` takes it."""
    # the cache's name depends on the version
    out = layer(x, mask, None, cache, position_embeddings=angles)
    return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]


class EagleHead(Head):
    """fc over (embedding of the next token, feature), then one decoder layer.

    The layer has no input norm, as published.

    The state dict is the public layout (`fc.weight`, `fc.bias`, `layers.0.*`) but for the frozen
    embedding, (V, H).
    """

    def __init__(self, config: Any, embedding: torch.Tensor) -> None:
        super().__init__(config, embedding)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        layer = LlamaDecoderLayer(config, layer_idx=0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, *attention: Any
    ) -> torch.Tensor:
        return run_layer(
            self.layers[0], self.fc(torch.cat((self.embed(tokens), features), dim=-1)), *attention
        )


class Eagle3Head(Head):
    """A decoder layer whose attention reads (embedding of the next token, feature).

    Each of the two has a norm of its own.

    The state dict is the public layout but for the embedding and the draft vocabulary.

    Args:
        reads: see `Head`.
        width: of these states, concatenated.
        rows: W, tokens of the draft vocabulary.
        asked: those of NORMS in its config.json: the residual is the normed feature, drafted nodes'
            features are normed outputs, a norm over all states before fc, one over each.

    Attributes:
        ids: int64 (W,), the target's ids of the draft vocabulary; None: the vocabulary is the
            target's.
        lm_head: None: the target's.
        source: where the numbers in `reads` come from.
    """

    ids: torch.Tensor | None = None
    lm_head: nn.Linear | None
    source: str

    def __init__(
        self,
        config: Any,
        embedding: torch.Tensor,
        *,
        reads: tuple[int, ...],
        width: int,
        rows: int,
        asked: Collection[str] = (),
    ) -> None:
        super().__init__(config, embedding)
        hidden = config.hidden_size
        eps = config.rms_norm_eps
        self.reads = reads
        self.asked = asked
        norms = 1 if "norm_before_fc" in asked else len(reads) * ("fc_norm" in asked)
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(width // norms, eps) for _ in range(norms))
        self.fc = nn.Linear(width, hidden, bias=False)
        self.midlayer = layer = LlamaDecoderLayer(config, layer_idx=0)
        layer.hidden_norm = LlamaRMSNorm(hidden, eps)

        for name in ("q_proj", "k_proj", "v_proj"):
            size = getattr(layer.self_attn, name).out_features
            setattr(layer.self_attn, name, nn.Linear(2 * hidden, size, bias=False))

        self.norm = LlamaRMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, rows, bias=False)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.fc_norm:
            parts = zip(self.fc_norm, hidden.chunk(len(self.fc_norm), dim=-1), strict=True)
            hidden = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return self.fc(hidden)  # type: ignore[no-any-return]

    def forward(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        angles: Any,
        mask: Any = None,
        cache: Any = None,
    ) -> torch.Tensor:
        layer = self.midlayer
        normed = layer.hidden_norm(features)
        x = torch.cat((layer.input_layernorm(self.embed(tokens)), normed), dim=-1)
        residual = normed if "norm_before_residual" in self.asked else features
        out = residual + layer.self_attn(x, angles, mask, cache)[0]
        out = out + layer.mlp(layer.post_attention_layernorm(out))
        return self.norm(out) if "norm_output" in self.asked else out  # type: ignore[no-any-return]


def head_config(values: dict[str, Any]) -> Any:
    """Return the configuration of a head from a LLaMA-like config.json, `flat`.

    Raises UserError if it has none.
    """
    if values.get("num_hidden_layers", 1) != 1:
        raise UserError(
            f"head: num_hidden_layers={values['num_hidden_layers']}; heads of one layer are"
            " supported"
        )
    if not _LLAMA.fullmatch(str(values.get("model_type", "llama"))):
        raise UserError(
            f"head: model_type={values['model_type']}: its layers are not LLaMA's, as heads' are"
        )

    kind = values.get("rope_type", "default")
    rope = {*_ROPE["llama3"]} & values.keys()
    if kind not in _ROPE or rope - {*_ROPE[kind], "original_max_position_embeddings"}:
        raise UserError(f"head: rope_type={kind} with {sorted(rope)}: there is {', '.join(_ROPE)}")

    of_layer = {key: value for key, value in values.items() if LAYER_KEYS.fullmatch(str(key))}
    angles = {key: values[key] for key in ("rope_theta", *_ROPE[kind]) if key in values}
    angles["rope_type"] = kind if _ROPE[kind] else "default"

    try:
        config = LlamaConfig(
            **of_layer, rope_parameters=angles, num_hidden_layers=1, attn_implementation="sdpa"
        )
        with torch.device("meta"):  # a trial without arithmetic
            x = torch.zeros(1, 1, config.hidden_size)
            position = torch.zeros(1, 1)
            run_layer(LlamaDecoderLayer(config, 0), x, LlamaRotaryEmbedding(config)(x, position))
    except (
        Exception
    ) as error:  # whatever transformers' own checks raise, which differs between its versions
        raise UserError(
            f"head: config.json describes no LLaMA layer ({one_line(error)[:160]})"
        ) from None

    return config


def load_head(path: str, target: Target) -> EagleHead:
    """Load EAGLE's head from a folder.

    It holds config.json, and model.safetensors (ours, public) or pytorch_model.bin (public).

    Without an embedding in the file, or with an equal one, the target's own is used. Raises
    UserError if it is missing, corrupt, of another kind, or made for another model.
    """
    only = {"use_aux_hidden_state": False, "transformer_layer_architecture": "LlamaDecoderLayer"}
    only |= {"skip_prenorm": True, "skip_output_norm": True}
    folder, values = open_head(path, "eagle", target, only, ("bias", "qkv_bias", _LAYER_IDS))
    if "draft_vocab_size" in values:
        raise UserError(
            f"{folder}: config.json has a draft_vocab_size, as EAGLE-3's heads have: use"
            " method=eagle3"
        )

    file, state = read_weights(folder, WEIGHTS, PUBLIC_WEIGHTS)
    state = renamed(state, {"model.": "", "fusion_fc.": "fc.", "transformer.": "layers.0."})
    config = head_config(values)
    head = EagleHead(config, _embedding(file, state, config, target))
    fit_biases(head, values, file, state)
    return filled(head, file, state, target)


def load_eagle3_head(path: str, target: Target, layers: list[int] | None = None) -> Eagle3Head:
    """Load EAGLE-3's head from a folder, as `load_head` loads EAGLE's.

    `layers` as in `layers_read`.
    """
    only = dict.fromkeys(
        ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"), True
    )
    folder, values = open_head(
        path, "eagle3", target, only, (*NORMS, "bias", "qkv_bias", _LAYER_IDS)
    )
    file, state = read_weights(folder, WEIGHTS, PUBLIC_WEIGHTS)
    state = renamed(state, {"model.": "", "layers.0.": "midlayer.", "input_norm.": "fc_norm.0."})
    if "draft_vocab_size" not in values and "midlayer.hidden_norm.weight" not in state:
        raise UserError(
            f"{folder}: config.json has no draft_vocab_size, as EAGLE-3's heads have: use"
            " method=eagle2"
        )

    rows = values.get("draft_vocab_size", target.logits_size)
    check_whole(f"{folder / 'config.json'}", 1, target.logits_size, draft_vocab_size=rows)
    config = head_config(values)
    asked = [key for key in NORMS if values.get(key)]
    reads, source = layers_read(values, folder, target, layers)
    ids = _draft_vocabulary(file, state, rows, target)
    embedding = _embedding(file, state, config, target)
    width = len(reads) * hidden_size(target)
    head = Eagle3Head(config, embedding, reads=reads, width=width, rows=rows, asked=asked)
    head.ids = ids
    head.source = source

    of_target = target.model.config.get_text_config()
    shared = of_target.tie_word_embeddings or not values.get("tie_word_embeddings")
    sizes = (target.logits_size, hidden_size(target))
    if "lm_head.weight" not in state and shared and (rows, config.hidden_size) == sizes:
        head.lm_head = None

    fit_biases(head, values, file, state)
    return filled(head, file, state, target)


def renamed(state: dict[str, torch.Tensor], names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return tensors by other names, given which parts of names become which.

    If two names would become one, the tensors are returned as they are.
    """
    new = state
    for old, ours in names.items():
        new = {name.replace(old, ours): tensor for name, tensor in new.items()}
    return new if len(new) == len(state) else state


def fit_biases(
    head: Head, values: dict[str, Any], file: Path, state: dict[str, torch.Tensor]
) -> None:
    """Give a linear layer a bias if the file has one.

    Raises UserError if config.json says otherwise.
    """
    for name, module in head.named_modules():
        if isinstance(module, nn.Linear):
            biased = f"{name}.bias" in state
            key = _BIASES.get(name.rpartition(".")[2], "")
            # as in vLLM
            key = "qkv_bias" if key == "attention_bias" and "qkv_bias" in values else key
            if values.get(key, biased) != biased:
                raise UserError(
                    f"{file}: {key}={values[key]} in config.json, and {name}.bias in the file:"
                    f" {biased}"
                )
            module.register_parameter(
                "bias", nn.Parameter(torch.zeros(module.out_features)) if biased else None
            )


def layers_read(
    values: dict[str, Any], folder: Path, target: Target, layers: list[int] | None
) -> tuple[tuple[int, ...], str]:
    """Return the hidden states that an EAGLE-3 head reads, and the source of their numbers.

    State 0 is the embedding's output, state i enters layer i (from 0), as in transformers. `layers`
    decides, if given. In config.json, `eagle_config` lists layers whose outputs are read
    (SpecForge, SGLang); ids elsewhere are numbers of states (speculators, vLLM). Without any they
    are 2, L // 2 and L - 3 of L, as in the public code.

    Raises UserError if the target does not have them.
    """
    count = len(decoder_layers(target.model, target.name))
    ids = layers
    more = 0  # added to each id
    source = "method.layers"
    if ids is None:
        ids = values.get(_LAYER_IDS)
        source = "config.json: numbers of hidden states"
        if not ids:
            ids = [2, count // 2, count - 3]
            source = "the public code's"
        elif _LAYER_IDS in values.get("eagle_config", ()):
            more = 1
            source = f"eagle_config: layers whose outputs are read, {ids}"

    numbers = [number for number in range(count) if isinstance(ids, list) and number - more in ids]
    if not numbers or len(numbers) != len(ids):
        raise UserError(
            f"{folder}: an EAGLE-3 head that reads hidden states {ids!r} ({source}), which must"
            f" differ and be inputs of layers, below the {count} of {target.name}; method.layers="
            " names those of its training"
        )

    return tuple(numbers), source


def _draft_vocabulary(
    file: Path, state: dict[str, torch.Tensor], rows: int, target: Target
) -> torch.Tensor | None:
    """Return the target's ids of the draft vocabulary, from the file's differences.

    None if it is the whole one.
    """
    used = state.pop("t2d", None)
    offsets = state.pop("d2t", None)
    if offsets is None and rows == target.logits_size:
        return None
    if (
        offsets is None
        or offsets.shape != (rows,)
        or offsets.dtype not in (torch.int32, torch.int64)
    ):
        found = "missing" if offsets is None else f"{list(offsets.shape)} of {offsets.dtype}"
        raise UserError(f"{file}: d2t is {found}, should be [{rows}] of torch.int64")

    ids = torch.arange(rows) + offsets
    if not 0 <= int(ids.min()) <= int(ids.max()) < target.logits_size:
        raise UserError(f"{file}: d2t leads to ids outside the vocabulary of {target.logits_size}")
    if used is not None and not torch.equal(used.nonzero().flatten(), ids.sort().values):
        raise UserError(f"{file}: d2t leads to other ids than those that t2d marks")
    return ids.to(target.device)


def _embedding(
    file: Path, state: dict[str, torch.Tensor], config: Any, target: Target
) -> torch.Tensor:
    """Take the embedding out of a file's tensors and return it.

    Where it is missing or equal, return the target's own.
    """
    own: torch.Tensor = target.model.get_input_embeddings().weight.detach()
    given = state.pop(EMBEDDING, own)
    shape = [len(own), config.hidden_size]
    if list(given.shape) != shape:
        which = f"has no {EMBEDDING}, and the target's" if given is own else EMBEDDING
        raise UserError(f"{file}: {which} is {list(given.shape)} and should be {shape}")
    given = given if given is own else given.to(target.device, target.dtype)
    return own if given is own or torch.equal(given, own.to(target.dtype)) else given


def filled(head: AnyHead, file: Path, state: dict[str, torch.Tensor], target: Target) -> AnyHead:
    """Load a head's weights and move it to the target. Raises UserError as `load_weights`."""
    weights = {name: tensor for name, tensor in state.items() if not name.endswith(_ANGLES)}
    load_weights(head, file, weights)
    embedding = head.embedding
    head = head.to(target.device, target.dtype)
    head.embedding = embedding  # the original, neither moved nor cast
    return head.eval().requires_grad_(False)
