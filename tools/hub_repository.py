"""python -m tools.hub_repository FOLDER: write a repository for the hub, by which `generate` drafts.

    model.generate(..., custom_generate=FOLDER_OR_HUB_NAME, trust_remote_code=True)

The layout is transformers' (5.23, `load_custom_generate`). It holds no code of the library: its requirements name it.
"""

import argparse
from pathlib import Path

from evaluation.errors import user_errors
from model import __version__
from model.errors import UserError
from model.files import ROOT, write_text

SOURCE = ROOT / "custom_generate"


def write_repository(folder: Path) -> None:
    """Write the repository's files. Raises UserError if the folder has another README.md."""
    card = (SOURCE / "README.md").read_text(encoding="utf-8")
    here = folder / "README.md"
    if here.exists() and here.read_text(encoding="utf-8") != card:
        raise UserError(f"{here}: is of something else; name a new or empty folder")
    (folder / "custom_generate").mkdir(parents=True, exist_ok=True)
    write_text(here, card)
    write_text(folder / "custom_generate/generate.py", (SOURCE / "generate.py").read_text(encoding="utf-8"))
    write_text(folder / "custom_generate/requirements.txt", f"token-recycling>={__version__}\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.hub_repository", description="Write a hub repository.")
    parser.add_argument("folder", type=Path)
    with user_errors():
        write_repository(parser.parse_args().folder)


if __name__ == "__main__":
    main()
