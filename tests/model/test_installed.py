"""The library under the name that pip installs it by: nothing in it may know it as `model`."""

import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from evaluation.records import provenance
from model import __version__
from model.files import ROOT
from model.structures.compiled import FILES

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


@pytest.mark.slow  # compiles the loops of drafting anew
def test_loops_that_were_compiled_under_one_name_of_the_package_run_under_the_other(tmp_path):
    """The notebook in a checkout imports model/ as token_recycling; the harness had failed after that."""
    shutil.copytree(
        ROOT / "model", tmp_path / "model", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "token_recycling").symlink_to(tmp_path / "model")
    says = "compiling the loops of drafting, once a machine: some 10 seconds\n"
    for name, other, said in (
        ("token_recycling", "model", says),
        ("model", "token_recycling", says),
        ("model", "token_recycling", ""),
    ):
        program = (
            f"import sys; sys.modules['{other}'] = None\n"
            f"from {name}.methods.dynamic import DynamicRecycling\n"
            "drafter = DynamicRecycling(9, nodes=4)\n"
            "session = drafter.session()\n"
            "session.begin([1, 2, 1])\n"
            "print(len(session.draft(1).tokens))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0 and int(done.stdout) > 1, done.stderr[-2000:]
        assert done.stderr == said


def test_what_is_kept_of_a_compiled_loop_depends_on_all_files_with_loops():
    files = {str(path.relative_to(ROOT / "model")) for path in (ROOT / "model").rglob("*.py")}
    assert {name for name in files if "\n@loop\n" in (ROOT / "model" / name).read_text()} == {
        f"structures/{file}" for file in FILES
    }


def test_the_version_has_one_source_and_is_in_records_and_the_changelog():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "token_recycling.__version__"
    }
    assert provenance.versions()["token-recycling"] == __version__
    headings = re.findall(r"^## ([\d.]+) ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert headings[0] == __version__ and headings[-1] == "0.1.0"
