"""A BPE tokenizer in the manner of LLaMA: byte fallback, digits one by one, BOS in front, lossless."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from model.files import replaced, write_json

VOCABULARY = 2048
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

# Punctuation stays single, so that a word has the same token before a comma and before a full stop:
# a small model then copies it without relearning it. Indentation keeps its last space for the next word.
PIECES = r'```|"""| ?\p{L}+|_\p{L}+|\d|\n| +(?= )| ?[^\s\p{L}\d]|\s'

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
# fschat's vicuna_v1.1, in which the model was trained, behind the BOS that a tokenizer adds to text but not to a chat
CHAT = (
    '{{ bos_token + "' + SYSTEM + " \" }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'USER: ' + message['content'] + ' ' }}{% elif message['role'] == 'assistant' %}"
    "{{ 'ASSISTANT: ' + message['content'] + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def build(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Train the merges on texts and put the special tokens and the 256 bytes in front, as LLaMA does."""
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = split
    reserved = len(SPECIALS) + len(BYTES)
    learner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary - reserved,
            show_progress=False,
            min_frequency=2,
            initial_alphabet=[chr(c) for c in range(32, 127)] + ["\n"],
        ),
    )
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    vocab = {piece: i for i, piece in enumerate([*SPECIALS, *BYTES, *pieces])}
    tokenizer = Tokenizer(
        models.BPE(vocab, [(a, b) for a, b in learned["merges"]], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, length: int) -> None:
    """Write tokenizer.json and the configuration that AutoTokenizer reads."""
    with replaced(folder / "tokenizer.json") as partial:
        tokenizer.save(str(partial))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
        "padding_side": "left",
        "chat_template": CHAT,
    }
    write_json(folder / "tokenizer_config.json", config)
