"""python -m tools.datastore --model PATH --text FILE [FILE...] --output FILE: a datastore for
`method=rest`.

A .txt file is one document; a .jsonl file has one per line, {"text": ...}. The model's own
tokenizer tokenises the documents. The end-of-sequence token follows each document, so that no draft
continues into the next one.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from evaluation.errors import user_errors
from model.errors import Parser, UserError, one_line
from model.files import local_path, located
from model.methods.copying.datastore import write_datastore

BLOCK = 4096  # lines of a .txt file tokenised at once


def documents(files: Iterable[Path]) -> Iterator[list[str]]:
    """Read the documents of files, in pieces that can be tokenised separately.

    Raises UserError naming file and line.
    """
    for file in files:
        if file.suffix not in (".txt", ".jsonl"):
            raise UserError(f"{file}: must be a .txt or .jsonl file")
        try:
            with file.open(encoding="utf-8-sig") as lines:
                if file.suffix == ".txt":
                    yield list(iter(lambda: "".join(islice(lines, BLOCK)), ""))
                    continue
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield [_text(line, f"{file}:{number}")]
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror or error})") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: is not UTF-8 ({error.reason})") from None


def _text(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error})") from None

    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise UserError(f"{where}: holds no text (a field `text`)")
    return str(row["text"])


def load_tokenizer(path: str) -> tuple[Any, int]:
    """Load a model's tokenizer and the width of its logits. Raises UserError if there is none."""
    folder = located(path)
    source = str(folder) if folder.exists() else path
    transformers_logging.set_verbosity_error()  # no warning of texts longer than the context

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        return tokenizer, int(config.get_text_config().vocab_size)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"model {path}: no configuration or tokenizer ({one_line(error)[:300]})"
        ) from None


def build(tokenizer: Any, vocab_size: int, texts: Iterable[Sequence[str]], output: Path) -> None:
    """Tokenise, sort and write the texts. The end-of-sequence token follows each document."""
    ids = array("q")
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for document in texts:
        for piece in document:
            ids.extend(tokenizer(piece, add_special_tokens=False).input_ids)
        ids.extend(ends)

    write_datastore(output, np.array(ids, dtype=np.int64), vocab_size)
    print(f"{output}: {len(ids)} tokens, {output.stat().st_size / 1e6:.1f} MB")


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m tools.datastore", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument(
        "--model",
        required=True,
        help="folder or hub name of the model whose tokenizer is used",
    )
    parser.add_argument(
        "--text", type=local_path, nargs="+", required=True, help=".txt and .jsonl files"
    )
    parser.add_argument("--output", type=local_path, required=True, help="the file to write")
    with user_errors("nothing was written"):
        options = parser.parse_args(arguments)
        build(*load_tokenizer(options.model), documents(options.text), options.output)


if __name__ == "__main__":
    main()
