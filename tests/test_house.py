"""The house: arrows between folders, sizes a reader can hold, configs of known settings, a quickstart that runs."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from evaluation.records.provenance import ANSWERING

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("model", "evaluation", "tools", "tests")
PYTHON_FILES = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    """A file's module, a folder's for its __init__."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PYTHON_FILES}
LIBRARY = [name for name in MODULES if name.partition(".")[0] == "model"]


@cache
def imported(path: Path, *, inside: bool = True) -> frozenset[str]:
    """Modules that a file imports, relative names resolved; of `from x import y` also x.y if it is a module.

    Args:
        inside: those inside functions, too.
    """
    parts = module_of(path).split(".")
    package = parts if path.stem == "__init__" else parts[:-1]
    modules: set[str] = set()
    for node in ast.walk(tree(path)) if inside else tree(path).body:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            inner = {f"{module}.{alias.name}" for alias in node.names} & MODULES.keys()
            modules |= inner or {module}
    return frozenset(modules)


def roots(path: Path, *, inside: bool = True) -> set[str]:
    """The packages that a file imports."""
    return {module.split(".")[0] for module in imported(path, inside=inside)}


# What each folder, and each file of model/ itself, may import of the project beside itself and EVERYWHERE: folders or
# single modules. The commands, which are the other files of evaluation/, may import all but each other.
EVERYWHERE = {f"model.{name}" for name in ("errors", "files", "settings", "devices", "compiled")}
EVERYWHERE |= {"evaluation.errors"}
RULE = "model.engine.rule"
CONTRACT = f"{RULE} model.engine.attention model.engine.contract"
TARGET = f"model.weights {RULE} model.engine.attention model.engine.target"
MAY_IMPORT = {
    "model.weights": "",
    "model.engine.rule": "",
    "model.engine.attention": f"model.weights {RULE}",
    "model.engine.target": TARGET,
    "model.engine.contract": CONTRACT,
    "model.engine.graphs": f"{TARGET} {CONTRACT}",
    "model.engine.loop": f"{TARGET} {CONTRACT} model.engine.graphs",
    "model.engine": "model.weights",
    "model.prompts": "",
    "model.hub": "",
    "model.recycling": "model.engine",
    "model.pretrained": "model.weights model.hub",
    "model.methods.copying": "model.engine model.recycling model.methods.limits",
    "model.methods.dynamic": "model.engine model.methods.copying model.methods.limits",
    "model.methods.trained": "model.engine model.methods.copying model.methods.limits model.pretrained",
    "model.methods.rivals": "model.engine model.recycling model.methods.copying model.methods.limits",
    "model.methods": "model.engine model.recycling model.pretrained",
    "model.tuning": "model.engine model.weights model.recycling model.methods",
    "model.generation_config": "model.engine",
    "model.decoder": "model.engine model.weights model.generation_config model.methods model.tuning "
    "model.pretrained model.prompts",
    "model.generate": "model.engine model.weights model.generation_config model.decoder model.methods",
    "model.cli": "model.engine model.weights model.methods model.tuning model.decoder model.prompts",
    "model.picture": "model.engine model.decoder",
    "evaluation.records": "model.methods",
    "evaluation.statistics": "evaluation.records model.engine",
    "evaluation.tables": "evaluation.records evaluation.statistics model.engine",
    "evaluation.figures": "evaluation.records evaluation.statistics evaluation.tables",
    "evaluation.page": "evaluation.records evaluation.statistics evaluation.tables evaluation.figures "
    "model.engine",
    "evaluation.loading": "evaluation.records model",
    "evaluation.configuration": "evaluation.loading evaluation.records model",
    "evaluation.running": "evaluation.configuration evaluation.loading evaluation.records evaluation.statistics "
    "model.engine model.tuning",
}
COMMANDS = (
    {name for name in MODULES if re.fullmatch(r"evaluation\.\w+", name)}
    - MAY_IMPORT.keys()
    - EVERYWHERE
)


def folders_of(module: str) -> set[str]:
    """A module and the folders that it is in."""
    parts = module.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts) + 1)}


def test_arrows_run_one_way():
    """And of the commands none but the report and the audit are imported."""
    shared = {f"evaluation.{name}" for name in ("report", "audit")}
    for name, path in MODULES.items():
        modules = imported(path) & MODULES.keys()
        assert name.startswith("tests") or not modules & (COMMANDS - shared), name
        for room in folders_of(name) & MAY_IMPORT.keys():
            allowed = {room, *MAY_IMPORT[room].split(), *EVERYWHERE}
            of_project = {m for m in modules if m.startswith(("model.", "evaluation."))}
            assert all(folders_of(module) & allowed for module in of_project), name
    arrows = {name: imported(path) & MODULES.keys() - {name} for name, path in MODULES.items()}
    list(TopologicalSorter(arrows).static_order())  # raises CycleError, which names a circle


def test_every_folder_and_file_has_its_arrows_and_its_tests():
    folders = {
        module_of(p)
        for room in ("model", "evaluation")
        for p in (ROOT / room).rglob("*/__init__.py")
    }
    folders -= {"model", "evaluation"}
    files = {module_of(path) for path in (ROOT / "model").glob("[!_]*.py")}
    assert folders | files - EVERYWHERE == MAY_IMPORT.keys()
    outer = {folder for folder in folders if folder.count(".") == 1}
    assert all((ROOT / "tests" / folder.replace(".", "/")).is_dir() for folder in outer)


def test_the_library_imports_itself_relatively_and_no_harness():
    harness = {"evaluation", "hydra", "omegaconf", "fastchat", "tools", "data"}
    harness |= {"pandas", "matplotlib"}
    for name in LIBRARY:
        assert not roots(MODULES[name]) & harness, name
        for node in ast.walk(tree(MODULES[name])):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert str(node.module).split(".")[0] != "model", name


def test_what_reads_records_loads_no_model():
    heavy = {"transformers", "huggingface_hub", "accelerate", "hydra", "fastchat"}
    rooms = {
        f"evaluation.{room}" for room in ("records", "statistics", "tables", "figures", "page")
    }
    for name, path in MODULES.items():
        assert not folders_of(name) & rooms or not roots(path, inside=False) & heavy, name


def nodes_of(code: ast.AST) -> int:
    return sum(1 for _ in ast.walk(code))


def test_files_and_functions_are_small_and_so_is_the_product():
    """Counted in nodes of the syntax tree, which formatting cannot hide."""
    nodes = pairs = 0
    for name in MODULES:
        path = MODULES[name]
        if name.split(".")[0] not in ("model", "evaluation", "tools"):
            continue
        assert nodes_of(tree(path)) <= 4300, name
        # Triton's functions take their state as arguments
        most = 1200 if path.name == "tree_kernel.py" else 900
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                assert nodes_of(node) <= most, f"{name}: {node.name}"
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                pairs += any(isinstance(target, ast.Tuple) for target in node.targets)
        nodes += nodes_of(tree(path))
    assert nodes <= 179_300 and pairs <= 5


def test_all_code_that_answers_is_in_the_digest_of_the_sources():
    """The answerers were not: a run could be resumed with another one."""
    digested = {path for pattern in ANSWERING for path in ROOT.glob(pattern)}
    names = ["evaluation.running.runner", "evaluation.running.shared_text"]
    for name in names:  # grows
        further = imported(MODULES[name]) & MODULES.keys() - {*names}
        names += [
            m for m in further if not m.startswith(("evaluation.statistics", "evaluation.errors"))
        ]
    assert {MODULES[name] for name in names if MODULES[name].stat().st_size} <= digested


def test_every_third_party_import_is_pinned():
    """Each imported top-level module belongs to the standard library, to us, or to a pinned requirement."""
    provided_by = {"fastchat": "fschat", "hydra": "hydra-core", "yaml": "PyYAML", "PIL": "pillow"}
    pinned = set()
    for file in (ROOT / "requirements.txt", *(ROOT / "tests").glob("requirements*.txt")):
        text = re.sub(r"#.*", "", file.read_text())
        for line in filter(None, map(str.strip, text.splitlines())):
            requirement = Requirement(line)
            assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), line
            pinned.add(requirement.name.lower())
    modules = set().union(*(roots(path) for path in PYTHON_FILES))
    third = modules - {*sys.stdlib_module_names, "model", "evaluation", "tools", "tests", "data"}
    assert {m for m in third if provided_by.get(m, m).lower() not in pinned} == set()


def test_every_config_says_what_it_is_and_a_methods_name_is_its_files():
    """What they set is checked where they are composed."""
    for file in (ROOT / "configs").glob("*/*.yaml"):
        text = file.read_text()
        assert text.startswith("# "), file
        assert file.parent.name != "method" or yaml.safe_load(text)["name"] == file.stem


def test_the_picture_of_the_code_names_its_files():
    names = re.findall(r"[\w/]+[.]py", (ROOT / "docs/figures/code.svg").read_text())
    rooms = [ROOT / room for room in ("evaluation", "model", "model/engine")]
    assert len(names) > 15 and all(any((room / name).is_file() for room in rooms) for name in names)


@pytest.mark.slow
def test_the_quickstart_runs_from_the_shell(tmp_path):
    """bash eval.sh, cut to one question a subtask, in the environment that runs the tests."""
    command = ["bash", str(ROOT / "eval.sh"), "bench.per_category=1", "max_new_tokens=64"]
    command.append(f"results_dir={tmp_path}")
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for method in ("hf", "vanilla", "pld", "sps", "medusa", "eagle2", "recycling (hot)"):
        assert re.search(rf"^{re.escape(method)} +[1-9]", done.stdout, flags=re.M), done.stdout
    assert "embedded, sample, overall:" in done.stdout, done.stdout
    assert (tmp_path / "quickstart/tables/main.csv").exists()
