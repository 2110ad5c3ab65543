"""Devices: those that torch cannot use, maps over several, and who holds which. GPUs are made up, locks are real."""

import functools
import os
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from filelock import Timeout

from evaluation.loading import devices, models
from evaluation.loading.models import ModelSettings, choose_execution
from model.decoder import Decoder
from model.errors import UserError
from model.files import ROOT

AUTO = ModelSettings("toy", "nowhere")


@pytest.fixture
def toy(checkpoint):
    return ModelSettings("toy", str(checkpoint), device="cpu")


@pytest.mark.parametrize("built", ["13.0", None])
def test_a_gpu_that_torch_cannot_use_is_not_passed_over_in_silence(checkpoint, monkeypatch, built):
    """device=auto would decode on the CPU, for days. Hidden from torch, or device=cpu: on purpose."""

    def count():
        warnings.warn("The NVIDIA driver on your system is too old", stacklevel=2)
        return 0

    def library(device="auto"):
        return Decoder.from_pretrained(str(checkpoint), device=device).target

    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: built is not None)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", functools.cache(count), raising=False)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with warnings.catch_warnings(action="ignore"):
        with pytest.raises(UserError, match="^device=auto: torch .*whl/cu12.*device=cpu$"):
            library()
        assert library("cpu").device.type == "cpu"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert library().device.type == "cpu"


def test_a_map_over_devices_takes_eager_steps_only_and_offloads_nothing(toy):
    loaded = models.load_model(toy)
    loaded.target.devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert choose_execution("auto", loaded).name == "eager"
    with pytest.raises(UserError, match="execution=graph: "):
        choose_execution("graph", loaded)
    loaded.target.model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    with pytest.raises(UserError, match="does not fit on the devices of model.device_map=None"):
        models.check_offloaded(loaded.target.model, toy)


@pytest.fixture
def gpus(monkeypatch):
    """Three GPUs that exist by name alone."""

    def properties(index):
        return SimpleNamespace(uuid=f"{os.getpid()}-{index}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(devices, "POLL_SECONDS", 0.01)
    assert not devices._locks


def name(index):
    return devices._lock_name(torch.device("cuda", index))


def is_free(index):
    """Whether another process could take it now."""
    try:
        devices._locked(name(index)).release()
    except Timeout:
        return False
    return True


HOLD = """
import sys
from evaluation.loading import devices
handle = devices._locked(sys.argv[1])
print(True, flush=True)
sys.stdin.readline()
"""


def test_timed_runs_wait_for_a_process_until_it_is_killed_and_untimed_ones_do_not(
    monkeypatch, capsys
):
    own = f"cpu-{os.getpid()}"
    monkeypatch.setattr(devices, "CPU", own)
    monkeypatch.setattr(devices, "_lock_name", lambda device: own)
    cpu = ModelSettings("toy", "nowhere", device="cpu")
    command = [sys.executable, "-c", HOLD, own]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    other = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    assert other.stdout.readline() == "True\n"
    with devices.exclusive(cpu, timed=False):
        assert not devices._locks and not capsys.readouterr().err
    threading.Timer(0.2, other.kill).start()  # the system releases its lock
    with devices.exclusive(cpu):
        other.communicate()
        said = f"waiting: another run is being timed on {own}; this one starts when it is done\n"
        assert capsys.readouterr().err == said


def test_a_command_keeps_the_first_free_gpu_and_drops_its_model_before_another(gpus, monkeypatch):
    """The lock was released while the weights stayed: two sweeps on one GPU ran out of memory."""
    freed = []
    target = SimpleNamespace(device=torch.device("cuda:1"))
    monkeypatch.setattr(models, "_loaded", SimpleNamespace(target=target))
    monkeypatch.setattr(models, "give_back", lambda device: freed.append(is_free(1)))
    other = devices._locked(name(0))
    with devices.keep_devices():
        for timed in (False, True):
            with devices.exclusive(AUTO, timed=timed) as placed:
                assert placed.device == "cuda:1" and not is_free(1)
            if not timed:
                other.release()
        assert not is_free(1) and models._loaded is not None, "the next job finds both"
        with devices.exclusive(ModelSettings("toy", "nowhere", device="cuda:0")):
            assert is_free(1) and not is_free(0) and freed == [False]
    assert is_free(0) and models._loaded is None
