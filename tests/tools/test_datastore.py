"""Building a datastore: what is read from files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from model.errors import UserError
from model.methods.copying.datastore import Datastore
from tools import datastore

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "data" / "embedded"


def write_jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_texts_of_every_format(tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text("one\ntwo\n")
    rows = write_jsonl(tmp_path / "b.jsonl", {"text": "three", "more": 1}, {"text": "four"})
    assert list(datastore.documents([plain, rows])) == [["one\ntwo\n"], ["three"], ["four"]]
    plain.write_text("a line of text\n" * 20_000)  # cut at ends of lines
    (pieces,) = datastore.documents([plain])
    assert "".join(pieces) == plain.read_text() and len(pieces) == 5
    assert all(piece.endswith("\n") for piece in pieces)


def test_what_holds_no_text_or_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\x00")
    cases = {"absent.txt": "cannot be read", "c.txt": "is not UTF-8", "d.csv": "must be a .txt"}
    for i, row in enumerate(('{"text": 1}', '["x"]', '{"text": "x"')):
        (tmp_path / f"{i}.jsonl").write_text('{"text": "fine"}\n' + row + "\n")
        cases[f"{i}.jsonl"] = f"{i}.jsonl:2: "
    for name, match in cases.items():
        with pytest.raises(UserError, match=match):
            list(datastore.documents([tmp_path / name]))


def test_the_command_builds_what_the_model_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each document is tokenised whole and ends by the end of sequence; a phrase is found as often as it stands."""
    rows = write_jsonl(
        tmp_path / "b.jsonl", *({"text": f"The cat sat on the mat {i}."} for i in range(300))
    )
    output = tmp_path / "folder" / "made.bin"
    datastore.main(["--model", str(MODEL), "--text", str(rows), "--output", str(output)])
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    made = Datastore(output, vocab_size=2048)
    for text, times in [(" sat on the mat", 300), (" mat 29", 11), (".</s>The cat", 299)]:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        _, first, last = made.longest(ids, min_n=len(ids), max_n=len(ids))
        assert last - first == times, text
    assert f"{len(made)} tokens" in capsys.readouterr().out
    (tmp_path / "empty.jsonl").write_text("")
    for model, text in [
        (str(tmp_path), "empty.jsonl"),
        (str(MODEL), "absent.txt"),
        (str(MODEL), "empty.jsonl"),
    ]:
        with pytest.raises(SystemExit) as left:
            datastore.main(
                ["--model", model, "--text", str(tmp_path / text), "--output", str(tmp_path / "x")]
            )
        error = capsys.readouterr().err
        assert left.value.code == 2
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()
