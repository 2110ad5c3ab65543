"""Token ids and rank paths as text, for people: with the model's own tokenizer where it is on this machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer

from model.engine.tree import RankPath
from model.files import ROOT

from ..records.provenance import CONVERTED
from ..records.runs import Run

CONTEXT = 6  # tokens before a piece that decide its leading space and join broken characters
Decode = Callable[[list[int]], str]
MOST_EQUAL = 3  # ranks in a row that are spelled out
BROKEN = "\ufffd"  # what a tokenizer decodes an unfinished character to


class Decoder:
    """Decodes with each run's tokenizer, from local files only.

    Attributes:
        failures: why a model's ids could not be decoded, by the model's path.
    """

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        self.failures: dict[str, str] = {}

    def pieces(self, run: Run, ids: list[int]) -> list[str] | None:
        """Return one text for each id, which join to the whole text; None if there is no tokenizer."""
        model = run.settings["model"] | run.metadata.get("config", {}).get("model", {})
        path, revision, source = str(model.get("path")), model.get("revision"), run.metadata.get("converted_from")
        key = (path, tuple(ids))
        if path not in self.failures and key not in self._pieces:
            try:
                folder = converted(source["sha256"]) if source else path
                self._pieces[key] = split(load(folder, revision), ids)
            except Exception as error:  # whatever a foreign tokenizer trips over: the page goes without, and says so
                self.failures[path] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return self._pieces.get(key)


def converted(sha256: str) -> str:
    """Return the folder that a GGUF file of this hash was converted to. Raises FileNotFoundError if it is not here."""
    folders = sorted(CONVERTED.glob(f"*-{sha256[:16]}-*"))
    if not folders:
        raise FileNotFoundError(f"its GGUF file of sha256 {sha256[:12]} was not converted here")
    return str(folders[-1])


@lru_cache(maxsize=4)
def load(path: str, revision: str | None = None) -> Decode:
    """Load the decoding of a model's tokenizer, special tokens included, from local files only and without its code."""
    folder = next((p for p in (Path(path).expanduser(), ROOT / path) if p.is_dir()), None)
    if folder is not None and (folder / "tokenizer.json").is_file():
        fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return lambda ids: str(fast.decode(ids, skip_special_tokens=False))
    if folder is None and path.startswith(("/", ".", "~")):
        raise FileNotFoundError(f"no folder {path}")
    from transformers import AutoTokenizer  # takes seconds to import: only where nothing else will do

    slow = AutoTokenizer.from_pretrained(
        str(folder or path), revision=revision, local_files_only=True, trust_remote_code=False
    )
    return lambda ids: str(slow.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def split(decode: Decode, ids: list[int]) -> list[str]:
    """Return the text that each id adds; inside a character an id adds nothing, the last id of it adds all of it."""
    pieces: list[str] = []
    begin = done = 0  # ids[begin:done] is context; what is decoded anew starts at done
    for end in range(1, len(ids) + 1):
        before = decode(ids[begin:done]) if begin < done else ""
        now = decode(ids[begin:end])
        if now.endswith(BROKEN) and end < len(ids) and end - done < CONTEXT:
            pieces.append("")
            continue
        pieces.append(now[len(before) :])
        begin, done = max(begin, end - CONTEXT), end
    return pieces


def spelled(path: RankPath) -> str:
    """Spell the ranks from the root down: 0·0·1; of a deep path 0×36 is the same rank 36 times. Empty for the root."""
    runs = [(str(rank), len(list(same))) for rank, same in groupby(path)]
    return "·".join(f"{rank}×{n}" if n > MOST_EQUAL else "·".join([rank] * n) for rank, n in runs)
