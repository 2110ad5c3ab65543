"""The house: arrows between folders, sizes a reader can hold, configs of known settings, a quickstart that runs."""

import ast
import dataclasses
import inspect
import os
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml
from packaging.markers import Marker

from evaluation.loading.bench import load_bench
from evaluation.loading.settings import ModelSettings
from evaluation.records.provenance import ANSWERING
from model.recycling import build_template

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("model", "evaluation", "tools", "tests", "data/embedded", "data/novelty")
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
    package = (
        module_of(path).split(".") if path.stem == "__init__" else module_of(path).split(".")[:-1]
    )
    modules = set()
    for node in ast.walk(tree(path)) if inside else tree(path).body:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            modules |= {f"{module}.{alias.name}" for alias in node.names} & MODULES.keys() or {
                module
            }
    return frozenset(modules)


# What each folder, and each file of model/ itself, may import of the project beside itself and EVERYWHERE: folders or
# single modules. The commands, which are the other files of evaluation/, may import all but each other.
EVERYWHERE = {"model.errors", "model.files", "model.settings", "evaluation.errors"}
MAY_IMPORT = {
    "model.engine": "",
    "model.prompts": "",
    "model.narrow_weights": "model.engine",
    "model.quantization": "",
    "model.structures": "model.engine",
    "model.recycling": "model.engine",
    "model.pretrained": "model.engine model.narrow_weights model.quantization",
    "model.methods": "model.engine model.structures model.recycling model.pretrained",
    "model.linear_choice": "model.engine",
    "model.tuning": "model.engine model.recycling model.methods",
    "model.generation_config": "model.engine",
    "model.decoder": "model.engine model.generation_config model.linear_choice model.methods model.tuning "
    "model.pretrained model.prompts",
    "model.generate": "model.engine model.generation_config model.decoder model.linear_choice model.methods",
    "model.cli": "model.engine model.linear_choice model.methods model.tuning model.decoder model.prompts",
    "model.picture": "model.engine model.decoder",
    "evaluation.records": "model.methods",
    "evaluation.statistics": "evaluation.records model.engine.sizing model.engine.tree",
    "evaluation.figures": "evaluation.records evaluation.statistics",
    "evaluation.page": "evaluation.records evaluation.statistics evaluation.figures model.engine.tree",
    "evaluation.loading": "evaluation.records model.engine model.tuning model.linear_choice model.decoder "
    "model.pretrained model.prompts model.generation_config model.methods model.structures",
    "evaluation.answerers": "evaluation.loading evaluation.records model.engine model.methods model.decoder "
    "model.generate",
    "evaluation.configuration": "evaluation.answerers evaluation.loading evaluation.records model",
    "evaluation.running": "evaluation.answerers evaluation.configuration evaluation.loading evaluation.records "
    "evaluation.statistics model.engine model.tuning",
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
    """And of the commands none but the report, the audit, contribute and the step bench are imported."""
    for name, path in MODULES.items():
        others = COMMANDS - {
            f"evaluation.{name}" for name in ("report", "audit", "contribute", "bench_step")
        }
        assert name.startswith("tests") or not imported(path) & others, name
    for room, places in MAY_IMPORT.items():
        allowed = {room, *places.split(), *EVERYWHERE}
        for name in (name for name in MODULES if room in folders_of(name)):
            modules = {
                m
                for m in imported(MODULES[name]) & MODULES.keys()
                if m.startswith(("model.", "evaluation."))
            }
            assert not {module for module in modules if not folders_of(module) & allowed}, name
    arrows = {name: imported(path) & MODULES.keys() - {name} for name, path in MODULES.items()}
    list(TopologicalSorter(arrows).static_order())  # raises CycleError, which names a circle


def test_every_folder_and_file_has_its_arrows_and_its_tests():
    folders = {
        module_of(path)
        for whole in ("model", "evaluation")
        for path in (ROOT / whole).glob("*/__init__.py")
    }
    files = {module_of(path) for path in (ROOT / "model").glob("[!_]*.py")} | {
        "evaluation.answerers"
    }
    assert folders | files - EVERYWHERE == MAY_IMPORT.keys()
    assert all((ROOT / "tests" / folder.replace(".", "/")).is_dir() for folder in folders)


def test_the_library_imports_itself_relatively_and_no_harness():
    harness = {
        "evaluation",
        "hydra",
        "omegaconf",
        "fastchat",
        "tools",
        "data",
        "pandas",
        "matplotlib",
    }
    for name in LIBRARY:
        assert not {module.split(".")[0] for module in imported(MODULES[name])} & harness, name
        absolute = [
            n
            for n in ast.walk(tree(MODULES[name]))
            if isinstance(n, ast.ImportFrom) and not n.level
        ]
        assert not [n.module for n in absolute if n.module and n.module.split(".")[0] == "model"], (
            name
        )


def test_what_reads_records_loads_no_model():
    heavy = {"transformers", "huggingface_hub", "accelerate", "hydra", "fastchat"}
    rooms = {f"evaluation.{room}" for room in ("records", "statistics", "figures", "page")}
    for name in (name for name in MODULES if folders_of(name) & rooms):
        assert (
            not {module.split(".")[0] for module in imported(MODULES[name], inside=False)} & heavy
        ), name


def test_files_and_functions_are_small_and_code_is_not_packed():
    """Counted in nodes of the syntax tree, which formatting cannot hide."""
    nodes, lines, pairs = 0, 0, 0
    too_large = []
    for path in PYTHON_FILES:
        if not is_product(path):
            continue
        code = tree(path)
        of_file = sum(1 for _ in ast.walk(code))
        too_large += [path] * (of_file > 4300)
        for node in ast.walk(code):
            if isinstance(node, ast.FunctionDef):
                # Triton's take their state as arguments
                most = 1200 if path.name == "tree_kernel.py" else 900
                too_large += [f"{path}: {node.name}"] * (sum(1 for _ in ast.walk(node)) > most)
            pairs += (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Tuple)
                and any(isinstance(target, ast.Tuple) for target in node.targets)
            )
        nodes += of_file
        lines += len(path.read_text().splitlines())
    assert not too_large
    assert nodes <= 6.5 * lines and 1000 * pairs <= 3 * lines


def is_product(path):
    return path.relative_to(ROOT).parts[0] in ("model", "evaluation", "tools")


def test_all_code_that_answers_is_in_the_digest_of_the_sources():
    """`evaluation/answerers.py` was not: a run could be resumed with another one."""
    digested = {path for pattern in ANSWERING for path in ROOT.glob(pattern)}
    reached, names = set(), ["evaluation.running.runner", "evaluation.running.shared_text"]
    for name in names:  # grows
        if name not in reached and not name.startswith(
            ("evaluation.statistics", "evaluation.errors")
        ):
            reached.add(name)
            names += imported(MODULES[name]) & MODULES.keys()
    assert {MODULES[name] for name in reached if MODULES[name].stat().st_size} <= digested


def test_the_public_ci_runs_what_the_readme_says():
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["tests"]
    assert [step["run"] for step in jobs["steps"] if "run" in step] == ["bash .ci/run"]
    oldest = re.search(r'requires-python = ">=([\d.]+)', (ROOT / "pyproject.toml").read_text())[1]
    assert oldest in jobs["strategy"]["matrix"]["python"]
    assert "actions/workflows/test.yml/badge.svg" in (ROOT / "README.md").read_text()


def test_every_third_party_import_is_pinned():
    """Each imported top-level module belongs to the standard library, to us, or to a pinned requirement."""
    provided_by = {"fastchat": "fschat", "hydra": "hydra-core", "yaml": "PyYAML", "PIL": "pillow"}
    of_tests = ("", "-quantize", "-kernels")
    files = ("requirements.txt", *(f"tests/requirements{which}.txt" for which in of_tests))
    pins = "".join((ROOT / file).read_text() for file in files)
    pinned = {line.split("==")[0].lower() for line in pins.splitlines() if "==" in line}
    modules = {module.split(".")[0] for path in PYTHON_FILES for module in imported(path)}
    ours = {"model", "evaluation", "tools", "tests", "data"}
    third = {m for m in modules if m not in sys.stdlib_module_names and m not in ours}
    assert {m for m in third if provided_by.get(m, m).lower() not in pinned} == set()
    for line in pins.splitlines():
        pin, _, marker = (part.strip() for part in line.split("#")[0].partition(";"))
        assert not pin or re.fullmatch(r"[\w.-]+==[\w.]+", pin), line
        assert not marker or isinstance(Marker(marker).evaluate(), bool), line


def test_every_config_says_what_it_is_and_sets_what_there_is():
    """The files of a group inherit from one that sets all there is. Experiments are composed by other tests."""
    settings = {
        "model": {field.name for field in dataclasses.fields(ModelSettings)},
        "bench": set(inspect.signature(load_bench).parameters),
        "tree": set(inspect.signature(build_template).parameters) - {"k"},
    }
    complete = set()
    for file in (ROOT / "configs").glob("*/*.yaml"):
        group, text = file.parent.name, file.read_text()
        assert text.startswith("# "), file
        keys = yaml.safe_load(text).keys() - {"defaults"}
        if group == "method":
            assert {"name", "drafter"} <= keys and yaml.safe_load(text)["name"] == file.stem
        if group in settings:
            assert keys <= settings[group], file
            complete |= {group} if keys == settings[group] else set()
    assert complete == settings.keys()


@pytest.mark.slow
def test_the_quickstart_runs_from_the_shell(tmp_path):
    """bash eval.sh, cut to one question a subtask, in the environment that runs the tests."""
    environment = os.environ | {"PYTHON": sys.executable}
    command = [
        "bash",
        str(ROOT / "eval.sh"),
        "bench.per_category=1",
        f"results_dir={tmp_path}",
        "max_new_tokens=64",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for method in ("hf", "vanilla", "pld", "sps", "medusa", "eagle2", "recycling (hot)"):
        assert re.search(rf"^{re.escape(method)} +[1-9]", done.stdout, flags=re.M), done.stdout
    assert "embedded, sample, overall:" in done.stdout, done.stdout
    assert (tmp_path / "quickstart/tables/main.csv").exists()
