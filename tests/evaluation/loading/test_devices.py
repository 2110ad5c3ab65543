"""More than one device: device maps, tensor parallelism on two gloo ranks, launchers, devices that are not shared."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import dispatch_model

from evaluation.errors import Failure
from evaluation.loading import devices, locks, models, processes
from evaluation.loading.execution import choose_execution
from evaluation.records.store import AnswerStore
from model.engine import Target, generate
from model.errors import UserError
from model.methods.vanilla import Vanilla
from model.recycling import TokenRecycling, build_template
from tests.checkpoint import write_checkpoint
from tests.evaluation.running.test_run import core
from tests.evaluation.test_errors import check

ROOT = Path(__file__).resolve().parents[3]
METHODS = ("vanilla", "recycling")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """With grouped heads: two for keys and values, one for each rank."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "grouped-toy", kv_heads=2)


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def started(*arguments: str) -> subprocess.CompletedProcess:
    """A command of this Python on the CPU, one thread a process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def errors(done: subprocess.CompletedProcess) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


# device maps


def test_accelerate_hooks_leave_the_tokens_alone(checkpoint):
    """Hooks on every module, as a map over several devices puts them there; here all of them say cpu."""
    loaded = models._load(models.ModelSettings("toy", str(checkpoint), device="cpu"))
    prompt = [1, 5, 9, 20, 33]

    def tokens(target: Target) -> list[list[int]]:
        recycling = TokenRecycling(target.vocab_size, build_template("2.2.2", k=8), k=8, device=target.device)
        drafters = (Vanilla(target.device), recycling, recycling)  # the second time with a tree that is full
        return [generate(target, drafter, prompt, max_new_tokens=24).tokens for drafter in drafters]

    plain = tokens(loaded.target)
    model = loaded.target.model
    places = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    dispatch_model(model, places | {"lm_head": "cpu"}, skip_keys=model._skip_keys_device_placement, force_hooks=True)
    assert sum(hasattr(module, "_hf_hook") for module in model.modules()) > 10
    assert tokens(Target(model)) == plain


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["model.device=cpu", "model.device_map=auto"], ["model.device=cpu", "one of the two"]),
        (["model.device_map=everywhere"], ["everywhere", "balanced"]),
        (["model.tensor_parallel=2"], ["tensor_parallel=2", "true or false"]),
        (["model.tensor_parallel=true"], ["torchrun --nproc-per-node"]),
        (["model.tensor_parallel=true", "model.device_map=auto"], ["leave out model.device"]),
    ],
)
def test_placements_that_contradict(evaluate, tmp_path, overrides, names):
    check(evaluate(*overrides), *names)
    assert not list(tmp_path.rglob("metadata.json"))


def test_a_model_that_would_be_offloaded_is_refused(checkpoint):
    model = models._load(models.ModelSettings("toy", str(checkpoint), device="cpu")).target.model
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    with pytest.raises(UserError, match="does not fit on the devices of model.device_map=auto"):
        devices.place_model(model, models.ModelSettings("toy", str(checkpoint), device_map="auto"), torch.device("cpu"))


# several processes


def test_heads_that_the_processes_cannot_share(checkpoint, monkeypatch):
    model = models._load(models.ModelSettings("toy", str(checkpoint), device="cpu")).target.model
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="3 processes cannot share its 2 key-value heads"):
        devices.place_model(model, models.ModelSettings("toy", "", tensor_parallel=True), torch.device("cpu"))


def test_a_map_over_devices_takes_eager_steps_only_and_ranks_what_they_are_asked_for(checkpoint, monkeypatch):
    loaded = models._load(models.ModelSettings("toy", str(checkpoint), device="cpu"))
    loaded.target.devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert choose_execution("auto", loaded).name == "eager"
    with pytest.raises(UserError, match="execution=graph: a device map's model takes eager steps only"):
        choose_execution("graph", loaded)
    loaded.target.devices = [torch.device("cuda", 0)]
    monkeypatch.setattr(loaded.target, "device", torch.device("cuda", 0))
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert choose_execution("auto", loaded).name == "eager", "no trial: where one rank fails, the others would wait"
    assert choose_execution("graph", loaded).name == "graph"


def test_torchrun_without_tensor_parallelism_and_with_a_launcher(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="torchrun started 2 processes"):
        devices.check_placement(models.ModelSettings("toy", ""))
    with (
        pytest.raises(UserError, match="launcher=slurm: not under torchrun"),
        processes.ranks(["-m", "launcher=slurm"]),
    ):
        pass


def test_of_several_processes_the_first_one_prints_and_writes(monkeypatch, capsys):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with processes.ranks(["launcher=basic"]):
        print("a table", file=sys.stderr)
        processes.on_first_rank(print, "a file")
    print("after it")
    assert capsys.readouterr() == ("after it\n", "")


@pytest.mark.slow
def test_two_ranks_decode_what_one_process_decodes(evaluate, checkpoint, bench_file, tmp_path):
    """Tensor parallelism on two gloo ranks: same records; goes on where it stopped; the first error ends all."""
    one, two = tmp_path / "one", tmp_path / "two"
    base = (f"model.path={checkpoint}", "start=hot")
    for method in METHODS:
        assert evaluate(*base, f"method={method}", "bench.end=4", f"run_dir={one / method}").code == 0
    assert evaluate(*base, "method=recycling", "bench.end=2", f"run_dir={tmp_path / 'half'}").code == 0
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "evaluation.run", "-m", "model=path"]
    torchrun += [f"model.path={checkpoint}", "model.name=toy", "model.tensor_parallel=true", "bench=file"]
    torchrun += [f"bench.path={bench_file}", "bench.end=4", "max_new_tokens=24", "start=hot"]

    done = started(*torchrun, f"method={','.join(METHODS)}", f"run_dir={two}/${{method.name}}")
    assert done.returncode == 0, done.stderr
    assert "question" not in done.stderr, "no bar in a log"
    for method in METHODS:
        assert core(rows(two / method)) == core(rows(one / method))
    assert json.loads((two / "recycling/metadata.json").read_text())["device"].startswith("2 x ")

    # The state that a kill after two questions leaves; behind it a job that only the first rank can fail in.
    cut, busy = two / "recycling", tmp_path / "busy"
    (cut / "answers.jsonl").write_text("".join((cut / "answers.jsonl").read_text().splitlines(keepends=True)[:2]))
    shutil.move(tmp_path / "half/state.safetensors", cut / "state-2.safetensors")
    with AnswerStore(busy).locked():
        done = started(*torchrun, "method=recycling", f"run_dir={cut},{busy}")
    assert core(rows(cut)) == core(rows(one / "recycling"))
    assert done.returncode != 0
    assert len(errors(done)) == 1 and f"{busy}: another run is at work" in errors(done)[0], done.stderr


# launchers


@pytest.mark.slow
def test_jobs_in_processes_of_their_own(checkpoint, bench_file, tmp_path):
    """submitit's local executor: complete runs, one report, and the mistake in one job told in one line."""
    pytest.importorskip("submitit", reason="optional: requirements-cluster.txt")
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="optional: requirements-cluster.txt")
    sweep = ["-m", "evaluation.run", "-m", "launcher=submitit_local", "model=path", f"model.path={checkpoint}"]
    sweep += ["model.name=toy", "bench=file", f"bench.path={bench_file}", "bench.end=3", "max_new_tokens=24"]
    done = started(*sweep, "method.k=4,8,9", f"results_dir={tmp_path}")
    assert done.returncode == 2 and len(errors(done)) == 1 and "k=4" in errors(done)[0], done.stderr
    assert "Traceback" not in done.stderr
    runs = [json.loads(path.read_text()) for path in tmp_path.glob("default/runs/*/summary.json")]
    assert len(runs) == 2 and all(run["questions"] == 3 for run in runs)
    assert (tmp_path / "default/tables/main.csv").exists()
    assert "recycling (cold)" in done.stdout


def test_a_launcher_that_is_not_installed(evaluate):
    check(evaluate("-m", "hydra/launcher=nonesuch"), "not installed", "requirements-cluster.txt")


def test_a_failure_arrives_from_another_process():
    data = pickle.dumps(Failure("once"))
    Failure.noted.clear()
    assert pickle.loads(data).message == "once" and Failure.noted == ["once"]
    Failure.noted.clear()


# timings never share a device


def test_a_second_run_waits_for_the_device(evaluate, monkeypatch, tmp_path):
    other = locks._try_lock("cpu")
    monkeypatch.setattr(locks, "time", SimpleNamespace(sleep=lambda _: other.close()))  # released once one waits
    outcome = evaluate("bench.end=1", "method=vanilla", "model.device=cpu", f"run_dir={tmp_path / 'run'}")
    assert outcome.code == 0 and outcome.err.count("waiting: another run is being timed on cpu") == 1
