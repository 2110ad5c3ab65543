"""The notebook: its cells run in order on a CPU, without a network, and leave what a reader is to see."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
import pytest
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples/quickstart.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


@pytest.fixture
def shown(monkeypatch) -> list[Any]:
    """As Jupyter does it: in the notebook's folder, the library not installed. What a notebook would display."""
    displayed: list[Any] = []
    module = ModuleType("IPython.display")
    module.SVG, module.display = str, displayed.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setattr(pyplot, "show", lambda: displayed.append(pyplot.gcf()))
    assert importlib.util.find_spec("token_recycling") is None
    with matplotlib.rc_context({"backend": "agg"}):
        yield displayed
        pyplot.close("all")
    for name in [name for name in sys.modules if name.startswith("token_recycling")]:
        del sys.modules[name]


def run(cells: list[dict[str, Any]], **parameters: Any) -> dict[str, Any]:
    """Execute code cells in one namespace, the parameters replaced; return it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, {cell['id']}", "exec"), names)
        if "parameters" in cell["metadata"].get("tags", ()):
            names |= parameters
    return names


def test_every_cell_runs_and_the_texts_are_equal(shown, capsys):
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)
    assert sum("parameters" in cell["metadata"].get("tags", ()) for cell in CODE) == 1
    names = run(CODE, MODEL=str(ROOT / "data/embedded"), NEW_TOKENS=24)
    assert list(names["equal"]) == ["stock generate", "plain", "dynamic", "recycling"]
    count = len(names["QUESTIONS"])
    assert all(same == [True] * count for same in names["equal"].values())
    assert capsys.readouterr().out.count(f"{count} of {count}") == 4
    figure, page = shown
    assert [axes.get_ylabel() for axes in figure.axes] == ["tokens per step", ""]
    assert page == names["picture"].svg(names["MODEL"])


def test_a_notebook_by_itself_asks_where_its_library_is(shown, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="REPOSITORY"):
        run(CODE[:2])
    installed = []
    monkeypatch.setattr("subprocess.run", lambda command, **_: installed.append(command))
    run(CODE[:2], REPOSITORY="https://example.org/repository")
    assert [command[-1] for command in installed] == ["git+https://example.org/repository"]
