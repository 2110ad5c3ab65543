"""The library under the name that pip installs it by: nothing in it may know it as `model`."""

import re
import subprocess
import sys
import tomllib

from evaluation.records import provenance
from model import __version__
from model.compiled import FILES
from model.files import ROOT

LAZY = """
import sys
import model
assert not {"torch", "transformers", "numpy"} & set(sys.modules), "importing the library loads nothing heavy"
import model.methods
assert model.methods.table_place("hf") == 0 and "torch" not in sys.modules
from model import METHODS, Decoder, DeviceDrafter, Draft, Drafter, Generate, Session, Tree, engine
assert Decoder.__module__ == "model.decoder" and Generate.__module__ == "model.generate"
assert engine.Tree is Tree and {"Decoder", "Tree"} <= set(dir(model)) and "vanilla" in METHODS
try:
    model.Nonesuch
except AttributeError as error:
    assert "has no attribute 'Nonesuch'" in str(error)
else:
    raise AssertionError
"""


def test_exports_are_imported_when_they_are_asked_for():
    done = subprocess.run(
        [sys.executable, "-c", LAZY], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_is_kept_of_a_compiled_loop_depends_on_all_files_with_loops():
    folder = ROOT / "model"
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}
    using = {name for name, text in files.items() if re.search(r"compiled import .*\bloop\b", text)}
    assert using | {"compiled.py", "engine/target/intrinsics.py"} == {*FILES}


def test_the_version_has_one_source_and_is_in_records_and_the_changelog():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "token_recycling.__version__"
    }
    assert provenance.versions()["token-recycling"] == __version__
    headings = re.findall(r"^## ([\d.]+) ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert headings[0] == __version__ and headings[-1] == "0.1.0"
