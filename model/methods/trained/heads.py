"""What methods with learned heads share: a head's files, its cache, and static trees."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...engine import LAST, Draft, Drafter, Needs, Session, Target, Tree, Verification
from ...engine.attention.cache import CachePool, LayerShape, TreeCache
from ...engine.attention.sight import additive
from ...engine.rule.tree import read_tree
from ...errors import UserError, one_line
from ...files import located, unusable

PUBLIC = "configs/companions names public ones"
_TREES = Path(__file__).parent / "trees"  # as published with the heads
# keys of config.json that describe a LLaMA layer
_OF_LAYER = (
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
)
_ALIASES = {
    "type": "rope_type",
    "aux_hidden_state_layer_ids": "eagle_aux_hidden_state_layer_ids",
}
# Keys that change a layer's sums where no tensor shows it, and their values as LLaMA's layers have
PLAIN_LAYER = {
    "layer_types": ["full_attention"],
    "sliding_window": 0,
    "is_causal": True,
    "attn_logit_softcapping": 0,
    "use_qk_norm": False,
    "logit_scale": 1,
    "partial_rotary_factor": 1,
    "quant_method": "",
    "parallel_drafting": False,
    "parallel_draft_step": 1,
}
# angles that depend on the position alone, and their parameters; for text, mrope is the default
_ROPE = {
    "default": (),
    "mrope": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# layers as LLaMA's, but for tensors
_LLAMA = re.compile("llama|qwen[23]|mistral|mixtral|phi3|eagle3?|speculator.*")
_ANGLES = "rotary_emb.inv_freq"  # in old files; config.json defines the angles
AnyModule = TypeVar("AnyModule", bound=nn.Module)


class HeadFiles(NamedTuple):
    config: dict[str, Any]  # of config.json, `flat`
    weights: Path
    state: dict[str, Tensor]  # of the weights, on the CPU

    def largest(self, pattern: str) -> list[int]:
        matches = [re.match(pattern, name) for name in self.state]
        numbers = [[int(number) for number in match.groups()] for match in matches if match]
        if not numbers:
            names = sorted(self.state)[:2]
            raise UserError(f"{self.weights}: keys such as {names} are not those of such a head")
        return [max(column) for column in zip(*numbers, strict=True)]


def read_head(
    path: str,
    kind: str,
    target: Target,
    weights: Sequence[str],
    only: Mapping[str, Any],
) -> HeadFiles:
    """Read a head's folder: config.json and weights, in a public layout.

    Args:
        weights: names of the file of weights; the first that exists is read.
        only: the one value that is supported, by key of config.json.
    """
    folder = located(path)
    if not folder.is_dir():
        raise UserError(f"no {kind} head in {path}: {PUBLIC}")

    if why := unusable(folder):
        raise UserError(f"{folder}: {why}")
    file = folder / "config.json"
    config = _read_config(file)
    width = "target_hidden_size" if config.get("target_hidden_size") else "hidden_size"
    sizes = {width: hidden_size(target), "vocab_size": target.logits_size}
    sizes["truncated_vocab_size"] = target.logits_size
    for key, size in sizes.items():
        if config.get(key, size) != size:
            raise UserError(
                f"{folder}: made for a {key} of {config[key]}, {target.name} has {size}"
            )

    for key, supported in {"speculators_model_type": kind, **only}.items():
        value = config.get(key, supported)
        if value != supported:
            raise UserError(
                f"{file}: {key}={value} changes a head's sums; those of {supported} are supported"
            )

    return HeadFiles(config, *_read_weights(folder, weights))


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = flat(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"{file}: is not a readable JSON object ({one_line(error)}); a head is a folder with"
            " config.json and weights"
        ) from None

    if config.get("use_sliding_window") is False:
        config.pop("sliding_window", None)
    return config


def flat(config: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    parts = [config]
    for part in parts:  # grows
        for name, value in part.items():
            key = _ALIASES.get(name, name)
            if isinstance(value, dict):
                parts.append(value)
            if value is not None:
                values.setdefault(key, value)
    return values


def _read_weights(folder: Path, names: Sequence[str]) -> tuple[Path, dict[str, Tensor]]:
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{folder}: has no weights ({' or '.join(names)})")

    try:
        if file.suffix == ".safetensors":
            state = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
        state = {name: tensor.detach() for name, tensor in state.items()}
    except Exception as error:  # whatever torch, pickle and safetensors raise on a damaged file
        reason = one_line(error)[:160] or type(error).__name__
        raise UserError(
            f"{file}: corrupt or cut short, or a pickle of more than weights ({reason})"
        ) from None

    return file, {name: state[name] for name in state if not name.endswith(_ANGLES)}


def load_weights(module: AnyModule, files: HeadFiles, target: Target) -> AnyModule:
    """Give a module, made on `meta`, a head's weights. Raises UserError if they do not fit."""
    state = {name: tensor.to(target.device, target.dtype) for name, tensor in files.state.items()}
    try:
        module.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise UserError(f"{files.weights}: {one_line(error)[:300]}") from None
    return module.eval().requires_grad_(False)


def hidden_size(target: Target) -> int:
    return int(target.model.get_output_embeddings().weight.shape[1])


def layer_config(values: dict[str, Any]) -> Any:
    if not _LLAMA.fullmatch(str(values.get("model_type", "llama"))):
        raise UserError(
            f"head: model_type={values['model_type']}: its layers are not LLaMA's, as heads' are"
        )
    kind = values.get("rope_type", "default")
    if kind not in _ROPE:
        raise UserError(f"head: rope_type={kind}: there is {', '.join(_ROPE)}")

    of_layer = {key: values[key] for key in _OF_LAYER if key in values}
    angles = {key: values[key] for key in ("rope_theta", *_ROPE[kind]) if key in values}
    angles["rope_type"] = kind if _ROPE[kind] else "default"

    return LlamaConfig(
        **of_layer, rope_parameters=angles, num_hidden_layers=1, attn_implementation="sdpa"
    )


def run_layer(
    layer: nn.Module, x: Tensor, angles: Any, mask: Any = None, cache: Any = None
) -> Tensor:
    # the cache's name depends on the version
    out = layer(x, mask, None, cache, position_embeddings=angles)
    return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]


def published_tree(name: str, path: str | None, heads: int) -> Tree:
    """Return a YAML file's tree, or the published one of this name, cut to a depth of `heads`."""
    if path is None:
        tree = read_tree(_TREES / f"{name}.yaml")
        return Tree.from_rank_paths(path for path in tree.rank_paths[1:] if len(path) <= heads)
    tree = read_tree(path)
    if tree.max_depth > heads:
        raise UserError(f"{path}: the tree is {tree.max_depth} deep, and there are {heads} heads")
    return tree


class Head(nn.Module):
    """A decoder layer over hidden states of the target, with keys and values of its own.

    `forward(features, tokens, angles, mask, cache)` returns the next positions' features (B, n, H)
    from features (B, n, H) and the tokens after them, int64 (B, n). `angles` are those of the n
    positions, or of one that all share; `mask` is additive (1, 1, n, past + n), or None: causal.

    Attributes:
        embedding: (V, H) of the tokens, frozen.
        reads: numbers of the target's hidden states that it reads.
    """

    embedding: Tensor
    reads: tuple[int, ...] = (LAST,)

    def __init__(self, config: Any, embedding: Tensor) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("embedding", embedding, persistent=False)

    def features(self, hidden: Tensor) -> Tensor:
        """Return the features (..., H) of the target's hidden states (..., w H)."""
        return hidden

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding).to(self._weight.dtype)  # rows may have 16 bits

    def angles(self, count: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, (1, count, head_dim) each, of positions below `count`."""
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
    def _weight(self) -> Tensor:
        return next(self.parameters())


class HeadDrafter(Drafter):
    """The head and its caches; `inner` nodes of a draft are continued by the head."""

    def __init__(self, target: Target, head: Head, *, inner: int, max_nodes: int) -> None:
        super().__init__(target.device, target.vocab_size)
        self.head = head
        self.max_nodes = max_nodes
        self.needs = Needs(hidden=head.reads)
        target.prepare(head)
        self.capacity = target.context + inner + 1
        self.caches = CachePool(head.new_cache)
        self.dtype = target.dtype
        self.cos, self.sin = head.angles(self.capacity)

    def session(self) -> HeadSession:
        return HeadSession(self)

    def expand(self, session: HeadSession, root: int, feature: Tensor) -> Draft:
        """Grow the draft below `root`, at which the head predicts `feature` (1, H)."""
        raise NotImplementedError


class HeadSession(Session):
    """Keeps the head's cache in step with the target's accepted tokens.

    Pair t is (hidden states of token t, token t + 1). Keys and values of accepted tokens are
    computed anew from the target's own states, as in the public code.
    """

    drafter: HeadDrafter

    def __init__(self, drafter: HeadDrafter) -> None:
        super().__init__(drafter)
        self._borrowed = ExitStack()
        self._committed = 0  # pairs in the cache, drafted nodes not counted
        # states (m, w H), tokens (m,), not yet in the cache
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def begin(self, prompt: list[int]) -> Draft:
        self.cache = self._borrowed.enter_context(
            self.drafter.caches.borrowed(self.drafter.capacity)
        )
        drafter = self.drafter
        root = torch.tensor(prompt[-1:], device=drafter.device)
        return Draft(Tree.chain(0).on(drafter.device), root)

    def close(self) -> None:
        self._borrowed.close()

    def observe_prompt_hidden(self, prompt: list[int], hidden: Tensor) -> None:
        self._pairs.append(
            (hidden[:-1], torch.tensor(prompt[1:], dtype=torch.long, device=hidden.device))
        )

    def observe(self, verification: Verification) -> None:
        tree = verification.draft.tree
        node = verification.node
        path = tree.paths[node, : tree.depth_of[node] + 1]
        assert verification.hidden is not None
        # the token after each accepted node
        tokens = verification.choices.to(path.device).index_select(0, path)
        self._pairs.append((verification.hidden.index_select(0, path), tokens))

    def draft(self, root: int) -> Draft:
        draft = self.drafter.expand(self, root, self.catch_up())
        self.cache.length = self._committed
        return draft

    def catch_up(self) -> Tensor:
        hidden, tokens = (torch.cat(tensors) for tensors in zip(*self._pairs, strict=True))
        self._pairs = []
        past = self._committed
        new = len(tokens)
        visible = None
        if past and new > 1:
            visible = torch.ones(new, new, dtype=torch.bool, device=tokens.device).tril_()

        features = self.drafter.head.features(hidden)
        out = self._forward(features, tokens, slice(past, past + new), visible)
        self.cache.commit(range(new))
        self._committed = past + new
        return out[-1:]

    def continue_nodes(
        self, features: Tensor, tokens: Tensor, depth: int, visible: Tensor
    ) -> Tensor:
        """Return the features predicted at w nodes of one depth, which stay cached: (w, H).

        Args:
            features: (w, H), predicted at the nodes' parents.
            visible: bool (w, m), which of the m nodes drafted so far, themselves included, each
                sees.
        """
        position = self._committed - 1 + depth
        out = self._forward(features, tokens, slice(position, position + 1), visible)
        self.cache.length += len(tokens)
        return out

    def _forward(
        self,
        features: Tensor,
        tokens: Tensor,
        positions: slice,
        visible: Tensor | None,
    ) -> Tensor:
        drafter = self.drafter
        mask = None
        if visible is not None:  # (1, 1, m, past + m)
            mask = additive(visible, drafter.dtype, self._committed)[None, None]
        angles = drafter.cos[:, positions], drafter.sin[:, positions]
        out = drafter.head(features[None], tokens[None], angles, mask, self.cache)
        return out[0]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Level:
    """The w nodes of one depth of a static tree that have children, and these children."""

    nodes: Tensor  # int64 (w,): their indices among this depth's nodes
    parents: Tensor  # int64 (w,): their parents' indices in the level above
    # bool (w, m): which of the m nodes of levels so far, the root not counted, each attends to
    visible: Tensor
    candidates: int  # number of candidates needed per node
    # int64 (children,): index of each child's token among the (w * candidates) candidates
    pick: Tensor


def plan(tree: Tree) -> list[Level]:
    levels: list[Level] = []
    inner = tree.parents[:1]  # the root
    continued = inner[:0]  # nodes of levels, the root not counted

    for (first, _), (below, end) in pairwise(tree.levels):
        above = inner
        parents = tree.parents[below:end]
        ranks = tree.ranks[below:end]
        inner = torch.unique(parents)
        if first:
            continued = torch.cat((continued, inner))

        rows = torch.searchsorted(above, tree.parents[inner])
        visible = tree.ancestors[inner][:, continued]
        candidates = int(ranks.max()) + 1
        pick = torch.searchsorted(inner, parents) * candidates + ranks
        levels.append(Level(inner - first, rows, visible, candidates, pick))

    return levels


class StaticTree(HeadDrafter):
    def __init__(self, target: Target, head: Head, tree: Tree) -> None:
        self.template = tree.on(target.device)
        self.levels = plan(self.template)
        inner = sum(len(level.nodes) for level in self.levels[1:])
        super().__init__(target, head, inner=inner, max_nodes=len(tree))

    def expand(self, session: HeadSession, root: int, feature: Tensor) -> Draft:
        drafted = [torch.tensor([root], device=feature.device)]
        state = feature
        for depth, level in enumerate(self.levels):
            tokens = drafted[-1].index_select(0, level.nodes)
            above = state.index_select(0, level.parents)
            state, logits = self.after(session, depth, above, tokens)
            candidates = logits.topk(level.candidates, dim=-1).indices  # (w, candidates)
            drafted.append(candidates.view(-1).index_select(0, level.pick))
        return Draft(self.template, torch.cat(drafted))

    def after(
        self, session: HeadSession, depth: int, state: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the states (w, S) of w nodes and the logits (w, V), from their parents' states."""
        raise NotImplementedError
