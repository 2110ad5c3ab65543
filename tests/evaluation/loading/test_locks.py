"""Who holds which device, and for how long: GPUs are made up, locks are real."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import Timeout

from evaluation.loading import devices, models
from evaluation.loading.settings import ModelSettings
from evaluation.running import scheduling

ROOT = Path(__file__).resolve().parents[3]
AUTO = ModelSettings("toy", "nowhere")


@pytest.fixture
def gpus(monkeypatch):
    """Three GPUs that exist by name alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(uuid=f"{os.getpid()}-{index}"),
    )
    monkeypatch.setattr(devices, "POLL_SECONDS", 0.01)
    assert not devices._locks


def name(index: int) -> str:
    return devices._lock_name(torch.device("cuda", index))


def is_free(index: int) -> bool:
    """Whether another process could take it now."""
    try:
        devices._locked(name(index)).release()
    except Timeout:
        return False
    return True


@pytest.fixture
def cpu(monkeypatch):
    """The settings of a run on a CPU of our own; `devices.CPU` is its name."""
    monkeypatch.setattr(devices, "CPU", name := f"cpu-{os.getpid()}")
    monkeypatch.setattr(
        devices, "_lock_name", lambda device: name if device.type == "cpu" else device.type
    )
    assert not devices._locks
    return ModelSettings("toy", "nowhere", device="cpu")


HOLD = """
import sys
from evaluation.loading import devices
handle = devices._locked(sys.argv[1])
print(True, flush=True)
sys.stdin.readline()
"""


def test_timed_runs_wait_for_a_process_until_it_is_killed_and_untimed_ones_do_not(cpu, capsys):
    command = [sys.executable, "-c", HOLD, devices.CPU]
    other = subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout.readline() == "True\n"
    with devices.exclusive(cpu, timed=False):
        assert not devices._locks and not capsys.readouterr().err
    threading.Timer(0.2, other.kill).start()  # the system releases its lock
    with devices.keep_devices(), devices.exclusive(cpu):
        other.communicate()
        error = capsys.readouterr().err
        assert (
            error
            == f"waiting: another run is being timed on {devices.CPU}; this one starts when it is done\n"
        )
        with devices.exclusive(cpu, timed=False):
            assert set(devices._locks) == {devices.CPU}, (
                "a command keeps its device for the timed runs to come"
            )


def test_auto_takes_the_first_free_gpu_and_keeps_to_it(gpus):
    other = devices._locked(name(0))
    with devices.keep_devices():
        with devices.exclusive(AUTO, timed=False) as placed:
            assert placed.device == "cuda:1" and not is_free(1), (
                "an untimed run has its GPU for itself, too"
            )
        other.release()
        with devices.exclusive(AUTO) as placed:
            assert placed.device == "cuda:1", "this process has it, and its weights may lie there"
    assert is_free(0) and is_free(1)


def test_where_all_are_taken_auto_waits_for_whichever_comes_free_first(gpus, capsys):
    others = [devices._locked(name(index)) for index in range(3)]
    threading.Timer(0.3, others[2].release).start()
    with devices.exclusive(AUTO) as placed:
        assert placed.device == "cuda:2"
    assert (
        capsys.readouterr().err.count("waiting: another run is being timed on any of 3 GPUs") == 1
    )
    for other in others:
        other.release()


def test_a_command_holds_its_gpu_between_jobs_and_a_single_run_drops_its_model_first(
    gpus, monkeypatch
):
    """The lock was released while the weights stayed: two sweeps on one GPU took turns and ran out of memory."""
    monkeypatch.setattr(
        models,
        "_loaded",
        SimpleNamespace(target=SimpleNamespace(devices=[torch.device("cuda", 0)])),
    )
    freed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(is_free(0)))
    with devices.keep_devices():
        with devices.exclusive(AUTO), devices.exclusive(AUTO):
            pass
        assert not is_free(0) and models._loaded is not None, "the next job of the sweep finds both"
        with devices.exclusive(ModelSettings("toy", "nowhere", device="cuda:1")):
            assert is_free(0) and not is_free(1) and freed == [False], (
                "it went on elsewhere: gone before another may"
            )
    assert is_free(1)
    monkeypatch.setattr(
        models,
        "_loaded",
        SimpleNamespace(target=SimpleNamespace(devices=[torch.device("cuda", 0)])),
    )
    with devices.exclusive(AUTO):
        pass
    assert models._loaded is None and freed == [False, False] and is_free(0)


def test_two_that_change_places_do_not_wait_for_each_other(gpus):
    one, two = (ModelSettings("toy", "nowhere", device=f"cuda:{index}") for index in (0, 1))
    other = devices._locked(name(1))
    with devices.keep_devices():
        with devices.exclusive(one):
            pass

        def moves() -> None:  # the other one waits for ours while it holds what we want
            while not is_free(0):
                time.sleep(0.01)
            other.release()

        moving = threading.Thread(target=moves)
        moving.start()
        with devices.exclusive(two):
            moving.join(10)
            assert not moving.is_alive()


def test_a_whole_sweep_holds_its_device(evaluate, monkeypatch):
    seen = []
    real = scheduling._run
    monkeypatch.setattr(
        scheduling, "_run", lambda *group: (seen.append(set(devices._locks)), real(*group))
    )
    assert (
        evaluate(
            "-m", "method=vanilla,pld", "bench.end=1", "max_new_tokens=4", "model.device=cpu"
        ).code
        == 0
    )
    assert seen == [set(), {"cpu"}] and not devices._locks


def test_another_user_can_lock_what_a_careful_one_made(gpus, monkeypatch, tmp_path):
    """All may open the file, whatever the umask says."""
    monkeypatch.setattr(devices.tempfile, "gettempdir", lambda: str(tmp_path))
    mask = os.umask(0o077)
    try:
        assert is_free(0)
    finally:
        os.umask(mask)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o666
    assert is_free(0)
