"""Files that are there completely or not at all, with several writers at once."""

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from model.errors import UserError
from model.files import load_state, replaced, save_state, write_json, write_text


def write_often(folder, number):
    for _ in range(50):
        write_json(folder / "kept.json", [number] * 5000)
        save_state({"rows": torch.full((200, 8), number)}, folder / "state.safetensors")


def test_two_processes_writing_the_same_files_do_not_break_one_another(tmp_path):
    """Both had written to NAME.part: one renamed the other's half."""
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        list(pool.map(write_often, [tmp_path] * 2, (1, 2)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept.json", "state.safetensors"]
    assert len(set(json.loads((tmp_path / "kept.json").read_text()))) == 1
    assert load_state(tmp_path / "state.safetensors")["rows"].unique().numel() == 1


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "kept.txt"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), replaced(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    full = pytest.raises(UserError, match=r"kept.txt: cannot be written \(No space left")
    with full, replaced(path):
        raise OSError(28, "No space left on device")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    below = path / "x.json"
    for write in (lambda: write_json(below, {}), lambda: save_state({"a": torch.zeros(1)}, below)):
        with pytest.raises(UserError, match="x.json: cannot be written"):
            write()


def test_text_files_hold_no_control_characters(tmp_path):
    """A model's name, from records of anyone, had set a terminal's title from main.md."""
    write_text(tmp_path / "a", "é\ta\x1b]2;b\x07\r\u202e\ud800\n")
    assert (tmp_path / "a").read_bytes() == "é\ta\\u001b]2;b\\u0007\\u000d\\u202e?\n".encode()
