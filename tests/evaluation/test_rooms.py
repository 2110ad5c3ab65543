"""The rooms of evaluation/: which may import which."""

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2] / "evaluation"
PLAIN = {"model.files", "model.errors", "model.decoding.tree"}  # what needs no model of the library
MAY = {  # a room: what of this repository it may import beside itself
    "records": {"model.files", "model.errors"},
    "statistics": {"records", *PLAIN, "model.recycling.matrix"},
    "figures": {"records", "statistics", *PLAIN},
    "page": {"records", "statistics", "figures", *PLAIN},
}


def rooms_of(path: Path) -> set[str]:
    """What of this repository a file imports: rooms of evaluation/, modules of model/; transformers, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
        elif isinstance(node, ast.ImportFrom) and node.level == 2:
            found |= {(node.module or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1, path
    ours = {name for name in found if name.split(".")[0] in ("model", "evaluation", "hydra_plugins", "tools")}
    rooms = {path.name for path in HERE.iterdir() if path.is_dir()}
    return ours | found & rooms | found & {"transformers"}


@pytest.mark.parametrize("room", MAY)
def test_a_room_imports_what_it_may(room):
    files = list((HERE / room).glob("*.py"))
    imported = {path.name: rooms_of(path) for path in files}
    if room == "page":
        imported["tokens.py"] -= {"transformers"}  # only where a tokenizer is no file of its own
    assert files and {name: extra for name, own in imported.items() if (extra := own - MAY[room])} == {}
