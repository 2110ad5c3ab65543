"""A toy checkpoint in the layout of the published Vicuna repositories: sharded weights, sentencepiece tokenizer."""

import json
from pathlib import Path

import sentencepiece
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import sharpened

TEXT = """A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed,
and polite answers to the user's questions. USER: what is the answer to question one? ASSISTANT: the answer is one."""


def write_tokenizer(folder: Path) -> int:
    """tokenizer.model with byte fallback, as LLaMA's; returns its size."""
    corpus = folder / "corpus.txt"
    corpus.write_text(TEXT + "\n".join(TEXT.split()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    corpus.unlink()
    (folder / "tokenizer.vocab").unlink()
    specials = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        **specials,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": 2048}))
    (folder / "special_tokens_map.json").write_text(json.dumps(specials))
    return sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model")).get_piece_size()


def write_checkpoint(
    folder: Path, *, positions: int = 512, shard: str = "60KB", kv_heads: int = 4
) -> Path:
    """A random LLaMA with that tokenizer, whose weights come in several shards."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=write_tokenizer(folder),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        intermediate_size=48,
        max_position_embeddings=positions,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    sharpened(LlamaForCausalLM(config)).save_pretrained(folder, max_shard_size=shard)
    return folder
