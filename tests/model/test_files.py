"""Files that are there whole or not at all, with several writers at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.errors import UserError
from model.files import load_state, replaced, save_state, write_json, write_text

ROOT = Path(__file__).resolve().parents[2]
RACE = """
import sys
from pathlib import Path
import torch
from model.files import save_state, write_json
folder, number = Path(sys.argv[1]), int(sys.argv[2])
for _ in range(50):
    write_json(folder / "kept.json", [number] * 5000)
    save_state({"candidates": torch.full((200, 8), number)}, folder / "state.safetensors")
"""


def test_two_processes_writing_the_same_files_do_not_break_one_another(tmp_path):
    """Both had written to NAME.part: one renamed it away under the other, or renamed the other's half."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, tmp_path, str(n)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in (1, 2)
    ]
    for process in started:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept.json", "state.safetensors"]
    assert len(set(json.loads((tmp_path / "kept.json").read_text()))) == 1
    assert load_state(tmp_path / "state.safetensors")["candidates"].unique().numel() == 1


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "kept.txt"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), replaced(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    with (
        pytest.raises(UserError, match=r"kept.txt: cannot be written \(No space left on device\)"),
        replaced(path),
    ):
        raise OSError(28, "No space left on device")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    for below in (path / "x.json", path / "deeper/x.json"):
        with pytest.raises(
            UserError, match=r"x.json: cannot be written \(Not a directory|File exists"
        ):
            write_json(below, {})
    with pytest.raises(UserError, match="x.safetensors: cannot be written"):
        save_state({"candidates": torch.zeros(1)}, path / "x.safetensors")


def test_text_files_hold_no_control_characters(tmp_path):
    """A model's name, from records of anyone, had set a terminal's title from main.md."""
    write_text(tmp_path / "a", "é\ta\x1b]2;b\x07\r\u202e\ud800\n")
    assert (tmp_path / "a").read_bytes() == "é\ta\\u001b]2;b\\u0007\\u000d\\u202e?\n".encode()
