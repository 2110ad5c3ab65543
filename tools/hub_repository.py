"""python -m tools.hub_repository FOLDER: write a repository for the hub, by which `generate` drafts.

    model.generate(..., custom_generate=FOLDER_OR_HUB_NAME, trust_remote_code=True)

The layout is transformers' (5.23, `load_custom_generate`). It holds no code of the library: its requirements name it.
"""

import argparse
import shutil
from pathlib import Path

from model import __version__
from model.files import ROOT


def write_repository(folder: Path) -> None:
    """Write the repository's files into a new folder. Raises FileExistsError if it is there."""
    shutil.copytree(ROOT / "custom_generate", folder / "custom_generate", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "custom_generate/README.md").rename(folder / "README.md")
    (folder / "custom_generate/requirements.txt").write_text(f"token-recycling>={__version__}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.hub_repository", description="Write a hub repository.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if folder.exists():
        parser.error(f"{folder}: is there already; name a new folder")
    write_repository(folder)
