"""The notebook: its cells run in order on a CPU, without a network, and leave what a reader is to see."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples/quickstart.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


class Shown:
    """IPython.display: what was displayed, as a notebook would get it."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.module = ModuleType("IPython.display")
        self.module.HTML = lambda page: page  # type: ignore[attr-defined]
        self.module.display = self.objects.append  # type: ignore[attr-defined]


@pytest.fixture
def shown(monkeypatch) -> Shown:
    """As Jupyter does it: in the notebook's folder, the library not installed."""
    from matplotlib import pyplot

    display = Shown()
    monkeypatch.setitem(sys.modules, "IPython.display", display.module)
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setattr(pyplot, "show", lambda: display.objects.append(pyplot.gcf()))
    assert importlib.util.find_spec("token_recycling") is None
    with matplotlib.rc_context({"backend": "agg"}):
        yield display
        pyplot.close("all")
    for name in [name for name in sys.modules if name.split(".")[0] == "token_recycling"]:
        del sys.modules[name]


def run(cells: list[dict[str, Any]], **parameters: Any) -> tuple[dict[str, Any], int]:
    """Execute code cells in one namespace, the parameters replaced: its names, and how many cells ended."""
    names: dict[str, Any] = {"__name__": "__main__"}
    done = 0
    for cell in cells:
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, {cell['id']}", "exec"), names)
        done += 1
        if "parameters" in cell["metadata"].get("tags", ()):
            assert parameters.keys() <= names.keys()
            names |= parameters
    return names, done


def test_every_cell_runs_and_the_texts_are_equal(shown, capsys):
    names, done = run(CODE, MODEL=str(ROOT / "data/embedded"), NEW_TOKENS=24)
    assert done == len(CODE)
    assert list(names["equal"]) == ["stock generate", "plain", "dynamic", "recycling"]
    count = len(names["QUESTIONS"])
    assert all(same == [True] * count for same in names["equal"].values())
    for answers in names["results"].values():
        assert all(sum(answer["steps"]) == len(answer["ids"]) > 0 for answer in answers)
    table = capsys.readouterr().out
    assert table.count(f"{count} of {count}") == 4
    figure, page = shown.objects
    assert [axes.get_ylabel() for axes in figure.axes] == ["tokens per step", ""]
    assert "".join(text for text, _ in names["answer"]) and page.count("<span") == 5 + len(names["answer"])
    assert max(length for _, length in names["answer"]) > 1


def test_what_a_model_says_is_no_markup(shown):
    (cell,) = (cell for cell in CODE if "def coloured" in "".join(cell["source"]))
    source = "".join(cell["source"]).partition("\ndecoder = ")[0]
    run([CODE[1]])  # makes the library known by its name
    names, _ = run([{**cell, "source": source}])
    page = names["coloured"]([("<script>alert(1)</script>", 2), ('"><img src=x>', 7), ("a\u202eb", 1)])
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "\u202e" not in page and page.count("<span") == page.count("</span>") == 8


@pytest.mark.parametrize("given", [None, "somebody/model"])
def test_the_toy_model_replaces_the_small_one_alone(shown, monkeypatch, capsys, given):
    for auto in (AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(auto, "from_pretrained", without_the_hub(auto.from_pretrained))
    parameters = {} if given is None else {"MODEL": given}
    if given is not None:
        with pytest.raises(OSError, match="out of reach"):
            run(CODE[:3], **parameters)
        return
    names, _ = run(CODE[:3], **parameters)
    assert names["model"].num_parameters() < 3e6 and "toy model" in capsys.readouterr().out


def without_the_hub(load: Any) -> Any:
    """A loader that knows folders alone."""

    def local(name: Any, **options: Any) -> Any:
        if not Path(name).is_dir():
            raise OSError(f"{name}: out of reach")
        return load(name, **options)

    return local


def test_a_notebook_by_itself_asks_where_its_library_is(shown, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="REPOSITORY"):
        run(CODE[:2])
    installed = []
    monkeypatch.setattr("subprocess.run", lambda command, **_: installed.append(command))
    run(CODE[:2], REPOSITORY="https://example.org/repository")
    assert [command[-1] for command in installed] == ["git+https://example.org/repository"]


def test_no_outputs_are_kept():
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)
    assert sum("parameters" in cell["metadata"].get("tags", ()) for cell in CODE) == 1
