"""The house: arrows between folders, sizes a reader can hold, configs that compose, README commands that run."""

import ast
import dataclasses
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from packaging.markers import Marker

from evaluation.running.bench import load_bench
from evaluation.running.model_settings import ModelSettings
from model.decoding import loop
from model.recycling import build_template
from tools.requirements_met import unmet

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("model", "evaluation", "hydra_plugins", "tools", "tests")
PYTHON_FILES = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")]
TREES = ROOT / "model/recycling/trees"
README = (ROOT / "README.md").read_text()


def imported(path: Path) -> list[tuple[int, str]]:
    """(level, module) of every import in a file; level 0 is absolute."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
    return found


@pytest.mark.parametrize("path", [p for p in PYTHON_FILES if p.is_relative_to(ROOT / "model")], ids=str)
def test_the_library_imports_itself_relatively_and_no_harness(path):
    forbidden = {"evaluation", "model", "hydra", "omegaconf", "fastchat", "tools", "pandas", "matplotlib"}
    assert not {module.split(".")[0] for level, module in imported(path) if level == 0} & forbidden


def test_the_engine_knows_no_method_by_name():
    text = "".join(p.read_text().lower() for p in (ROOT / "model/decoding").glob("*.py"))
    assert "def decode(" in text, "the engine is elsewhere"
    assert not re.search(r"recycl(?!ed)|\bpld\b|medusa|eagle|lookahead", text)


def test_a_reader_finds_the_algorithm():
    recycling = sum(len(p.read_text().splitlines()) for p in (ROOT / "model/recycling").glob("*.py"))
    assert 100 < recycling < 400
    assert len(inspect.getsource(loop.decode).splitlines()) < 80
    too_long = [str(p) for p in PYTHON_FILES if len(p.read_text().splitlines()) > 350]
    assert not too_long


def test_every_third_party_import_is_pinned():
    """Each imported top-level module belongs to the standard library, to us, or to a pinned requirement."""
    provided_by = {"fastchat": "fschat", "hydra": "hydra-core", "yaml": "PyYAML", "PIL": "pillow"}
    pins = (ROOT / "requirements.txt").read_text() + (ROOT / "tests/requirements.txt").read_text()
    pinned = {line.split("==")[0].lower() for line in pins.splitlines() if "==" in line}
    modules = {m.split(".")[0] for p in PYTHON_FILES for level, m in imported(p) if level == 0 and m}
    own = {"model", "evaluation", "tools", "tests", "hydra_plugins"}
    third = {m for m in modules if m not in sys.stdlib_module_names and m not in own}
    assert {m for m in third if provided_by.get(m, m).lower() not in pinned} == set()
    for line in pins.splitlines():
        pin, _, marker = (part.strip() for part in line.split("#")[0].partition(";"))
        assert not pin or re.fullmatch(r"[\w.-]+==[\w.]+", pin), line
        assert not marker or isinstance(Marker(marker).evaluate(), bool), line


def test_a_pin_counts_where_its_marker_says(tmp_path):
    file = tmp_path / "requirements.txt"
    file.write_text(
        '# comment\nabsent==1; sys_platform == "nowhere"\nmissing==2; python_version > "3"  # why\npytest==0\n'
    )
    assert unmet([str(file)]) == ["missing==2", "pytest==0"]


CHOICES = [
    f"{group.name}={path.stem}"
    for group in sorted((ROOT / "configs").iterdir())
    if group.is_dir()
    for path in group.iterdir()
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


def test_python_modules_named_in_the_readme_take_the_arguments_shown():
    commands = re.findall(r"^python -m (evaluation\.\w+)(.*?)(?:  #.*)?$", README, flags=re.M)
    assert len(commands) >= 5
    for module, arguments in commands:
        flags = [word.split("=")[0] for word in shlex.split(arguments) if word.startswith("--")]
        text = (ROOT / (module.replace(".", "/") + ".py")).read_text()
        assert all(f'"{flag}"' in text for flag in flags), (module, flags)


def test_eval_commands_in_the_readme_compose():
    lines = re.findall(r"^bash eval\.sh (.+?)(?:  +#.*)?$", README, flags=re.M)
    assert len(lines) >= 4
    for line in lines:
        overrides = [word.split(",")[0] for word in shlex.split(line) if "=" in word]
        with initialize_config_dir(str(ROOT / "configs"), version_base=None):
            compose("config", overrides=overrides)


def test_the_quickstart_runs_from_the_shell(tmp_path):
    """bash eval.sh, cut to one question a subtask, in the environment that runs the tests."""
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["bash", str(ROOT / "eval.sh"), "bench.per_category=1", f"results_dir={tmp_path}", "max_new_tokens=64"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    for method in ("hf", "vanilla", "pld", "recycling (cold)", "recycling (hot)"):
        assert re.search(rf"^{re.escape(method)} +7 ", done.stdout, flags=re.M), done.stdout
    assert (tmp_path / "quickstart/tables/main.csv").exists()


@pytest.mark.parametrize(("name", "size"), [("2.2.2", 80), ("eagle-25", 25), ("medusa-63", 63)])
def test_shipped_trees_are_lists_of_rank_paths(name, size):
    nodes = [tuple(node) for node in yaml.safe_load((TREES / f"{name}.yaml").read_text())["nodes"]]
    assert len(nodes) == len(set(nodes)) == size and all(isinstance(rank, int) for node in nodes for rank in node)
    assert all(node[:-1] in {(), *nodes} for node in nodes), "each below a parent"


def test_every_shipped_tree_is_looked_at():
    assert sorted(path.stem for path in TREES.glob("*.yaml")) == ["2.2.2", "eagle-25", "medusa-63"]
