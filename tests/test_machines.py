"""Other machines: a checkout on Windows, an environment without pip, a container's quota of cores."""

import hashlib
import os
import subprocess
import sys

import pytest

from model.files import ROOT
from model.tuning import usable_cores


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the files of a release have no history")
def test_a_checkout_on_windows_runs_in_wsl_and_its_data_keep_their_hashes(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "-c", "core.autocrlf=true", ROOT, clone], check=True)
    for script in ("eval.sh", "test.sh", "tools/environment.sh"):
        subprocess.run(["bash", "-n", clone / script], check=True)
    for file in ("data/sample/question.jsonl", "data/embedded/model.safetensors"):
        digests = [hashlib.sha256((root / file).read_bytes()).digest() for root in (ROOT, clone)]
        assert digests[0] == digests[1], file


@pytest.fixture
def set_up(tmp_path):
    """Call `environment` in a folder whose .venv was made without pip, for a file of no packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    (tmp_path / "requirements.txt").write_text("# none\n")

    def calling(**variables):
        script = f"source '{ROOT}/tools/environment.sh'; environment requirements.txt"
        kept = {key: value for key, value in os.environ.items() if key != "PYTHON"}
        return subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=kept | variables,
            capture_output=True,
            text=True,
        )

    return calling


@pytest.mark.slow
def test_an_environment_without_pip_gets_it(set_up, tmp_path):
    outcome = set_up()
    assert outcome.returncode == 0, outcome.stderr
    subprocess.run([tmp_path / ".venv/bin/python", "-m", "pip", "--version"], check=True)


def test_where_nothing_can_install_pip_the_error_says_so(set_up, tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "none/ensurepip.py").write_text("raise ImportError")  # as Debian's Python
    folders = {"PYTHONPATH": str(tmp_path / "none"), "PATH": "/usr/bin:/bin"}
    outcome = set_up(**folders)
    assert outcome.returncode == 2
    assert "error: .venv has no pip" in outcome.stderr and "network" not in outcome.stderr


V1 = "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        # the tightest level counts
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "20000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "40000 100000\n",
            },
            0.2,
        ),
        # the path is the host's, the files are the container's
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/1f\n3:pids:/x\n",
                f"{V1}/cpu.cfs_quota_us": "70000\n",
                f"{V1}/cpu.cfs_period_us": "100000\n",
            },
            0.7,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({}, None),
    ],
)
def test_a_quota_of_cores_counts(tmp_path, files, cores):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_cores(tmp_path) == (cores or os.cpu_count())
