"""The house: arrows between folders, sizes a reader can hold, configs that compose, a quickstart that runs."""

import ast
import dataclasses
import inspect
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from packaging.markers import Marker

from evaluation.loading.bench import load_bench
from evaluation.loading.settings import ModelSettings
from model.engine import loop
from model.recycling import build_template

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("model", "evaluation", "hydra_plugins", "tools", "tests", "data/embedded", "data/novelty")
PYTHON_FILES = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")]
LIBRARY_ROOMS = ("engine", "recycling", "structures", "methods")


def name_of(path: Path) -> str:
    """A file's module, a folder's for its __init__."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, *, anywhere: bool = True) -> set[str]:
    """Modules that a file imports, relative names resolved; of `from x import y` also x.y, where that is a module.

    Args:
        anywhere: inside functions, too.
    """
    tree = ast.parse(path.read_text())
    inside = (
        {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)} if not anywhere else set()
    )
    package = name_of(path).split(".") if path.stem == "__init__" else name_of(path).split(".")[:-1]
    found = set()
    for node in (n for n in ast.walk(tree) if n not in inside):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            whole = {f"{module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= whole or {module}
    return found


MODULES = {name_of(path): path for path in PYTHON_FILES}
LIBRARY = {name: path for name, path in MODULES.items() if name.partition(".")[0] == "model"}
# What each room may import of the project, rooms or single modules, beside itself and what stands in model/ itself.
MAY_IMPORT = {
    "model": {"model.engine", "model.methods", "model.recycling"},
    "model.engine": set(),
    "model.recycling": {"model.engine"},
    "model.structures": {"model.engine"},
    "model.methods": {"model.engine", "model.recycling", "model.structures"},
    "evaluation.records": {"model.methods"},
    "evaluation.statistics": {"evaluation.records", "model.engine.tree", "model.recycling.matrix"},
    "evaluation.figures": {"evaluation.records", "evaluation.statistics"},
    "evaluation.page": {"evaluation.records", "evaluation.statistics", "evaluation.figures", "model.engine.tree"},
    "evaluation.loading": {"evaluation.records", "model.engine", "model.recycling"},
    "evaluation.configuration": {
        "evaluation.loading",
        "evaluation.records",
        *(f"model.{room}" for room in LIBRARY_ROOMS),
    },
    "evaluation.running": {
        "evaluation.configuration",
        "evaluation.loading",
        "evaluation.records",
        "evaluation.statistics",
        "model.engine",
    },
}


def room_of(module: str) -> str:
    """The innermost folder that a module stands in."""
    return module if (ROOT / module.replace(".", "/")).is_dir() else module.rpartition(".")[0]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_arrows_between_rooms_run_one_way(room):
    for name, path in MODULES.items():
        if room_of(name) == room:
            found = {module for module in imported(path) if module.split(".")[0] in ("model", "evaluation")}
            # the scheduler has the report drawn at the end: the one look up, at a command, from inside a function
            found -= {"evaluation.report"} if name == "evaluation.running.scheduling" else set()
            may = {room, "model", "evaluation.errors", *MAY_IMPORT[room]}
            assert not {module for module in found & MODULES.keys() if not {module, room_of(module)} & may}, name


def test_every_room_has_a_door_and_its_tests():
    for whole in ("model", "evaluation"):
        rooms = {f"{whole}.{p.parent.name}" for p in (ROOT / whole).glob("*/__init__.py")}
        assert rooms == {room for room in MAY_IMPORT if room.startswith(f"{whole}.")}
        assert {f"{whole}.{p.parent.name}" for p in (ROOT / "tests" / whole).glob("*/__init__.py")} == rooms
    for room in MAY_IMPORT:
        doc = ast.get_docstring(ast.parse(MODULES[room].read_text())) or ""
        assert "From outside" in doc and len(doc) > 60, f"{room}: says what lives there, and what may be imported"


def test_no_module_imports_in_a_circle():
    arrows = {name: imported(path, anywhere=False) & MODULES.keys() - {name} for name, path in MODULES.items()}
    list(TopologicalSorter(arrows).static_order())  # raises CycleError, which names the circle


@pytest.mark.parametrize("name", LIBRARY)
def test_the_library_imports_itself_relatively_and_no_harness(name):
    harness = {"evaluation", "hydra", "omegaconf", "fastchat", "tools", "data", "pandas", "matplotlib"}
    assert not {module.split(".")[0] for module in imported(LIBRARY[name])} & harness
    absolute = [
        n for n in ast.walk(ast.parse(LIBRARY[name].read_text())) if isinstance(n, ast.ImportFrom) and not n.level
    ]
    assert not [n.module for n in absolute if n.module and n.module.split(".")[0] == "model"]


@pytest.mark.parametrize("room", ["records", "statistics", "figures", "page"])
def test_what_reads_records_loads_no_model(room):
    heavy = {"transformers", "huggingface_hub", "accelerate", "hydra", "fastchat"}
    for path in (ROOT / "evaluation" / room).rglob("*.py"):
        assert not {module.split(".")[0] for module in imported(path, anywhere=False)} & heavy, path


def test_the_engine_knows_no_method_by_name():
    text = "".join(p.read_text().lower() for p in (ROOT / "model/engine").glob("*.py"))
    assert "def decode(" in text, "the engine is elsewhere"
    assert not re.search(r"recycl(?!ed)|\bpld\b|medusa|eagle|lookahead", text)


def test_a_reader_finds_the_algorithm():
    parts = ("matrix", "templates", "token_recycling")
    assert 100 < sum(len((ROOT / f"model/recycling/{p}.py").read_text().splitlines()) for p in parts) < 400
    assert len(inspect.getsource(loop._decode).splitlines()) < 60, "the engine's loop"


def test_files_and_functions_fit_on_a_few_screens():
    too_long = [str(p) for p in PYTHON_FILES if len(p.read_text().splitlines()) > 500]
    for path in PYTHON_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60:
                too_long.append(f"{path}: {node.name}")
    assert not too_long


def test_the_public_ci_runs_what_the_readme_says():
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["tests"]
    assert [step["run"] for step in jobs["steps"] if "run" in step] == ["bash .ci/run"]
    oldest = re.search(r'requires-python = ">=([\d.]+)', (ROOT / "pyproject.toml").read_text())[1]
    assert oldest in jobs["strategy"]["matrix"]["python"]
    assert "actions/workflows/test.yml/badge.svg" in (ROOT / "README.md").read_text()


def test_every_third_party_import_is_pinned():
    """Each imported top-level module belongs to the standard library, to us, or to a pinned requirement."""
    provided_by = {
        "fastchat": "fschat",
        "hydra": "hydra-core",
        "yaml": "PyYAML",
        "PIL": "pillow",
    }
    files = ("requirements.txt", "tests/requirements.txt", "tests/requirements-quantize.txt")
    pins = "".join((ROOT / file).read_text() for file in files)
    pinned = {line.split("==")[0].lower() for line in pins.splitlines() if "==" in line}
    modules = {module.split(".")[0] for path in PYTHON_FILES for module in imported(path)}
    own = {"model", "evaluation", "tools", "tests", "hydra_plugins", "data"}
    third = {m for m in modules if m not in sys.stdlib_module_names and m not in own}
    assert {m for m in third if provided_by.get(m, m).lower() not in pinned} == set()
    for line in pins.splitlines():
        pin, _, marker = (part.strip() for part in line.split("#")[0].partition(";"))
        assert not pin or re.fullmatch(r"[\w.-]+==[\w.]+", pin), line
        assert not marker or isinstance(Marker(marker).evaluate(), bool), line


CHOICES = [
    f"{group.name}={path.stem}"
    for group in sorted((ROOT / "configs").iterdir())
    if group.is_dir()
    for path in group.glob("*.yaml")
]


@pytest.mark.parametrize("choice", CHOICES)
def test_every_config_composes_and_says_what_it_is(choice):
    group, name = choice.split("=")
    plugin = (
        {"submitit_local": "submitit", "slurm": "submitit", "ray": "ray"}.get(name) if group == "launcher" else None
    )
    if plugin is not None:
        pytest.importorskip(f"hydra_plugins.hydra_{plugin}_launcher", reason="optional: requirements-cluster.txt")
    first = (ROOT / "configs" / group / f"{name}.yaml").read_text().splitlines()
    assert first[0].startswith("#") and (group != "experiment" or "bash eval.sh" in first[1])
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        cfg = compose("config", overrides=[choice])
    wanted = {
        "model": {field.name for field in dataclasses.fields(ModelSettings)},
        "bench": set(inspect.signature(load_bench).parameters),
        "tree": set(inspect.signature(build_template).parameters) - {"k"},
    }
    if group == "method":
        assert {"name", "drafter"} <= set(cfg.method) and cfg.method.name == name
    if group in wanted:
        assert set(cfg[group]) == wanted[group]


@pytest.mark.parametrize("methods", ["hf,vanilla,recycling", pytest.param("", marks=pytest.mark.slow)])
def test_the_quickstart_runs_from_the_shell(tmp_path, methods):
    """bash eval.sh, cut to one question a subtask, in the environment that runs the tests."""
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["bash", str(ROOT / "eval.sh"), "bench.per_category=1", f"results_dir={tmp_path}"]
    command += ["max_new_tokens=8", "tree=2.2.2", f"method={methods}"] if methods else ["max_new_tokens=64"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr[-2000:]
    every = ("hf", "vanilla", "pld", "sps", "medusa", "eagle2", "recycling (auto)", "recycling (hot)")
    for method in ("hf", "vanilla", "recycling (hot)") if methods else every:
        assert re.search(rf"^{re.escape(method)} +[1-9]", done.stdout, flags=re.M), done.stdout
    assert "overall (7 questions)" in done.stdout, done.stdout
    assert (tmp_path / "quickstart/tables/main.csv").exists()


PUBLISHED = [("structures/trees/eagle-25", 25), ("structures/trees/medusa-63", 63)]


@pytest.mark.parametrize(("name", "size"), [("recycling/trees/2.2.2", 80), *PUBLISHED])
def test_shipped_trees_are_lists_of_rank_paths(name, size):
    nodes = [tuple(node) for node in yaml.safe_load((ROOT / f"model/{name}.yaml").read_text())["nodes"]]
    assert len(nodes) == len(set(nodes)) == size and all(isinstance(rank, int) for node in nodes for rank in node)
    assert all(node[:-1] in {(), *nodes} for node in nodes), "each below a parent"


def test_every_shipped_tree_is_looked_at():
    assert sorted(path.stem for path in (ROOT / "model").glob("*/trees/*.yaml")) == ["2.2.2", "eagle-25", "medusa-63"]


def test_no_folder_holds_more_than_sixteen_modules():
    folders = {path.parent for name, path in MODULES.items() if name.split(".")[0] != "tests"}
    assert not {
        str(folder): len(list(folder.glob("*.py"))) for folder in folders if len(list(folder.glob("*.py"))) > 16
    }
