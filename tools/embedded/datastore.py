"""python -m tools.embedded.datastore: write data/embedded/datastore.bin, from which `method=rest` drafts.

230 training dialogues, as the embedded model is asked them; no held-out question is among them. Deterministic: a test
checks that this program still writes the shipped file. Run it again when the corpus or the tokenizer has changed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from evaluation.running.errors import user_errors
from tools.datastore import build, load_tokenizer
from tools.embedded.corpus import training
from tools.embedded.encoding import text_and_spans
from tools.embedded.train import FOLDER

DIALOGUES = 230
SEED = 31108252  # other dialogues than the model's training begins with; easy ones are as rare as at its end


def texts() -> Iterator[list[str]]:
    """The dialogues as documents. The template ends each answer, so the last end-of-sequence token is left out."""
    for dialogue in islice(training(SEED, easy_until=1), DIALOGUES):
        yield [text_and_spans(dialogue.turns, dialogue.answers)[0].removesuffix("</s>")]


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.embedded.datastore", description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER / "datastore.bin", help="(default %(default)s)")
    options = parser.parse_args(arguments)
    with user_errors():
        build(*load_tokenizer(str(FOLDER)), texts(), options.output)


if __name__ == "__main__":
    main()
