"""Random heads for toy models, written in the public layouts."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedModel

from model.errors import UserError
from model.methods.eagle import Eagle3Head, EagleHead
from model.methods.hydra import HydraHeads
from model.methods.medusa import MedusaHeads
from model.structures.heads import Head, layer_config

HEAD_FILES = "model.safetensors", "pytorch_model.bin"
HYDRA_FILES = "hydra_lm_head.safetensors", "hydra_lm_head.pt"


def write_medusa(
    folder: Path, hidden=32, vocab=61, heads=4, layers=1, shared=False, pickled=False, **config
) -> str:
    """Heads whose every weight matters; returns the folder."""
    torch.manual_seed(3)
    state = {
        name: torch.randn_like(p)
        for name, p in MedusaHeads(heads, layers, hidden, vocab, shared=shared).state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    if pickled:
        torch.save(state, folder / "medusa_lm_head.pt")
    else:
        save_file(state, folder / "medusa_lm_head.safetensors")
    values = {"medusa_num_heads": heads, "medusa_num_layers": layers} | (
        {"shared_lm_head": True} if shared else {}
    )
    (folder / "config.json").write_text(json.dumps(values | config))
    return str(folder)


def write_eagle(
    folder: Path, model: PreTrainedModel, pickled=False, embedding=None, biased=("fc",), **config
) -> str:
    """A LLaMA-like head with grouped heads, in the published form if pickled; returns the folder."""
    torch.manual_seed(4)
    hidden, vocab = model.config.hidden_size, model.config.vocab_size
    values = dict(
        model_type="llama", hidden_size=hidden, num_hidden_layers=1, num_attention_heads=4
    )
    values |= dict(
        num_key_value_heads=2,
        intermediate_size=40,
        vocab_size=vocab,
        rope_theta=500.0,
        rms_norm_eps=1e-5,
    )
    state = random_state(EagleHead(LlamaConfig(**values), torch.zeros(vocab, hidden)))
    for name in biased:
        state[f"{name}.bias"] = torch.randn(len(state[f"{name}.weight"])) * 0.3
    if embedding is not None:
        state["embed_tokens.weight"] = embedding
    return written(folder, state, values | config, pickled)


def random_state(head: Head, *, biases: bool = False) -> dict[str, torch.Tensor]:
    """Weights of which every one matters."""
    return {
        name: 1 + torch.rand_like(p) if "norm" in name else torch.randn_like(p) * 0.3
        for name, p in head.state_dict().items()
        if biases or not name.endswith(".bias")
    }


def written(
    folder: Path, state: dict[str, torch.Tensor], config: dict, pickled: bool, files=HEAD_FILES
) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    if pickled:
        torch.save(state, folder / files[1])
    else:
        save_file(state, folder / files[0])
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def write_eagle3(
    folder: Path,
    model: PreTrainedModel,
    rows=40,
    hidden=32,
    pickled=False,
    change=None,
    outputs=(-1, 0),
    **config,
) -> str:
    """An EAGLE-3 head that reads the toy model's embeddings and first layer, for every so-manieth token.

    Args:
        hidden: of the head; another one than the model's takes an embedding along.
        change: given the tensors before they are written.
        outputs: of which layers it reads, as config.json names them.
    """
    torch.manual_seed(5)
    width, vocab = model.config.hidden_size, model.config.vocab_size
    values = dict(
        model_type="llama", hidden_size=hidden, num_hidden_layers=1, num_attention_heads=4
    )
    values |= dict(
        num_key_value_heads=2, intermediate_size=40, vocab_size=vocab, draft_vocab_size=rows
    )
    values |= (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(outputs)}} if outputs else {}
    )
    embedding = torch.randn(vocab, hidden)
    sizes = dict(reads=(0,), width=len(outputs or "123") * width, rows=rows)
    state = random_state(Eagle3Head(LlamaConfig(**values), embedding, **sizes))
    if hidden != width:
        values["target_hidden_size"], state["embed_tokens.weight"] = width, embedding
    if rows != vocab:
        ids = torch.arange(rows) * (vocab - 1) // (rows - 1)
        state |= {
            "d2t": ids - torch.arange(rows),
            "t2d": torch.zeros(vocab).index_fill_(0, ids, 1).bool(),
        }
    if change is not None:
        change(state)
    return written(folder, state, values | config, pickled)


def write_hydra(
    folder: Path, model: PreTrainedModel, heads=4, blocks=3, pickled=False, change=None, **config
) -> str:
    """Hydra heads for a LLaMA target; as public files have them, the blocks behind a head's first one are repeated."""
    torch.manual_seed(6)
    of_layer, embedding = (
        layer_config(model.config.to_dict() | {"num_hidden_layers": 1}),
        model.get_input_embeddings(),
    )
    made = HydraHeads(
        of_layer, embedding.weight, heads=heads, blocks=blocks, vocab_size=model.config.vocab_size
    )
    state = random_state(made, biases=True)
    for name in state:
        if name.startswith("hydra_mlp.") and int(name.split(".")[2]) > 3:
            head, _, *rest = name.removeprefix("hydra_mlp.").split(".")
            state[name] = state[".".join(["hydra_mlp", head, "3", *rest])].clone()
    if pickled:
        state["prefix_embeding_layer.embed_tokens.weight"] = torch.randn_like(embedding.weight)
        state["input_embed_fn.weight"] = embedding.weight.detach().half()
    if change is not None:
        change(state)
    values = {"hydra_num_heads": heads, "hydra_num_layers": blocks, "hydra_head_arch": "prefix-mlp"}
    values |= {"grounded_heads": True, "hidden_state_offset": 0}
    return written(folder, state, values | config, pickled, HYDRA_FILES)


def check_refused(
    broken: Iterable[tuple[dict, str]], folder: Path, load: Callable[[Path, dict], object]
) -> None:
    """Each of these heads, given by how its files differ from good ones, is refused in one line that says so."""
    for number, (how, says) in enumerate(broken):
        with pytest.raises(UserError, match=says) as caught:
            load(folder / str(number), how)
        assert "\n" not in str(caught.value)


ACTS = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu}


def sums(
    values: dict, state: dict, embedding: torch.Tensor, states: torch.Tensor, tokens: torch.Tensor
):
    """EAGLE's or EAGLE-3's head over a whole text, from the public specifications: no cache, no transformers.

    Args:
        values: config.json without nesting.
        state: the file's tensors by public names.
        states: (n, w H) of the target; tokens: (n,), those after each.

    Returns outputs (n, H), which are the features of drafted nodes, and what the output matrix multiplies (n, H).
    """
    w = {
        name.removeprefix("midlayer.").removeprefix("layers.0."): tensor.double()
        for name, tensor in state.items()
    }
    newer = "hidden_norm.weight" in w
    eps, heads = values.get("rms_norm_eps", 1e-6), values["num_attention_heads"]
    dim = values.get("head_dim") or values["hidden_size"] // heads
    scaling = values.get("rope_scaling") or values.get("rope_parameters") or {}
    theta = values.get("rope_theta", scaling.get("rope_theta", 10000.0))
    stretch = (
        scaling["factor"] if scaling.get("type", scaling.get("rope_type")) == "linear" else 1.0
    )

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def rotate(x):  # (n, heads, dim): pairs (i, i + dim / 2) turn by t / theta^(2 i / dim)
        angle = (
            torch.arange(len(x)).double()[:, None]
            / stretch
            / theta ** (torch.arange(0, dim, 2).double() / dim)
        )
        cos, sin, a, b = (
            angle.cos()[:, None],
            angle.sin()[:, None],
            x[..., : dim // 2],
            x[..., dim // 2 :],
        )
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    states, embedded = states.double(), embedding[tokens].double()
    if newer:
        states = norm(states, "input_norm") if values.get("norm_before_fc") else states
        if values.get("fc_norm"):
            parts = states.split(len(w["fc_norm.0.weight"]), -1)
            states = torch.cat([norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        feature = linear(states, "fc")
        normed = norm(feature, "hidden_norm")
        x = torch.cat((norm(embedded, "input_layernorm"), normed), -1)
        residual = normed if values.get("norm_before_residual") else feature
    else:
        x = residual = linear(torch.cat((embedded, states), -1), "fc")
    query, key, value = (
        linear(x, f"self_attn.{name}_proj").view(len(x), -1, dim) for name in "qkv"
    )
    query, key = rotate(query), rotate(key).repeat_interleave(heads // key.shape[1], 1)
    value = value.repeat_interleave(heads // value.shape[1], 1)
    scores = torch.einsum("thd,shd->hts", query, key) / math.sqrt(dim)
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf).softmax(-1)
    out = residual + linear(
        torch.einsum("hts,shd->thd", scores, value).flatten(1), "self_attn.o_proj"
    )
    z = norm(out, "post_attention_layernorm")
    gated = ACTS[values.get("hidden_act", "silu")](linear(z, "mlp.gate_proj")) * linear(
        z, "mlp.up_proj"
    )
    out = out + linear(gated, "mlp.down_proj")
    if newer:
        last = norm(out, "norm")
        return (last if values.get("norm_output") else out).float(), last.float()
    return out.float(), out.float()
