"""A user's mistakes: one line that names the culprit, exit code not 0, nothing overwritten, no traceback."""

import importlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from evaluation import inference_recycling, report, run
from evaluation.configuration.config import checked_config
from evaluation.loading.models import ModelSettings
from evaluation.running.runner import Runner
from model.engine import Target
from model.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def check(outcome, *names):
    """One line on stderr that starts with `error:` and names everything it should."""
    shown = outcome.err.replace("\r", "\n").splitlines()
    lines = [line for line in shown if line.strip() and not line.endswith(" left")]  # of progress
    assert outcome.code != 0
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("error: ") and len(lines[0]) < 600
    for name in names:
        assert str(name) in lines[0], lines[0]


WRONG = {  # settings, and what the line names
    "model.path=nowhere/at/all": "nowhere/at/all | no such folder",
    "model.dtype=float12": "float12 | float32",
    "model.device=quantum": "quantum | cuda",
    "model.quantize=int8 model.device_map=auto": "quantize=int8 | leave out device_map",
    "model.template=nonesuch": "nonesuch",
    "model.context=99999": "99999 | 512",
    "method.k=0": "needs candidates up to rank 7, but k=0",
    "tree=best tree.nodes=-1": "nodes=-1",
    "start=lukewarm": "start=lukewarm | cold, hot",
    "max_new_tokens=0": "max_new_tokens=0 | at least 1",
    "bench.order=5": "bench.order=5",
    "bench.categories=3": "bench.categories=3 | list",
    "bench.categories=[qa,summarisation]": "bench.categories=summarisation | translation",
    "execution=magic": "execution=magic | auto, eager, graph",
    "execution=custom_generate batch=2 start=hot": "execution=custom_generate | batch=1",
    "execution=custom_generate sampling.temperature=1": "execution=custom_generate | greedy",
    "method=dynamic method.nodes=auto:-4": "nodes=auto:-4: must be a number, auto, or auto:N",
    "method=dynamic method.nodes=auto timed=false": "method.nodes=auto: sizes follow | a number",
    "bench.path=nowhere.jsonl": "nowhere.jsonl | does not exist",
    "bench.begin=-5": "bench.begin=-5: must be a whole number, at least 0",
    "method=hf +method.nodes=8": "method.nodes: no such setting; hf has compiled",
    "+method.nodes=auto": "recycling: nodes=auto | method dynamic",
    "model.context=20 model.template=vicuna_v1.1": "question 10 | context of 20",
    "+model.dtpye=float32": "model.dtpye: no such setting; did you mean dtype?",
    "+tree.k=3": "tree.k: no such setting | nodes",
    "~method.drafter": "method.drafter: a method needs this setting",
    "model.weights=float16": "model.weights=float16: is for a GGUF file",
    "sampling.top_p=2": "sampling.top_p=2",
    "repeats=0": "repeats=0: must be a whole number, at least 1",
    "repeats=abc": "repeats=abc: must be a whole number",
    "+temperature=0.5": "temperature: no setting of a run; did you mean sampling.temperature?",
    "batch=8": "batch=8: there are 7 questions; use at most so many",
    "batch=2 phases=true": "phases=true: times the parts of one sequence's steps | batch=1",
    "batch=2 method=recycling": "start=cold: forgets between prompts | use start=hot, or batch=1",
}


@cache
def config_of(*choices):
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        return compose("config", ["model=path", "bench=file", *choices])


@pytest.fixture
def refused(checkpoint, bench_file, tmp_path):
    """The line that a run of these settings is refused with."""
    base = [f"model.path={checkpoint}", "model.name=toy", f"bench.path={bench_file}"]
    base += [f"results_dir={tmp_path / 'results'}"]

    def refusing(line: str) -> str:
        words = line.split()
        choices = [word for word in words if word.startswith(("method=", "tree=", "+", "~"))]
        values = OmegaConf.from_dotlist([*base, *(word for word in words if word not in choices)])
        with pytest.raises(UserError) as error:
            checked = checked_config(OmegaConf.merge(config_of(*choices), values))
            Runner(checked | {"repeat": 0}, ModelSettings(**checked["model"]))
        return str(error.value)

    return refusing


def test_wrong_settings(refused):
    for words, names in WRONG.items():
        line = refused(words)
        assert "\n" not in line and len(line) < 600, words
        assert all(name in line for name in names.split(" | ")), f"{words}: {line}"


WRONG_WORDS = {
    "method=nonesuch": "method/nonesuch | vanilla",
    "tree=auto": "tree/auto | 2.2.2 | best",
    "model=nonesuch": "model/nonesuch | embedded",
    "method.kk=4": "kk",
    "model=null": "must be a string",
    "-m ~seed": "~seed: a job has all settings",
    "repeats=2 run_dir=x": "holds one run",
    "nonsense": "nonsense",
    "nodes=4": "nodes: no such setting of a run; did you mean method.nodes or tree.nodes?",
    "device=cuda": "device: no such setting of a run; did you mean model.device?",
    "-m method.device=cuda": "method.device: no such setting | did you mean model.device?",
    "model.seed=3": "model.seed: no such setting; did you mean seed?",
    "medusa=x": "did you mean companions.medusa?",
    "max_new_token=5": "max_new_token: no such setting of a run; did you mean max_new_tokens?",
    "sampling.temprature=1": "did you mean sampling.temperature?",
    "model.contxt=9": "did you mean model.context?",
    "bench.catgories=[qa]": "did you mean bench.categories?",
    "-m method.nods=4": "did you mean method.nodes or tree.nodes?",
    "--confg-dir=x": "no such option; did you mean --config-dir?",
    "experiment=topk,update": "experiment=topk,update: takes one value",
    "experiment=table1 paper.models=embedded,vicuna-7b": "paper.models=embedded,vicuna-7b: takes one value | model=A,B",
    "hydra.sweep.dir=x": "hydra.sweep.dir: has no effect | results_dir",
    "experiment=budget hydra.sweeper.params.start=cold,hot": "params.start=cold,hot: takes one value | model=A,B",
    "--config-dir=nowhere method=hf": "--config-dir=nowhere: no such folder",
    "model=path": "model.path: has to be given",
    "method=dynamic tree=best": "tree: no such setting of these methods",
    "--cfg job experiment=tree_size method.kk=4": "method.kk",
    "-m hydra/launcher=nonesuch": "not installed | requirements-cluster.txt",
}


def test_wrong_command_lines(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # away from results/default of one's own, which would be reported
    for words, names in WRONG_WORDS.items():
        outcome = call(run.main, *words.split())
        check(outcome, *names.split(" | "))
        assert not outcome.out, words


def test_the_configuration_of_each_job_is_printed_and_none_is_run(call):
    outcome = call(run.main, "--cfg", "job", "-m", "method=vanilla,recycling", "method.k=4")
    assert outcome.code == 0 and not outcome.err
    configs = yaml.safe_load_all(outcome.out)
    assert [config["method"].get("k") for config in configs] == [None, 4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none(evaluate):
    check(evaluate("model.device=cuda"), "model.device=cuda", "CUDA")
    check(evaluate("model.device=mps"), "model.device=mps")


def shortened(path):
    path.write_bytes(path.read_bytes()[:20])


def renamed(path):
    path.rename(path.with_suffix(".bin"))


LACKS = [  # of a model's folder: which files, what is done to them, and what the line says
    ("config.json", Path.unlink, "no config.json"),
    ("*.safetensors*", Path.unlink, "no weights"),
    ("tokenizer*", Path.unlink, "no tokenizer"),
    ("model-00002-of-*", Path.unlink, "is missing"),
    ("model-00002-of-*", shortened, "cut short"),
    ("config.json", shortened, "cannot be loaded"),
    ("*.safetensors", renamed, "pickled weights only (*.bin)"),
]


@pytest.mark.parametrize(("pattern", "change", "says"), LACKS)
def test_a_model_folder_that_lacks_something(refused, checkpoint, tmp_path, pattern, change, says):
    model = shutil.copytree(checkpoint, tmp_path / "model")
    for path in model.glob(pattern):
        change(path)
    line = refused(f"model.path={model}")
    assert str(model) in line and says in line


def test_a_saved_state_that_does_not_fit(evaluate, tmp_path):
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    check(
        evaluate(f"start={tmp_path / 'junk.safetensors'}"), "junk.safetensors", "not a saved state"
    )
    assert evaluate("start=hot", f"run_dir={tmp_path / 'hot'}").code == 0
    saved = tmp_path / "hot/state.safetensors"
    check(evaluate(f"start={saved}", "method.k=9"), "8]", "9]")


def test_results_that_cannot_be_written(evaluate, tmp_path):
    (tmp_path / "file").write_text("in the way")
    check(evaluate(f"results_dir={tmp_path / 'file'}"), tmp_path / "file")
    check(evaluate(f"run_dir={tmp_path / 'file' / 'run'}"), tmp_path / "file")


def test_a_full_disk_stops_in_one_line_and_loses_nothing(evaluate, tmp_path):
    """A limit on file size makes the kernel refuse a write in the middle of a line, as a full disk does."""
    words = (f"run_dir={tmp_path / 'run'}", "max_new_tokens=96")
    answers = tmp_path / "run/answers.jsonl"
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, old[1]))
        outcome = evaluate(*words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, previous)
    check(outcome, "answers.jsonl", "File too large")
    data = answers.read_bytes()
    whole = data[: data.rindex(b"\n") + 1]
    assert 1 <= whole.count(b"\n") < 7
    assert evaluate(*words).code == 0
    data = answers.read_bytes()
    assert data.startswith(whole) and data.count(b"\n") == 7


IMPOSSIBLE = {  # of an interleaved sweep: words, and why a job cannot run
    "method=vanilla,dynamic method.nodes=auto:": "nodes=auto:: must be a number, auto, or auto:N",
    "method=vanilla,recycling method.k=9999": "k=9999: must be from 1 to the vocabulary's size",
    "method=vanilla,pld batch=1,2": "decode its prompts one by one, without a batch",
}


@pytest.mark.parametrize("words", IMPOSSIBLE)
def test_an_impossible_job_is_reported_before_another_answers(words, evaluate, monkeypatch):
    """Each line had come at the end of a sweep, after hours of other jobs."""

    def stop(*runners):
        raise KeyboardInterrupt

    monkeypatch.setattr("evaluation.running.scheduling.answer_next", stop)
    monkeypatch.setattr(Target, "no_fixed_shapes", "is on two" if "batch=1,2" in words else "")
    outcome = evaluate("-m", "interleave=true", *words.split())
    lines = re.findall("^(?:left out|error): .*", outcome.err, re.M)
    assert outcome.code == 130 and len(lines) == 2, outcome.err
    assert lines[0].startswith("left out: ") and IMPOSSIBLE[words] in lines[0], lines[0]
    assert lines[1].startswith("error: stopped")


IGNORED = {  # a command's words, and the settings that are said to be ignored, each by whom
    "-m method=hf,vanilla,recycling start=hot execution=eager phases=true sampling.top_k=5": {
        "start": "hf, vanilla",
        **dict.fromkeys(("execution", "phases"), "hf"),
        "sampling.top_k at temperature 0": "hf, recycling (hot), vanilla",
    },
    "-m method=suffix method.history_tokens=0,9 start=hot": {"start": "suffix"},
    "-m tree=balanced tree.nodes=6,7 tree.depth=2": {"tree.nodes (fewer fit)": "recycling (cold)"},
    "-m method=vanilla,recycling timed=false repeats=2": {
        "repeats at timed=false": "recycling (cold), vanilla",
    },
    # used, or not given: nothing is said
    "-m method=hf,recycling sampling.temperature=1 sampling.top_k=5 tree=best tree.nodes=6": {},
    "experiment=whole preset=smoke method=vanilla,hf": {},
}


@pytest.mark.parametrize("words", IGNORED)
def test_what_is_ignored_is_said_once_before_the_first_answer(words, evaluate, monkeypatch):
    """Such a setting had no effect, in silence; one that an experiment of this project sets needs no line."""

    def stop(*runners):
        print("answering", file=sys.stderr)
        raise KeyboardInterrupt

    monkeypatch.setattr("evaluation.running.scheduling.answer_next", stop)
    lines = evaluate(*words.split(), "interleave=true").err.partition("answering")[0].splitlines()
    said = [line.removeprefix("ignored: ") for line in lines if line.startswith("ignored: ")]
    parts = [part.partition(" by ") for line in said for part in line.split("; ")]
    found = {key: sorted(labels.split(", ")) for key, _, labels in parts}
    assert found == {key: sorted(labels.split(", ")) for key, labels in IGNORED[words].items()}
    assert len(said) == bool(IGNORED[words])


def commands():
    """The modules that are commands, each by its main."""
    for folder in ("evaluation", "model", "tools", "data"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if "\nif __name__ == " in text and "Parser(" in text and "\ndef main(" in text:
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("name", [*commands()])
def test_an_output_that_cannot_be_written_is_one_line(name, call, monkeypatch):
    """Of a full disk, or nothing where the reader has closed the pipe; Python's attempt at exit was a traceback."""
    main = importlib.import_module(name).main
    reader, writer = os.pipe()
    os.close(reader)
    full = "error: standard output: cannot be written (No space left on device)\n"
    for file, code, says in (("/dev/full", 2, full), (writer, 1, "")):
        with open(file, "w") as out:  # noqa: PTH123 - also a descriptor
            monkeypatch.setattr(sys, "stdout", out)
            outcome = call(main, "--help")
        monkeypatch.undo()
        assert (outcome.code, outcome.err) == (code, says)


def test_a_process_ends_in_one_line():
    """What Python does at exit comes after that line."""
    with Path("/dev/full").open("w") as full:
        command = ["env", "-u", "PYTHONUNBUFFERED", sys.executable, "-m", "model.cli", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: standard output: cannot be written")


@pytest.mark.parametrize("words", ["experiment=real model=path", "model=path model.path=/nowhere"])
def test_a_command_that_ran_nothing_leaves_no_folder(words, call, tmp_path):
    outcome = call(run.main, "method=vanilla,pld", *words.split(), f"results_dir={tmp_path}")
    assert outcome.code == 2 and "left out: model" in outcome.err
    assert not list(tmp_path.iterdir())


def test_other_command_lines(call, tmp_path, bench_file):
    check(call(report.main, tmp_path), tmp_path, "no runs here")
    check(call(inference_recycling.main, "--temperature", "-1"), "sampling.temperature=-1.0")
    check(call(inference_recycling.main, "--max_new_tokn", 5), "did you mean --max-new-tokens?")
    check(call(inference_recycling.main, "--bench-name", "gsm8k"), "gsm8k", "spec_bench")
    check(
        call(inference_recycling.main, "--tree-version", "9.9.9", "--question-file", bench_file),
        "9.9.9",
    )
