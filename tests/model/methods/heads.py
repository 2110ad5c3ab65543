"""Random heads for toy models, written in the public layouts."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedModel

from model.methods.medusa import MedusaHeads
from model.structures.heads import EagleHead


def write_medusa(folder: Path, hidden=32, vocab=61, heads=4, layers=1, shared=False, pickled=False, **config) -> str:
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
    values = {"medusa_num_heads": heads, "medusa_num_layers": layers} | ({"shared_lm_head": True} if shared else {})
    (folder / "config.json").write_text(json.dumps(values | config))
    return str(folder)


def write_eagle(folder: Path, model: PreTrainedModel, pickled=False, embedding=None, bias=True, **config) -> str:
    """A LLaMA-like head with grouped heads, in the published form if pickled; returns the folder."""
    torch.manual_seed(4)
    hidden, vocab = model.config.hidden_size, model.config.vocab_size
    values = dict(model_type="llama", hidden_size=hidden, num_hidden_layers=1, num_attention_heads=4)
    values |= dict(num_key_value_heads=2, intermediate_size=40, vocab_size=vocab, rope_theta=500.0, rms_norm_eps=1e-5)
    made = EagleHead(LlamaConfig(**values), torch.zeros(vocab, hidden), bias=bias)
    state = {
        name: 1 + torch.rand_like(p) if "norm" in name else torch.randn_like(p) * 0.3
        for name, p in made.state_dict().items()
    }
    if embedding is not None:
        state["embed_tokens.weight"] = embedding
    folder.mkdir(parents=True, exist_ok=True)
    if pickled:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values | config))
    return str(folder)
