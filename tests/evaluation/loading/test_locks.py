"""Who holds which device, and for how long: GPUs are made up, locks are real."""

import os
import pickle
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from evaluation import run
from evaluation.loading import locks, models
from evaluation.loading.settings import ModelSettings

ROOT = Path(__file__).resolve().parents[3]
AUTO = ModelSettings("toy", "nowhere")


@pytest.fixture
def gpus(monkeypatch):
    """Three GPUs that exist by name alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"{os.getpid()}-{index}")
    )
    monkeypatch.setattr(locks, "POLL_SECONDS", 0.01)
    assert not locks._locks


def name(index: int) -> str:
    return locks._identity(torch.device("cuda", index))


def is_free(index: int) -> bool:
    """Whether another process could take it now."""
    handle = locks._try_lock(name(index))
    if handle is not None:
        handle.close()
    return handle is not None


@pytest.fixture
def cpu(monkeypatch):
    """The settings of a run on a CPU of our own; `locks.CPU` is its name."""
    monkeypatch.setattr(locks, "CPU", own := f"cpu-{os.getpid()}")
    monkeypatch.setattr(locks, "_identity", lambda device: own if device.type == "cpu" else device.type)
    assert not locks._locks
    return ModelSettings("toy", "nowhere", device="cpu")


def elsewhere(timed: bool) -> subprocess.Popen:
    """Another process that holds the CPU until it is written to; it prints a line when it has it."""
    code = (
        "import sys; from evaluation.loading import locks\nfrom evaluation.loading.models import ModelSettings\n"
        "locks.CPU = sys.argv[1]; locks._identity = lambda device: sys.argv[1]\n"
        "with locks.exclusive(ModelSettings('toy', 'nowhere', device='cpu'), timed=sys.argv[2] == 'True'):\n"
        "    print('held', flush=True); sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", code, locks.CPU, str(timed)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


def slot(index: int):
    """What an untimed run on this CPU holds."""
    return locks._try_lock(f"{locks.CPU}-untimed-{index}")


def test_untimed_runs_share_the_cpu_and_wait_for_who_is_timed(cpu, capsys):
    with locks.keep_devices(), locks.exclusive(cpu, timed=False):
        free = locks._try_lock(locks.CPU)
        assert free is not None, "nobody is timed"
        free.close()
        other = elsewhere(timed=False)
        assert other.stdout.readline() == "held\n", "another untimed one is at work at the same time"
        assert other.communicate("\n", timeout=60)[1] == "" and not capsys.readouterr().err
    timed = locks._try_lock(locks.CPU)
    threading.Timer(0.3, timed.close).start()
    with locks.exclusive(cpu, timed=False):
        assert "waiting: another run is being timed" in capsys.readouterr().err


def test_a_timed_run_waits_until_the_untimed_ones_have_ended(cpu, capsys):
    """It was timed beside them."""
    own, other = slot(1), elsewhere(timed=False)
    assert other.stdout.readline() == "held\n"
    threading.Timer(0.2, own.close).start()
    threading.Timer(0.4, other.kill).start()  # the system lets go of what it held
    with locks.exclusive(cpu):
        assert own.closed and other.wait(60)
        told = capsys.readouterr().err
        assert told == f"waiting: untimed runs are at work on {locks.CPU}; this timed one starts when they are done\n"
        assert locks._try_lock(locks.CPU) is None
    other.communicate()
    with locks.exclusive(cpu):
        assert not capsys.readouterr().err


def test_one_that_waits_to_be_timed_lets_no_more_untimed_ones_in(cpu, monkeypatch):
    """Else untimed ones that follow one another would keep it waiting for ever."""
    first, seen, look = slot(0), [], locks._all_slots_free

    def looks():
        seen.append(is_locked(locks.CPU))
        if len(seen) == 3:
            first.close()
        return look()

    monkeypatch.setattr(locks, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(locks, "_all_slots_free", looks)
    with locks.exclusive(cpu):
        assert seen == [True] * 3, "who comes later waits behind it"


def is_locked(device: str) -> bool:
    handle = locks._try_lock(device)
    if handle is not None:
        handle.close()
    return handle is None


def test_a_command_of_both_kinds_of_jobs_holds_what_each_needs_and_waits_for_no_slot_of_its_own(cpu):
    """It frees its slot before it asks for the whole CPU: two such commands do not wait for each other."""
    with locks.keep_devices():
        for timed in (False, True, True, False, True):
            with locks.exclusive(cpu, timed):
                assert set(locks._locks) == {locks.CPU if timed else f"{locks.CPU}-untimed"}
    assert not locks._locks and not is_locked(locks.CPU)


def test_auto_takes_the_first_free_gpu_and_keeps_to_it(gpus):
    other = locks._try_lock(name(0))
    with locks.keep_devices():
        with locks.exclusive(AUTO) as placed:
            assert placed.device == "cuda:1" and not is_free(1)
        other.close()
        with locks.exclusive(AUTO) as placed:
            assert placed.device == "cuda:1", "this process has it, and its weights may lie there"
    assert is_free(0) and is_free(1)


def test_where_all_are_taken_auto_waits_for_whichever_comes_free_first(gpus, capsys):
    others = [locks._try_lock(name(index)) for index in range(3)]
    threading.Timer(0.3, others[2].close).start()
    with locks.exclusive(AUTO) as placed:
        assert placed.device == "cuda:2"
    assert capsys.readouterr().err.count("waiting: another run is being timed on any of 3 GPUs") == 1
    for other in others:
        other.close()


def test_a_command_holds_its_gpu_between_jobs_and_a_single_run_drops_its_model_first(gpus, monkeypatch):
    """The lock was released while the weights stayed: two sweeps on one GPU took turns and ran out of memory."""
    monkeypatch.setattr(models, "_loaded", SimpleNamespace(target=SimpleNamespace(devices=[torch.device("cuda", 0)])))
    freed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(is_free(0)))
    with locks.keep_devices():
        with locks.exclusive(AUTO), locks.exclusive(AUTO):
            pass
        assert not is_free(0) and models._loaded is not None, "the next job of the sweep finds both"
        with locks.exclusive(ModelSettings("toy", "nowhere", device="cuda:1")):
            assert is_free(0) and not is_free(1) and freed == [False], "it went on elsewhere: gone before another may"
    assert is_free(1)
    monkeypatch.setattr(models, "_loaded", SimpleNamespace(target=SimpleNamespace(devices=[torch.device("cuda", 0)])))
    with locks.exclusive(AUTO):
        pass
    assert models._loaded is None and freed == [False, False] and is_free(0)


def test_two_that_change_places_do_not_wait_for_each_other(gpus):
    one, two = (ModelSettings("toy", "nowhere", device=f"cuda:{index}") for index in (0, 1))
    other = locks._try_lock(name(1))
    with locks.keep_devices():
        with locks.exclusive(one):
            pass

        def moves() -> None:  # the other one waits for ours while it holds what we want
            while not is_free(0):
                time.sleep(0.01)
            other.close()

        moving = threading.Thread(target=moves)
        moving.start()
        with locks.exclusive(two):
            moving.join(10)
            assert not moving.is_alive()


def test_a_whole_sweep_holds_its_device(evaluate, monkeypatch):
    seen = []
    monkeypatch.setattr(run, "defer", lambda job: seen.append(set(locks._locks)) and False)
    assert evaluate("-m", "method=vanilla,pld", "bench.end=1", "max_new_tokens=4", "model.device=cpu").code == 0
    assert seen == [set(), {"cpu"}] and not locks._locks


@pytest.mark.parametrize("visible", ["2,3", None])
def test_jobs_of_submitit_see_the_gpus_that_the_command_sees(monkeypatch, visible):
    """It gave them CUDA_VISIBLE_DEVICES="": Vicuna was measured on the processor without a word."""
    pytest.importorskip("submitit", reason="optional: requirements-cluster.txt")
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="optional: requirements-cluster.txt")
    from hydra_plugins.local_jobs import LocalJobs

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    launcher = LocalJobs(timeout_min=1)
    launcher.task_function = SimpleNamespace  # comes behind what restores the variable
    job = (
        "import os, pickle, sys; held = pickle.load(sys.stdin.buffer); "
        "print(os.environ.get('CUDA_VISIBLE_DEVICES'), held.params, 'torch' in sys.modules)"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # as submitit sets it without gpus_per_node
    done = subprocess.run(
        [sys.executable, "-c", job], input=pickle.dumps(launcher), env=environment, cwd=ROOT, capture_output=True
    )
    assert done.stdout.decode().split("\n")[0] == f"{visible} {{'timeout_min': 1}} False", done.stderr.decode()


def test_another_user_can_lock_what_a_careful_one_made(gpus, monkeypatch, tmp_path):
    """Nobody but its maker may write the file, whatever his umask says, and all may read it: that is enough."""
    monkeypatch.setattr(locks.tempfile, "gettempdir", lambda: str(tmp_path))
    mask = os.umask(0o077)
    try:
        assert is_free(0)
    finally:
        os.umask(mask)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644
    modes = []
    opened = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, mode="r", **more: (modes.append(mode), opened(path, mode, **more))[1]
    )
    assert is_free(0)
    assert modes == ["xb", "rb"], "made once, and then opened to be read"
    file.chmod(0o444)
    holder = locks._try_lock(name(0))
    assert holder is not None and not is_free(0)
    holder.close()


def test_a_killed_holder_lets_go(gpus):
    hold = "import sys, time; from evaluation.loading import locks; "
    hold += "held = locks._try_lock(sys.argv[1]); print(held, flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", hold, name(0)], cwd=ROOT, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() and not is_free(0)
    holder.kill()
    holder.communicate()
    assert is_free(0)


def test_no_module_needs_what_windows_lacks():
    sources = [path for folder in ("evaluation", "model") for path in (ROOT / folder).rglob("*.py")]
    assert not [path for path in sources if re.search(r"^(import|from) (fcntl|resource|pwd)\b", path.read_text(), re.M)]
