"""Every causal family of transformers as a toy model, decoded by three methods: docs/models.csv.

python -m tests.model.families [FAMILY ...]     rewrites these families' rows, or all in six minutes
"""

from __future__ import annotations

import csv
import inspect
import logging
import sys
import warnings
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from model.engine import Target, generate
from model.errors import UserError
from model.files import ROOT
from model.generate import Generate
from model.methods import make_method
from tests.conftest import sharpened

TABLE = ROOT / "docs" / "models.csv"
V, WINDOW, NEW, MOST_PARAMETERS = 61, 8, 30, 7_000_000
METHODS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "dynamic": {"nodes": 10},
    "recycling": {"tree": "best:16"},
}
PROMPT = [5, 9, 13, 7, 5, 9, 13, 8, *[5, 9, 13, 7, 20, 21, 22] * 3, 30, 31, 5, 9]
# Whatever a configuration has of these names.
SMALL: dict[str, Any] = dict(
    vocab_size=V, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    sliding_window=WINDOW, attention_chunk_size=WINDOW, attention_window_size=WINDOW, n_embd=32, n_layer=4, n_head=4,
    n_positions=256, n_inner=48, d_model=32, ffn_dim=48, rotary_dim=8, n_ctx=256, ffn_hidden_size=48, d_ff=48,
    max_seq_len=256, n_heads=4, n_layers=4, num_layers=4, num_heads=4, embedding_size=32, word_embed_proj_dim=32,
    dim=32, kv_channels=8, block_size=8, intermediate_size_mlp=48, unpadded_vocab_size=V,
    # experts
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, moe_topk=2,
    moe_k=2, top_k=2, shared_expert_intermediate_size=16, n_group=1, topk_group=1, first_k_dense_replace=1,
    n_shared_experts=1, moe_num_experts=4, moe_num_shared_experts=1, num_shared_experts=1,
    moe_num_active_primary_experts=2,
    # latent and indexed attention
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, index_topk=8,
    index_n_heads=16, index_head_dim=16,
    # recurrent states
    state_size=8, ssm_state_size=8, mamba_d_state=8, mamba_num_heads=8, mamba_head_dim=8, mamba_n_heads=8,
    mamba_d_head=8, mamba_n_groups=1, n_groups=1, mamba_expand=2, expand=2, mamba_d_ssm=64, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, conv_kernel=4, mamba_d_conv=4,
    mamba_dt_rank=4, time_step_rank=4, chunk_size=16, mamba_chunk_size=16, lru_width=32, rms_norm=True, n_mamba_heads=1,
    attention_hidden_size=32, conv_dim=32, block_multiple_of=8, block_dim=32, block_ff_dim=48,
    # Gemma 3n and 4
    hidden_size_per_layer_input=8, vocab_size_per_layer_input=V, laurel_rank=4, num_kv_shared_layers=2,
    global_head_dim=8, num_global_key_value_heads=2,
)  # fmt: skip
LATENT = dict(num_key_value_heads=4, head_dim=None)
GEMMA4 = dict(
    layer_types=["sliding_attention", "full_attention"] * 3,
    num_hidden_layers=6,
    num_kv_shared_layers=2,
)
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        [
            "axk1",
            "axk2",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
        ],
        LATENT,
    ),
    **dict.fromkeys(["minicpm3", "sarvam_mla", "youtu"], LATENT),
    **dict.fromkeys(["gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"], GEMMA4),
    "bailing_hybrid": dict(layer_group_size=2, num_key_value_heads=4, head_dim=8),
    "bamba": dict(attn_layer_indices=[1, 3]),
    "jamba": dict(
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1
    ),
    "dory": dict(n_input_layers=1, n_recurrent_layers=2, n_output_layers=1),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"] * 2),
    "gpt_neo": dict(num_layers=4, attention_types=[[["global", "local"], 2]], window_size=8),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2, num_dense_layers=2),
    "mamba2": dict(num_heads=8, head_dim=8, expand=2, n_groups=1),
    "zamba": dict(attn_layer_period=2, attn_layer_offset=1, n_mamba_heads=2, num_key_value_heads=4),
    "zamba2": dict(
        layers_block_type=["mamba", "hybrid"] * 2,
        n_mamba_heads=8,
        num_key_value_heads=4,
        mamba_ngroups=1,
        attention_hidden_size=64,
        attention_head_dim=16,
        head_dim=16,
        mamba_headdim=8,
    ),
    "longcat_flash": LATENT | dict(num_layers=2, head_dim=8),
    "qwen4_exp_text": dict(
        layer_types=["linear_attention", "full_attention"] * 2,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=2,
    ),
    "zaya": dict(num_experts_per_tok=1, num_experts=4),
    "kimi_linear": dict(
        num_key_value_heads=4,
        head_dim=None,
        linear_head_dim=8,
        linear_num_heads=4,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
}


def families() -> list[str]:
    """List the families of causal models that transformers has, encoder-decoders left out."""
    names = []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            if CONFIG_MAPPING[name]().is_encoder_decoder:
                continue
        except Exception:  # a configuration without defaults; it is reported as not built
            pass
        names.append(name)
    return names


def toy(family: str) -> Any:
    """Return a random model of a family, sharpened so that its text depends on all that it sees."""
    text = CONFIG_MAPPING[family]().get_text_config()
    names = {
        *vars(text),
        *getattr(text, "attribute_map", {}),
        *inspect.signature(type(text).__init__).parameters,
    }
    own = OWN.get(family, {})
    values = {name: value for name, value in (SMALL | own).items() if name in names or name in own}
    config = type(text)(
        **{name: v for name, v in values.items() if v is not None or name == "eos_token_id"}
    )
    with torch.device("meta"):
        size = sum(
            parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters()
        )
    if size > MOST_PARAMETERS:
        raise ValueError(f"has {size} parameters at its smallest")
    torch.manual_seed(0)
    return sharpened(AutoModelForCausalLM.from_config(config).eval(), 3.0)


def verdict(family: str) -> tuple[str, str]:
    """Say whether a family is driven.

    Returns:
        yes, no (refused) or not built, and how or why; WRONG where a text is another one.
    """
    try:
        model = toy(family)
        own = _generated(model)
    except Exception as error:  # whatever a family of transformers makes of such sizes
        return "not built", f"{type(error).__name__}"
    try:
        target = Target(model)
    except UserError as error:
        return "no", str(error).partition(": ")[2]
    try:
        other = _others(model, target, own)
    except Exception as error:  # a traceback is as wrong as a wrong text
        other = [f"{type(error).__name__}: {error}"]
    if other:
        return "WRONG", ", ".join(other)
    windows = "windows or chunks" if target._windows else ""
    return "yes", ", ".join(
        filter(None, ("recurrent states, drafts are chains" if target.recurrent else "", windows))
    )


def _others(model: Any, target: Target, own: list[int]) -> list[str]:
    """Decode by each method, cold and hot, and inside `generate`; return which give another text."""
    other = []
    for name, given in METHODS.items():
        drafter = make_method(name, target, **given)
        for start in ("cold", "hot"):
            if generate(target, drafter, PROMPT, max_new_tokens=NEW).tokens != own:
                other.append(f"{name} {start}")
    if _generated(model, custom_generate=Generate(nodes=8, linear="torch")) != own:
        other.append("generate")
    return other


def _generated(model: Any, **settings: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    settings |= dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[
        0, len(PROMPT) :
    ].tolist()
    return tokens


def rows() -> dict[str, tuple[str, str]]:
    """Return what the list says of each family."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {row["family"]: (row["works"], row["why"]) for row in csv.DictReader(file)}


def write(verdicts: dict[str, tuple[str, str]]) -> None:
    """Write docs/models.csv."""
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["family", "works", "why"])
        for family, verdict in sorted(verdicts.items()):
            table.writerow([family, *verdict])


def main(names: list[str]) -> None:
    """The command line."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    verdicts = rows() if names else {}
    for family in names or families():
        verdicts[family] = verdict(family)
        print(family, *verdicts[family], flush=True)
        write(verdicts)


if __name__ == "__main__":
    main(sys.argv[1:])
