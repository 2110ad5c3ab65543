"""Token ids as text pieces, for people: with the model's own tokenizer where it is on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..questions import ROOT
from ..tables import Run

WINDOW = 6  # tokens before a piece that decide its leading space and join broken characters
BROKEN = "\ufffd"  # what a tokenizer decodes an unfinished character to


class Decoder:
    """Decodes with each run's tokenizer, loaded once and from local files only.

    Attributes:
        failures: why a model's ids could not be decoded, by the model's path.
    """

    def __init__(self) -> None:
        self._tokenizers: dict[tuple[str, str | None], Any] = {}
        self._pieces: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        self.failures: dict[str, str] = {}

    def pieces(self, run: Run, ids: list[int]) -> list[str] | None:
        """One text for each id, which join to the whole text; None if there is no tokenizer."""
        model = run.settings["model"]
        path = str(model.get("path"))
        key = (path, tuple(ids))
        if key not in self._pieces:
            tokenizer = self._tokenizer(path, model.get("revision"))
            if tokenizer is None:
                return None
            self._pieces[key] = split(tokenizer, ids)
        return self._pieces[key]

    def _tokenizer(self, path: str, revision: str | None) -> Any:
        key = (path, revision)
        if key not in self._tokenizers:
            self._tokenizers[key] = None
            try:
                from transformers import AutoTokenizer  # takes seconds to import: only where there is something to read

                folder = next((str(p) for p in (Path(path).expanduser(), ROOT / path) if p.is_dir()), path)
                self._tokenizers[key] = AutoTokenizer.from_pretrained(folder, revision=revision, local_files_only=True)
            except Exception as error:  # whatever a foreign tokenizer trips over: the page goes without, and says so
                self.failures[path] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return self._tokenizers[key]


def split(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text that each id adds; an id in the middle of a character adds nothing, the one that ends it all of it."""
    pieces: list[str] = []
    begin = done = 0  # ids[begin:done] is context; what is decoded anew starts at done
    for end in range(1, len(ids) + 1):
        before = _decode(tokenizer, ids[begin:done])
        now = _decode(tokenizer, ids[begin:end])
        if now.endswith(BROKEN) and end < len(ids) and end - done < WINDOW:
            pieces.append("")
            continue
        pieces.append(now[len(before) :])
        begin, done = max(begin, end - WINDOW), end
    return pieces


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)) if ids else ""


def visible(piece: str) -> str:
    """A token as a label: spaces and line ends can be seen, and long ones are cut."""
    shown = piece.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
    return shown if len(shown) <= 12 else shown[:11] + "…"
