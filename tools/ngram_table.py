"""python -m tools.ngram_table IDS... --vocab-size V --output FILE: a frozen table for method=ngram_cache.

IDS are JSONL files of the target's token ids: each line is a list of ids, or a row of a run's answers.jsonl, of
which the output ids are read. The most frequent n-grams are kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from evaluation.errors import user_errors
from model.errors import UserError
from model.ngrams.ngram_table import NgramTable


def read_ids(path: Path, vocab_size: int) -> Iterator[list[int]]:
    """Read the sequences of token ids in a file. Raises UserError, with file and line, for anything else."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would also cut at U+2028, which is text
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
            sequences = (
                [ids for choice in row["choices"] for ids in choice["output_ids"]] if isinstance(row, dict) else [row]
            )
        except (json.JSONDecodeError, KeyError, TypeError):
            raise UserError(f"{where}: neither a list of token ids nor a row of a run's answers.jsonl") from None
        for ids in sequences:
            yield check_ids(ids, vocab_size, where)


def check_ids(ids: object, vocab_size: int, where: str) -> list[int]:
    """Return the ids if all are token ids of this vocabulary; raise UserError otherwise."""
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise UserError(f"{where}: must be a list of token ids (whole numbers)")
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise UserError(f"{where}: token id {wrong} is outside the vocabulary of {vocab_size} (--vocab-size)")
    return ids


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.ngram_table", description=__doc__)
    parser.add_argument("ids", nargs="+", type=Path, help="JSONL files of token ids")
    parser.add_argument("--vocab-size", type=int, required=True, help="width of the target's logits")
    parser.add_argument("--output", type=Path, required=True, help="the table (safetensors)")
    parser.add_argument("--leader", type=int, default=1)
    parser.add_argument("--follower", type=int, default=3)
    parser.add_argument("--capacity", type=int, default=32768, help="leaders kept")
    parser.add_argument("--followers", type=int, default=8, help="kept for each leader")
    given = parser.parse_args(arguments)
    with user_errors():
        texts = (ids for path in given.ids for ids in read_ids(path, given.vocab_size))
        table = NgramTable.of_corpus(
            texts, given.leader, given.follower, capacity=given.capacity, followers=given.followers
        )
        if not len(table):
            raise UserError(f"{given.ids[0]}: no n-gram of {given.leader} + {given.follower} tokens in it")
        table.save(given.output, given.vocab_size)
        print(f"{given.output}: {len(table)} leaders")


if __name__ == "__main__":
    main()
