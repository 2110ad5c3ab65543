"""More than one device: device maps, launchers, devices that are not shared."""

import functools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model

from evaluation.loading import devices, models
from evaluation.loading.models import choose_execution
from model.decoder import Decoder
from model.engine import Target, generate
from model.errors import UserError
from model.methods.vanilla import Vanilla
from model.recycling import TokenRecycling, build_template

ROOT = Path(__file__).resolve().parents[3]


def started(*arguments: str) -> subprocess.CompletedProcess:
    """A command of this Python on the CPU, one thread a process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def errors(done: subprocess.CompletedProcess) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("built", ["13.0", None])
def test_a_gpu_that_torch_cannot_use_is_not_passed_over_in_silence(checkpoint, monkeypatch, built):
    """device=auto would decode on the CPU, for days. Hidden from torch, or device=cpu: on purpose."""

    def count():
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=2
        )
        return 0

    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: built is not None)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", functools.cache(count), raising=False)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = models.ModelSettings("toy", str(checkpoint), device="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for load, key in (
            (lambda: models._load(settings), "model.device"),
            (lambda: pretrained(checkpoint), "device"),
        ):
            with pytest.raises(
                UserError, match=f"^{key}=auto: torch .* --index-url https://.*whl/cu12.*{key}=cpu$"
            ):
                load()
        assert pretrained(checkpoint, device="cpu").target.device.type == "cpu"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert models._load(settings).target.device.type == "cpu"


def pretrained(checkpoint, **settings):
    return Decoder.from_pretrained(str(checkpoint), **settings)


# device maps


def test_accelerate_hooks_leave_the_tokens_alone(checkpoint):
    """Hooks on every module, as a map over several devices puts them there; here all of them say cpu."""
    loaded = models._load(models.ModelSettings("toy", str(checkpoint), device="cpu"))
    prompt = [1, 5, 9, 20, 33]

    def tokens(target: Target) -> list[list[int]]:
        recycling = TokenRecycling(
            target.vocab_size, build_template("2.2.2", k=8), k=8, device=target.device
        )
        # the second time with a tree that is full
        drafters = (
            Vanilla(target.device),
            recycling,
            recycling,
        )
        return [generate(target, drafter, prompt, max_new_tokens=24).tokens for drafter in drafters]

    plain = tokens(loaded.target)
    model = loaded.target.model
    places = {
        "model.embed_tokens": "cpu",
        "model.layers": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
    }
    dispatch_model(
        model,
        places | {"lm_head": "cpu"},
        skip_keys=model._skip_keys_device_placement,
        force_hooks=True,
    )
    assert sum(hasattr(module, "_hf_hook") for module in model.modules()) > 10
    assert tokens(Target(model)) == plain


def test_a_model_that_would_be_offloaded_is_refused(checkpoint):
    model = models._load(models.ModelSettings("toy", str(checkpoint), device="cpu")).target.model
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    with pytest.raises(UserError, match="does not fit on the devices of model.device_map=auto"):
        models.check_offloaded(
            model, models.ModelSettings("toy", str(checkpoint), device_map="auto")
        )


def test_a_map_over_devices_takes_eager_steps_only(checkpoint):
    loaded = models._load(models.ModelSettings("toy", str(checkpoint), device="cpu"))
    loaded.target.devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert choose_execution("auto", loaded).name == "eager"
    with pytest.raises(UserError, match="execution=graph: "):
        choose_execution("graph", loaded)


def test_a_peak_is_of_all_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100 + device.index)
    assert devices.peak_bytes([torch.device("cuda", 0), torch.device("cuda", 1)]) == 201
    assert devices.peak_bytes([torch.device("mps")]) is None
    assert devices.peak_bytes([torch.device("cpu")]) > 2**20, "the process's resident set"


# launchers


@pytest.mark.slow
def test_jobs_in_processes_of_their_own(checkpoint, bench_file, tmp_path):
    """submitit's local executor: complete runs, one report, and the mistake in one job told in one line."""
    pytest.importorskip("submitit", reason="optional: requirements-cluster.txt")
    pytest.importorskip(
        "hydra_plugins.hydra_submitit_launcher", reason="optional: requirements-cluster.txt"
    )
    sweep = [
        "-m",
        "evaluation.run",
        "-m",
        "hydra/launcher=submitit_local",
        "model=path",
        f"model.path={checkpoint}",
    ]
    sweep += [
        "model.name=toy",
        "bench=file",
        f"bench.path={bench_file}",
        "bench.end=3",
        "max_new_tokens=24",
    ]
    done = started(*sweep, "method.k=8,9,400", f"results_dir={tmp_path}")
    assert done.returncode == 2 and len(errors(done)) == 1 and "k=400" in errors(done)[0], (
        done.stderr
    )
    assert "Traceback" not in done.stderr
    runs = [json.loads(path.read_text()) for path in tmp_path.glob("default/runs/*/summary.json")]
    assert len(runs) == 2 and all(run["questions"] == 3 for run in runs)
    assert (tmp_path / "default/tables/main.csv").exists()
    assert "recycling (cold)" in done.stdout


@pytest.mark.parametrize(("name", "current"), [("cuda", []), ("cuda:1", [torch.device("cuda", 1)])])
def test_a_gpu_without_a_number_is_the_current_one(name, current, monkeypatch):
    """torch makes no device without an index the current one: `model.device=cuda` ended in its traceback."""
    chosen = []
    monkeypatch.setattr(models, "choose_device", lambda name, key: torch.device(name))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert models._prepare_device(models.ModelSettings("toy", "", device=name)) == torch.device(
        name
    )
    assert chosen == current
