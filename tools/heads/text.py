"""Training text of heads: token sequences, and which of their tokens a head has to predict."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.embedded.training.corpus import TRAINING_SEED, training
from data.embedded.training.dialogue import Encoded, encode
from model.errors import UserError

EMBEDDED = "embedded"


def sequences(text: str, tokenizer: Any, length: int, seed: int) -> Iterator[Encoded]:
    """Yield token sequences forever, each at most `length` long.

    Args:
        text: `embedded` for the dialogues that the shipped model was trained on, of which only answers are predicted.
            Else a file, .jsonl (a `text` per row) or plain text, of which all is predicted.
        tokenizer: of the target, transformers' own kind.

    Raises:
        UserError: the file is missing, not readable or holds fewer than 8 tokens.
    """
    if text == EMBEDDED:
        dialogues = training(TRAINING_SEED + seed, easy_until=1)
        yield from (item for item in encode(tokenizer.backend_tokenizer, dialogues) if len(item) <= length)
    chunks = _chunks(Path(text), tokenizer, length)
    rng = random.Random(seed)
    while True:
        rng.shuffle(chunks)
        yield from (Encoded(ids, [True] * len(ids)) for ids in chunks)


def _chunks(file: Path, tokenizer: Any, length: int) -> list[list[int]]:
    """Return the file's texts as ids, cut to `length`."""
    try:
        content = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"--text {file}: no such file (or say --text {EMBEDDED})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {file}: is not readable text ({error})") from None
    texts = [content]
    if file.suffix == ".jsonl":
        texts = []
        for number, line in enumerate(content.split("\n"), 1):  # splitlines would also cut at U+2028, which is text
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"--text {file}: line {number} is not JSON ({error})") from None
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise UserError(f"--text {file}: line {number} must be an object with a string `text`")
            texts.append(row["text"])
    chunks = []
    for ids in tokenizer(texts)["input_ids"]:
        chunks += [ids[i : i + length] for i in range(0, len(ids), length)]
    chunks = [ids for ids in chunks if len(ids) >= 8]
    if not chunks:
        raise UserError(f"--text {file}: holds fewer than 8 tokens")
    return chunks
