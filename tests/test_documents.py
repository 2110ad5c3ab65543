"""README and docs: links lead somewhere, commands parse, code runs as it stands."""

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from evaluation import run as evaluation_run
from evaluation.tables.experiment import Experiment
from model import cli as terminal
from tests.evaluation.conftest import few_figures  # noqa: F401 - a fixture

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
EVERY_PAGE = [README, ROOT / "NOTES.md", *PAGES, *(ROOT / "data").glob("**/README.md")]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.M | re.S)
SUMMARY = re.compile(
    r"\d+ tokens in \d+ steps: [\d.]+ a step, [\d.]+ tokens/s"
    r"(; (drafting paid|steps: [^:]+): about [\d.]+ times plain decoding)?"
)
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"  # of the examples; its layout's stand-in here is data/embedded
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path, *languages: str) -> list[str]:
    """The page's blocks of code in these languages."""
    return [code for language, code in FENCE.findall(page.read_text()) if language in languages]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_and_named_files_are_there(page):
    text = page.read_text()
    for name in re.findall(r"`((?:model|evaluation|tools|tests|configs|data)/[\w./-]+)`", text):
        assert (ROOT / name).exists() or re.search("NAME|MODEL|successor", name), name
    for target in LINK.findall(FENCE.sub("", text)):
        # the badge is a path of the hosting site
        if re.match(r"https?://|\.\./\.\./actions/", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_every_page_is_linked_from_the_readme_and_every_figure_is_shown():
    texts = " ".join(page.read_text() for page in EVERY_PAGE)
    shown = set(re.findall(r"figures/([\w-]+\.\w+)[)\"]", texts))
    assert {figure.name for figure in (ROOT / "docs/figures").iterdir()} == shown
    linked = {target.partition("#")[0] for target in LINK.findall(README.read_text())}
    assert {f"docs/{page.name}" for page in PAGES} <= linked


def commands() -> list[str]:
    """Every command of the shell blocks once, without its comment."""
    found = []
    for page in (README, *PAGES):
        for block in blocks(page, "bash"):
            for line in block.replace("\\\n", "").splitlines():
                command = re.split(r"(?:^|\s+)#(?: |$)", line)[0]
                found += [part.strip() for part in command.split(" && ")]
    return list(dict.fromkeys(filter(None, found)))


class Parsed(BaseException):
    """Raised where a command would begin its work."""


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line, monkeypatch):
    first, *words = shlex.split(line.removeprefix(".venv/bin/"))
    if words[:1] == ["eval.sh"]:
        composes(words[1:])
    elif first == "token-recycling":
        terminal.parser().parse_args(words)
    elif first == "python" and words[1] in ("evaluation.run", "evaluation.prefetch"):
        composes(words[2:])
    elif first == "python" and words[1] != "pytest":
        parses(words[1], words[2:], monkeypatch)
    elif first == "python":
        assert all((ROOT / word).exists() for word in words[2:] if word != "-q")
    elif first == "bash":
        assert (ROOT / words[0]).is_file()
    else:
        assert first in ("pip", "source", "mkdir", "echo", "cp"), "a command that no test knows"


def composes(words: list[str]) -> None:
    """Hydra composes the first value of each override.

    A config of one's own is tried by another test.
    """
    if any(word.startswith("--config-dir") for word in words):
        return
    for name, plugin in (("slurm", "submitit"), ("ray", "ray")):
        if f"launcher={name}" in words:
            pytest.importorskip(f"hydra_plugins.hydra_{plugin}_launcher")
    overrides = [word.split(",")[0] for word in words if "=" in word]
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        compose("config", overrides=overrides, return_hydra_config=True)


def parses(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's own parser takes these arguments."""
    main = importlib.import_module(module).main

    def stopping(parse):
        def parsed(self, *arguments, **named):
            parse(self, *arguments, **named)
            raise Parsed

        return parsed

    parser = argparse.ArgumentParser
    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(parser, name, stopping(getattr(parser, name)))
    monkeypatch.setattr(sys, "argv", [module, *words])
    with pytest.raises(Parsed):
        main()


@pytest.fixture
def clean_folder(tmp_path, monkeypatch) -> Path:
    """An empty folder with data/ in it, where the library is found under the name that pip installs it by."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/token_recycling").symlink_to(ROOT / "model")
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "token_recycling"]:
        del sys.modules[name]


def ran(code: str, names: dict | None = None) -> dict:
    """The names that a block of Python leaves, after blocks that left the given ones."""
    names = names or {"__name__": "documents"}
    exec(compile(code, "block", "exec"), names)
    return names


def test_the_readmes_python_runs(clean_folder, capsys):
    (block,) = blocks(README, "python")
    assert f'"{SMOLLM2}"' in block
    answer = ran(block.replace(SMOLLM2, "data/embedded"))["answer"]
    assert answer.mat > 1 and capsys.readouterr().out == f"{answer.text} {answer.mat}\n"


def test_the_readme_fits_on_its_screens():
    shown = re.sub(r"<!--.*?-->", "", README.read_text(), flags=re.DOTALL)
    assert len(shown.split()) <= 800 and len(shown.splitlines()) <= 130


def test_the_figures_next_to_llama_cpp_are_the_recorded_ones():
    answers = pd.read_csv(ROOT / "results/reference/llama-cpp.csv")
    speeds = (answers["tokens"] / answers["seconds"]).groupby(
        [answers["engine"], answers["drafts"], answers["round"]]
    )
    page = (ROOT / "docs/performance.md").read_text()
    for engine, mean in speeds.mean().groupby("engine"):
        drafts = mean[engine].groupby("drafts", sort=True)
        plain, drafted = (", ".join(f"{speed:.1f}" for speed in runs) for _, runs in drafts)
        assert f"| {engine} | {plain} | {drafted} |" in page, engine


def test_a_method_of_ones_own_runs(clean_folder, monkeypatch, page=ROOT / "docs/extending.md"):
    module = next(block for block in blocks(page, "python") if block.startswith("# "))
    Path(module.splitlines()[0].removeprefix("# ")).write_text(module)
    (shell,) = (block for block in blocks(page, "bash") if "--config-dir" in block)
    configure, run = shell.splitlines()
    subprocess.run(["bash", "-ec", configure], check=True)
    monkeypatch.syspath_prepend(str(clean_folder))
    assert run.startswith("python -m evaluation.run ")
    alone = [
        word for word in shlex.split(run.replace("=vanilla,recycling,", "="))[2:] if word != "-m"
    ]
    monkeypatch.setattr(sys, "argv", alone)
    evaluation_run.main()  # leaves with a code where it fails
    assert list(clean_folder.glob("results/**/answers.jsonl"))


def test_the_librarys_examples_run(clean_folder, capsys):
    names: dict = {}
    for block in blocks(ROOT / "docs/library.md", "python"):
        if "evaluation" not in block:  # which measures for a while
            names = ran(block, names)
    streamed = " ".join(names["reply"]("USER: Tell me about a river. ASSISTANT:"))
    assert streamed.split() and streamed in capsys.readouterr().out


def test_the_terminals_command_runs(clean_folder, capsys):
    command = f"token-recycling generate {SMOLLM2}"
    (line,) = (line for line in commands() if line.startswith(command))
    words = shlex.split(line.replace(SMOLLM2, "data/embedded"))
    terminal.main([*words[1:], "--max-new-tokens", "8"])
    printed = capsys.readouterr()
    assert printed.out.strip() and SUMMARY.fullmatch(printed.err.splitlines()[-1])


@pytest.mark.parametrize(
    ("record", "device"), [("headline-h100", "H100"), ("headline-h200", "H200")]
)
def test_turns_that_are_equal_in_float16_are_counted_in_the_record(record, device):
    """Of methods that draft, against plain decoding; of all of this engine's, against stock `generate`."""
    texts = {}
    for run in Experiment.read(ROOT / "results/reference" / record).runs:
        if run.settings["model"]["dtype"] == "float16":
            answers = [choice["output_ids"] for row in run.answers for choice in row["choices"]]
            texts[run.label] = [ids for turns in answers for ids in turns]
    counts = []
    for base, left_out in (("vanilla", {"vanilla", "hf"}), ("hf", {"hf"})):
        pairs = [
            pair
            for method in texts.keys() - left_out
            for pair in zip(texts[method], texts[base], strict=True)
        ]
        counts.append(f"{sum(ids == own for ids, own in pairs)} of {len(pairs)}")
    page = (ROOT / "docs/performance.md").read_text()
    assert f"| {device} | {counts[0]} | {counts[1]} |" in page
