"""python -m tools.hub_repository FOLDER: write a hub repository with which transformers' `generate`
drafts.

    model.generate(..., custom_generate=FOLDER_OR_HUB_NAME, trust_remote_code=True)

The layout is transformers' (5.23, `load_custom_generate`). The repository holds no code of the
library: its requirements.txt names the package.
"""

import shutil
from pathlib import Path

from evaluation.errors import user_errors
from model import __version__
from model.errors import Parser
from model.files import ROOT, local_path


def write_repository(folder: Path) -> None:
    """Write the repository's files over an older version's.

    Raises FileExistsError for another one's README.md.
    """
    source = ROOT / "custom_generate"
    card = folder / "README.md"
    if card.exists():
        text = card.read_text()
        if not text.startswith("---") or "custom_generate" not in text:
            raise FileExistsError(f"{card} is another's; name a new folder or delete it")

    no_bytecode = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, folder / source.name, dirs_exist_ok=True, ignore=no_bytecode)
    (folder / source.name / "README.md").replace(card)
    (folder / source.name / "requirements.txt").write_text(f"token-recycling>={__version__}\n")


if __name__ == "__main__":
    parser = Parser(prog="python -m tools.hub_repository", description="Write a hub repository.")
    parser.add_argument("folder", type=local_path)
    with user_errors():
        write_repository(parser.parse_args().folder)
