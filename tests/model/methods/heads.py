"""Random heads for toy models, in the public layouts, and EAGLE's sums by a specification of our own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from model.methods.trained import eagle, hydra, medusa
from model.methods.trained.heads import layer_config

State = dict[str, torch.Tensor]
Change = Callable[[State], Any]
IDS = "eagle_aux_hidden_state_layer_ids"
OF_LAYER = dict(
    model_type="llama",
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=40,
    rope_theta=500.0,
    rms_norm_eps=1e-5,
)


def write_medusa(folder: Path, model: PreTrainedModel, heads=4, layers=1, shared=False, **how):
    vocab, hidden = model.lm_head.weight.shape
    made = medusa.MedusaHeads(heads, layers, hidden, vocab, shared=shared)
    values = {"medusa_num_heads": heads, "medusa_num_layers": layers, "shared_lm_head": shared}
    return written(folder, random_state(made), values, medusa.WEIGHTS, **how)


def write_hydra(folder: Path, model: PreTrainedModel, heads=4, blocks=3, pickled=False, **how):
    """As public files have them, the blocks behind a head's first one are repeated."""
    layer = layer_config(model.config.to_dict() | {"num_hidden_layers": 1})
    embedding = model.get_input_embeddings().weight.detach()
    sizes = dict(heads=heads, blocks=blocks, vocab_size=model.config.vocab_size)
    made = hydra.HydraHeads(layer, embedding, **sizes)
    state = random_state(made)
    made.load_state_dict(state)
    state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    if pickled:
        state["prefix_embeding_layer.embed_tokens.weight"] = torch.randn_like(embedding)
        state["input_embed_fn.weight"] = embedding.half()
    values = dict(hydra.SUPPORTED, hydra_num_heads=heads, hydra_num_layers=blocks)
    return written(folder, state, values, hydra.WEIGHTS, pickled=pickled, **how)


def write_eagle(folder: Path, model: PreTrainedModel, **how):
    vocab, hidden = model.lm_head.weight.shape
    values = dict(OF_LAYER, hidden_size=hidden, vocab_size=vocab)
    made = eagle.EagleHead(LlamaConfig(**values), torch.zeros(vocab, hidden))
    return written(folder, random_state(made), values, eagle.WEIGHTS, **how)


def write_eagle3(
    folder: Path, model: PreTrainedModel, rows=40, hidden=32, outputs=(-1, 0), **how
) -> str:
    """A head that reads the embeddings and the first layer, for every so-manieth token.

    Args:
        hidden: of the head; another one than the model's takes an embedding along.
        outputs: of which layers it reads, as config.json names them.
    """
    vocab, width = model.lm_head.weight.shape
    values = dict(OF_LAYER, hidden_size=hidden, vocab_size=vocab, draft_vocab_size=rows)
    if outputs:
        values["eagle_config"] = {IDS: list(outputs)}
    sizes = dict(reads=(0,), width=len(outputs or "123") * width, rows=rows)
    embedding = torch.randn(vocab, hidden)
    state = random_state(eagle.Eagle3Head(LlamaConfig(**values), embedding, **sizes))
    if hidden != width:
        values["target_hidden_size"] = width
        state["embed_tokens.weight"] = embedding
    if rows != vocab:
        ids = torch.arange(rows) * (vocab - 1) // (rows - 1)
        state["d2t"] = ids - torch.arange(rows)
        state["t2d"] = torch.zeros(vocab).index_fill_(0, ids, 1).bool()
    return written(folder, state, values, eagle.WEIGHTS, **how)


WRITERS = {
    "medusa": write_medusa,
    "hydra": write_hydra,
    "eagle": write_eagle,
    "eagle3": write_eagle3,
}
LOADERS = {
    "medusa": medusa.load_heads,
    "hydra": hydra.load_heads,
    "eagle": eagle.load_head,
    "eagle3": eagle.load_eagle3_head,
}


def random_state(head: nn.Module) -> State:
    """Weights of which every one matters."""
    torch.manual_seed(4)
    return {
        name: 1 + torch.rand_like(p) if "norm" in name else torch.randn_like(p) * 0.3
        for name, p in head.state_dict().items()
    }


def written(
    folder: Path,
    state: State,
    values: dict[str, Any],
    names: tuple[str, ...],
    *,
    pickled: bool = False,
    change: Change | None = None,
    **config: Any,
) -> str:
    """Write a head; returns the folder.

    Args:
        pickled: in a torch file.
        change: given the tensors before they are written.
        config: further keys of config.json.
    """
    if change is not None:
        change(state)
    folder.mkdir(parents=True, exist_ok=True)
    if pickled:
        torch.save(state, folder / names[1])
    else:
        save_file(state, folder / names[0])
    (folder / "config.json").write_text(json.dumps(values | config))
    return str(folder)


def added(**sizes: int) -> Change:
    """Put random norms into a head's tensors."""
    return lambda state: state.update(
        {f"{name}.weight": 1 + torch.rand(size) for name, size in sizes.items()}
    )


def biased(*layers: str) -> Change:
    return lambda state: state.update(
        {f"{name}.bias": torch.randn(len(state[f"{name}.weight"])) * 0.3 for name in layers}
    )


def without(*names: str) -> Change:
    return lambda state: [state.pop(name) for name in names]


def called(old: str, new: str) -> Change:
    """Call a part of the tensors' names otherwise."""

    def change(state: State) -> None:
        for name in [name for name in state if old in name]:
            state[name.replace(old, new, 1)] = state.pop(name)

    return change


ACTS = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu}


def sums(
    values: dict[str, Any],
    state: State,
    embedding: torch.Tensor,
    states: torch.Tensor,
    tokens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """EAGLE's or EAGLE-3's head over a whole text, from the public specifications.

    There is no cache, and nothing of transformers.

    Args:
        values: config.json without nesting.
        state: the file's tensors by public names.
        states: (n, w H) of the target; tokens: (n,), those after each.

    Returns outputs (n, H), which are the features of drafted nodes, and what the output matrix
    multiplies (n, H).
    """
    w = {
        name.removeprefix("midlayer.").removeprefix("layers.0."): tensor.double()
        for name, tensor in state.items()
    }
    newer = "hidden_norm.weight" in w
    eps = values.get("rms_norm_eps", 1e-6)
    dim = values["hidden_size"] // values["num_attention_heads"]
    scaling = values.get("rope_scaling") or values.get("rope_parameters") or {}
    theta = values.get("rope_theta", scaling.get("rope_theta", 10000.0))
    stretch = scaling["factor"] if scaling.get("type") == "linear" else 1.0

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], eps)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def heads_of(name):  # (heads, n, dim)
        return linear(x, f"self_attn.{name}_proj").view(len(x), -1, dim).transpose(0, 1)

    def rotate(x):  # pairs (i, i + dim / 2) turn by t / theta^(2 i / dim)
        speed = 1 / stretch / theta ** (torch.arange(0, dim, 2).double() / dim)
        angle = torch.arange(len(tokens)).double()[:, None] * speed
        turned = torch.complex(*x.split(dim // 2, -1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real, turned.imag), -1)

    states = states.double()
    embedded = embedding[tokens].double()
    if newer:
        if values.get("norm_before_fc"):
            states = norm(states, "input_norm")
        if values.get("fc_norm"):
            parts = states.split(len(w["fc_norm.0.weight"]), -1)
            states = torch.cat([norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        feature = linear(states, "fc")
        normed = norm(feature, "hidden_norm")
        x = torch.cat((norm(embedded, "input_layernorm"), normed), -1)
        residual = normed if values.get("norm_before_residual") else feature
    else:
        x = residual = linear(torch.cat((embedded, states), -1), "fc")

    query = rotate(heads_of("q"))
    key = rotate(heads_of("k"))
    attended = F.scaled_dot_product_attention(
        query, key, heads_of("v"), is_causal=True, enable_gqa=True
    )
    attended = attended.transpose(0, 1).flatten(1)
    out = residual + linear(attended, "self_attn.o_proj")
    z = norm(out, "post_attention_layernorm")
    act = ACTS[values.get("hidden_act", "silu")]
    out = out + linear(act(linear(z, "mlp.gate_proj")) * linear(z, "mlp.up_proj"), "mlp.down_proj")
    if newer:
        last = norm(out, "norm")
        return (last if values.get("norm_output") else out).float(), last.float()
    return out.float(), out.float()
