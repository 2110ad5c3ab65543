"""What heads are trained on: batches of token sequences, with what of each a head has to predict."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from model.errors import UserError
from tools.embedded.corpus import TRAINING_SEED, training
from tools.embedded.encoding import Encoded, encode, shuffled

EMBEDDED = "embedded"
POOL = 256  # sequences that are sorted by length together


def sequences(text: str, tokenizer: Any, length: int, seed: int) -> Iterator[Encoded]:
    """Token sequences without end, at most `length` long.

    Args:
        text: `embedded`: dialogues that the shipped model was trained on, never one of its benches; only answers are
            predicted. Else a file: .jsonl (a `text` a row) or anything else as plain text; all of it is predicted.
        tokenizer: of the target, transformers' own kind.

    Raises:
        UserError: the file is missing, not readable or holds fewer than 8 tokens.
    """
    if text == EMBEDDED:
        yield from _embedded(tokenizer.backend_tokenizer, length, seed)
    chunks = _chunks(Path(text), tokenizer, length)
    rng = random.Random(seed)
    while True:
        rng.shuffle(chunks)
        yield from (Encoded(ids, [True] * len(ids)) for ids in chunks)


def _embedded(tokenizer: Tokenizer, length: int, seed: int) -> Iterator[Encoded]:
    dialogues = training(TRAINING_SEED + seed, easy_until=1)
    while True:
        for item in encode(tokenizer, [(d.turns, d.answers) for d in islice(dialogues, 64)]):
            if len(item) <= length:
                yield item


def _chunks(file: Path, tokenizer: Any, length: int) -> list[list[int]]:
    """The file's texts as ids, cut to `length`."""
    try:
        content = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"--text {file}: no such file (or say --text {EMBEDDED})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {file}: is not readable text ({error})") from None
    texts = [content]
    if file.suffix == ".jsonl":
        texts = []
        for number, line in enumerate(content.split("\n"), 1):  # not at U+2028 and others, which are text
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


def batches(stream: Iterator[Encoded], tokens: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of at most `tokens` with padding, of similar lengths.

    Yields:
        ids, int64 (rows, length), 0 behind a row's end; and bool (rows, length), which tokens are to be predicted.
    """
    rng = random.Random(seed)
    while True:
        for batch in shuffled(islice(stream, POOL), tokens, rng):
            length = max(map(len, batch))
            ids = torch.zeros(len(batch), length, dtype=torch.long)
            wanted = torch.zeros(len(batch), length, dtype=torch.bool)
            for row, item in enumerate(batch):
                ids[row, : len(item)] = torch.tensor(item.ids)
                wanted[row, : len(item)] = torch.tensor(item.answer)
            yield ids, wanted
