"""A toy checkpoint and bench, and the command lines called in this process."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from jinja2 import Environment

from evaluation import figures
from evaluation import run as run_module
from evaluation.configuration import jobs
from evaluation.figures import style
from tests.checkpoint import write_checkpoint

CATEGORIES = ["writing", "math", "translation", "qa", "rag", "code", "poetry"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "vicuna-toy")


@pytest.fixture
def every_kind() -> None:
    """For tests that look at the files of figures: they are written in every kind, as for users."""


@pytest.fixture
def drawn() -> None:
    """For tests that look at figures on the page: they are drawn, as SVG alone."""


@pytest.fixture(autouse=True)
def few_figures(request, monkeypatch) -> None:
    """Elsewhere no figure is drawn: they are most of what a report of a few toy answers takes."""
    if "every_kind" in request.fixturenames:
        return
    monkeypatch.setattr(style, "KINDS", ("svg",))
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(figures, "FIGURES", ())


@pytest.fixture(autouse=True)
def machine_looked_at_briefly(monkeypatch) -> None:
    """Whether other processes keep the cores busy is asked for 0.2 s a run."""
    for module in ("model.tuning", "evaluation.running.runner"):
        monkeypatch.setattr(f"{module}.busy_cores", lambda: 0.0)


@pytest.fixture(scope="session", autouse=True)
def each_config_once() -> Iterator[None]:
    """Half of a short run is Hydra's reading of YAML files and Jinja's of the page's template."""
    load = jobs._load
    compile_template = Environment.compile
    composed = {}
    templates = {}

    def load_once(loader, words):
        key = (str(loader.config_search_path), *words)
        if key not in composed:
            composed[key] = load(loader, words)
        return composed[key]

    def compile_once(environment, source, *names):
        if source not in templates:
            templates[source] = compile_template(environment, source, *names)
        return templates[source]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(yaml, "SafeLoader", yaml.CSafeLoader)
        patched.setattr(jobs, "_load", load_once)
        patched.setattr(Environment, "compile", compile_once)
        yield


@pytest.fixture(scope="session")
def bench_file(tmp_path_factory) -> Path:
    """Seven questions, one of them in two turns, one of an unknown category."""
    path = tmp_path_factory.mktemp("bench") / "question.jsonl"
    rows = [
        {
            "question_id": 10 + i,
            "category": c,
            "turns": [f"what is the answer to question {i}?", "and why?"][: 1 + (i == 0)],
        }
        for i, c in enumerate(CATEGORIES)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def call(monkeypatch, capsys) -> Callable[..., Outcome]:
    """Call a module's main() with arguments; its exit code and output. Any other exception is a traceback: it fails."""

    def calling(main: Callable[[], None], *arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["prog", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return calling


@pytest.fixture
def evaluate(call, checkpoint, bench_file, tmp_path):
    """`evaluation.run` on the toy model and bench, results below tmp_path; later arguments overrule."""

    def evaluating(*overrides: str) -> Outcome:
        base = [
            "model=path",
            f"model.path={checkpoint}",
            "model.name=toy",
            "model.template=vicuna_v1.1",
            "bench=file",
            f"bench.path={bench_file}",
            "max_new_tokens=12",
            f"results_dir={tmp_path / 'results'}",
        ]
        keys = {o.split("=")[0] for o in overrides}
        flags = [o for o in overrides if o.startswith("-")]
        kept = [b for b in base if b.split("=")[0] not in keys]
        return call(run_module.main, *flags, *kept, *[o for o in overrides if o not in flags])

    return evaluating


def answers_in(folder: Path) -> list[dict]:
    """The answer rows of the only run below `folder`."""
    (path,) = folder.rglob("answers.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]
