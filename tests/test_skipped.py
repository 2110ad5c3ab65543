"""Tests that are skipped say so, and what would let them run."""

import os
import subprocess
import sys
from pathlib import Path

from tests import conftest, skipped
from tests.evaluation.page.test_browser import WANTED


def test_the_last_line_says_what_was_skipped_and_what_it_takes(tmp_path):
    (tmp_path / "conftest.py").write_text("from skipped import pytest_unconfigure")
    mark = f"@pytest.mark.skip(reason={WANTED!r})"
    (tmp_path / "test_page.py").write_text(
        f"import pytest\n{mark}\ndef test_one(): pass\n{mark}\ndef test_two(): pass\ndef test_three(): pass\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(Path(skipped.__file__).parent)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"NOT TESTED, skipped here: 2 ({WANTED})"
    assert conftest.pytest_unconfigure is skipped.pytest_unconfigure and "apt-get install chromium" in WANTED
