"""EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858) and EAGLE-3 (2503.01840).

The order of operations is that of github.com/SafeAILab/EAGLE, whose 60 nodes include the root. From
the feature f_t (the target's last hidden state) and the token t + 1 a head predicts f_(t+1).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from ...engine import Draft, Target, Tree
from ...engine.attention.layers import decoder_layers
from ...errors import UserError
from ..limits import MAX_NODES, check_whole
from .heads import (
    PLAIN_LAYER,
    Head,
    HeadDrafter,
    HeadFiles,
    HeadSession,
    StaticTree,
    hidden_size,
    layer_config,
    load_weights,
    published_tree,
    read_head,
    run_layer,
)

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # ours and public; public
EMBEDDING = "embed_tokens.weight"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE_ONLY = PLAIN_LAYER | {"use_aux_hidden_state": False, "norm_output": False}
EAGLE3_ONLY = PLAIN_LAYER | {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
}
NORMS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")


class EagleHead(Head):
    """fc over (embedding of the next token, feature), then a decoder layer without input norm."""

    def __init__(self, config: Any, embedding: Tensor, *, bias: bool = True) -> None:
        super().__init__(config, embedding)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        layer = LlamaDecoderLayer(config, layer_idx=0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])

    def forward(self, features: Tensor, tokens: Tensor, *attention: Any) -> Tensor:
        x = self.fc(torch.cat((self.embed(tokens), features), dim=-1))
        return run_layer(self.layers[0], x, *attention)


class Eagle3Head(Head):
    """A decoder layer whose attention reads (embedding of the next token, feature), each normed.

    Args:
        width: of the states of `reads`, concatenated.
        rows: W, tokens of the draft vocabulary.
        norms: those of NORMS in its config.json.
    """

    ids: Tensor | None = None
    lm_head: nn.Linear | None

    def __init__(
        self,
        config: Any,
        embedding: Tensor,
        *,
        reads: tuple[int, ...],
        width: int,
        rows: int,
        norms: Collection[str] = (),
    ) -> None:
        super().__init__(config, embedding)
        hidden = config.hidden_size
        eps = config.rms_norm_eps
        self.reads = reads
        self.norms = norms
        parts = 1 if "norm_before_fc" in norms else len(reads) * ("fc_norm" in norms)
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(width // parts, eps) for _ in range(parts))
        self.fc = nn.Linear(width, hidden, bias=False)
        self.midlayer = layer = LlamaDecoderLayer(config, layer_idx=0)
        layer.hidden_norm = LlamaRMSNorm(hidden, eps)

        for name in ("q_proj", "k_proj", "v_proj"):
            size = getattr(layer.self_attn, name).out_features
            setattr(layer.self_attn, name, nn.Linear(2 * hidden, size, bias=False))

        self.norm = LlamaRMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, rows, bias=False)

    def features(self, hidden: Tensor) -> Tensor:
        if self.fc_norm:
            parts = zip(self.fc_norm, hidden.chunk(len(self.fc_norm), dim=-1), strict=True)
            hidden = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return self.fc(hidden)  # type: ignore[no-any-return]

    def forward(
        self,
        features: Tensor,
        tokens: Tensor,
        angles: Any,
        mask: Any = None,
        cache: Any = None,
    ) -> Tensor:
        layer = self.midlayer
        normed = layer.hidden_norm(features)
        x = torch.cat((layer.input_layernorm(self.embed(tokens)), normed), dim=-1)
        residual = normed if "norm_before_residual" in self.norms else features
        out = residual + layer.self_attn(x, angles, mask, cache)[0]
        out = out + layer.mlp(layer.post_attention_layernorm(out))
        return self.norm(out) if "norm_output" in self.norms else out  # type: ignore[no-any-return]


def load_head(path: str, target: Target) -> EagleHead:
    files = read_head(path, "eagle", target, WEIGHTS, EAGLE_ONLY)
    if "draft_vocab_size" in files.config:
        raise UserError(
            f"{path}: config.json has a draft_vocab_size, as EAGLE-3's heads have: use"
            " method=eagle3"
        )

    _rename(files, {"model.": ""})
    config = layer_config(files.config)
    embedding = _embedding(files, config, target)
    with torch.device("meta"):
        head = EagleHead(config, embedding, bias="fc.bias" in files.state)
        _add_biases(head, files)
    return load_weights(head, files, target)


def load_eagle3_head(path: str, target: Target, layers: list[int] | None = None) -> Eagle3Head:
    files = read_head(path, "eagle3", target, WEIGHTS, EAGLE3_ONLY)
    _rename(files, {"model.": "", "layers.0.": "midlayer.", "input_norm.": "fc_norm.0."})
    if "midlayer.hidden_norm.weight" not in files.state:
        raise UserError(
            f"{path}: is not an EAGLE-3 head (it has no hidden_norm): use method=eagle2"
        )

    values = files.config
    rows = values.get("draft_vocab_size", target.logits_size)
    config = layer_config(values)
    reads = layers_read(values, target, layers)
    width = len(reads) * hidden_size(target)
    norms = [key for key in NORMS if values.get(key)]
    ids = _draft_vocabulary(files, rows, target)
    embedding = _embedding(files, config, target)
    with torch.device("meta"):
        head = Eagle3Head(config, embedding, reads=reads, width=width, rows=rows, norms=norms)
        _add_biases(head, files)
    head.ids = ids
    as_target = (rows, config.hidden_size) == (target.logits_size, hidden_size(target))
    if "lm_head.weight" not in files.state and as_target:
        head.lm_head = None
    return load_weights(head, files, target)


def _rename(files: HeadFiles, names: dict[str, str]) -> None:
    for name in list(files.state):
        new = name
        for old, ours in names.items():
            new = new.replace(old, ours)
        files.state[new] = files.state.pop(name)


def _add_biases(head: Head, files: HeadFiles) -> None:
    for name, module in head.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.bias" in files.state:
            module.bias = nn.Parameter(torch.empty(module.out_features))


def _embedding(files: HeadFiles, config: Any, target: Target) -> Tensor:
    of_target: Tensor = target.model.get_input_embeddings().weight.detach()
    embedding = files.state.pop(EMBEDDING, of_target)
    shape = [len(of_target), config.hidden_size]
    if list(embedding.shape) != shape:
        raise UserError(
            f"{files.weights}: {EMBEDDING} is {list(embedding.shape)} and should be {shape}"
        )
    embedding = embedding.to(target.device, target.dtype)
    return of_target if torch.equal(embedding, of_target.to(target.dtype)) else embedding


def _draft_vocabulary(files: HeadFiles, rows: int, target: Target) -> Tensor | None:
    files.state.pop("t2d", None)  # the same as a mask
    offsets = files.state.pop("d2t", None)
    if offsets is None and rows == target.logits_size:
        return None
    if offsets is None or offsets.shape != (rows,):
        shape = "missing" if offsets is None else list(offsets.shape)
        raise UserError(f"{files.weights}: d2t is {shape} and should be {[rows]}")
    return (torch.arange(rows) + offsets).to(target.device)


def layers_read(
    config: dict[str, Any], target: Target, layers: list[int] | None
) -> tuple[int, ...]:
    """Return the numbers of the target's hidden states that an EAGLE-3 head reads.

    State i enters layer i (from 0). In config.json, `eagle_config` lists layers whose outputs are
    read (SpecForge, SGLang); ids elsewhere are numbers of states (speculators, vLLM).
    """
    count = len(decoder_layers(target.model, target.name))
    listed = config.get(LAYER_IDS)
    if layers is not None:
        states = layers
    elif not listed:
        states = [2, count // 2, count - 3]
    elif config.get("eagle_config", {}).get(LAYER_IDS):
        states = [layer + 1 for layer in listed]
    else:
        states = listed

    numbers = [number for number in range(count) if number in states]
    if not numbers or len(numbers) != len(states):
        raise UserError(
            f"eagle3: the head reads hidden states {states}, which must differ and be inputs of"
            f" layers, below the {count} of {target.name}; method.layers= names those of its"
            " training"
        )
    return tuple(numbers)


class Eagle(StaticTree):
    """Drafts a tree of fixed shape, as published of 25 nodes."""

    def __init__(self, target: Target, *, head_path: str, tree_path: str | None = None) -> None:
        head = load_head(head_path, target)
        super().__init__(target, head, published_tree("eagle-25", tree_path, MAX_NODES))
        self.lm_head = target.model.get_output_embeddings()

    def after(
        self, session: HeadSession, depth: int, state: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        visible = self.levels[depth].visible
        features = session.continue_nodes(state, tokens, depth, visible) if depth else state
        return features, self.lm_head(features)


class ConfidenceTree(HeadDrafter):
    """Expands the best `top_k` nodes of each depth, and keeps the best `nodes` (2406.16858, 4).

    Args:
        lm_head: features (m, H) -> logits (m, W).
        ids: int64 (W,), the target's ids of these logits; None: they are the target's own.
        depth: of the deepest node, one more than the public code's.
    """

    def __init__(
        self,
        target: Target,
        head: Head,
        lm_head: nn.Module,
        ids: Tensor | None = None,
        *,
        depth: int,
        top_k: int,
        nodes: int,
    ) -> None:
        name = type(self).__name__.lower()
        check_whole(name, 1, depth=depth, nodes=nodes)
        check_whole(name, 1, target.logits_size if ids is None else len(ids), top_k=top_k)
        self.lm_head = lm_head
        self.ids = ids
        self.depth = depth
        self.top_k = top_k
        self.nodes = min(nodes, top_k + (depth - 1) * top_k**2)
        inner = (depth - 1) * top_k
        super().__init__(target, head, inner=inner, max_nodes=1 + self.nodes)
        self.itself = torch.eye(top_k, dtype=torch.bool, device=self.device)

    def expand(self, session: HeadSession, root: int, feature: Tensor) -> Draft:
        k = self.top_k
        device = feature.device
        # of all nodes seen so far
        values = [torch.zeros(1, device=device)]
        tokens = [torch.tensor([root], device=device)]
        parents = [torch.zeros(1, dtype=torch.long, device=device)]
        seen = 1
        # of the w nodes to expand: their numbers, their features, and which of the nodes expanded
        # before each attends to
        node = parents[0]
        value = values[0]
        features = feature
        visible = self.itself[:1, :0]  # (w, expanded so far)

        for depth in range(1, self.depth + 1):
            log_probs, best = self._best(features)  # (w, k)
            below = (value[:, None] + log_probs).view(-1)  # (w k,)
            values.append(below)
            tokens.append(best.view(-1))
            parents.append(node.repeat_interleave(k))
            if depth == self.depth:
                break

            chosen = below.topk(k).indices.sort().values  # numbers stay breadth-first
            row = chosen // k  # their parents' rows
            node = seen + chosen
            value = below.index_select(0, chosen)
            seen += len(below)
            visible = torch.cat((visible.index_select(0, row), self.itself), dim=1)
            token = tokens[-1].index_select(0, chosen)
            features = session.continue_nodes(features.index_select(0, row), token, depth, visible)

        # A child's value is at most its parent's, and it comes later: a stable sort keeps parents,
        # and of siblings the first ones.
        order = torch.cat(values).sort(descending=True, stable=True).indices
        drafted = order[: 1 + self.nodes].sort().values
        parent_of = torch.searchsorted(drafted, torch.cat(parents)[drafted])
        return Draft(Tree(parent_of.tolist(), device=device), torch.cat(tokens)[drafted])

    def _best(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probs and tokens, (w, top_k) each, of the children of features (w, H)."""
        log_probs = torch.log_softmax(self.lm_head(features).float(), dim=-1)
        best = log_probs.topk(self.top_k, dim=-1)
        # a sort puts NaN first, before its parent
        values = best.values.nan_to_num(nan=-math.inf, neginf=-math.inf)
        return values, best.indices if self.ids is None else self.ids[best.indices]


class Eagle2(ConfidenceTree):
    def __init__(
        self, target: Target, *, head_path: str, depth: int = 6, top_k: int = 10, nodes: int = 60
    ) -> None:
        head = load_head(head_path, target)
        lm_head = target.model.get_output_embeddings()
        super().__init__(target, head, lm_head, depth=depth, top_k=top_k, nodes=nodes)


class Eagle3(ConfidenceTree):
    """EAGLE-3's head. Spec-Bench runs it with depth 6, which its code calls 5."""

    head: Eagle3Head

    def __init__(
        self,
        target: Target,
        *,
        eagle3_path: str,
        layers: list[int] | None = None,
        depth: int = 8,
        top_k: int = 10,
        nodes: int = 59,
    ) -> None:
        head = load_eagle3_head(eagle3_path, target, layers)
        norm = nn.Identity() if "norm_output" in head.norms else head.norm
        lm_head = nn.Sequential(norm, head.lm_head or target.model.get_output_embeddings())
        super().__init__(target, head, lm_head, head.ids, depth=depth, top_k=top_k, nodes=nodes)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"hidden_states": str(self.head.reads)}
