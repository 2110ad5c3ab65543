"""The README's picture: a recorded answer, drawn from the data that it keeps."""

import html
import json
import re
import sys

import pytest

from model.files import ROOT
from model.picture import Picture
from tools import answer_picture


def kept(svg: str) -> Picture:
    (data,) = re.findall("<metadata>(.*)</metadata>", svg)
    values = json.loads(html.unescape(data))
    return Picture(**values | {"nodes": [(tuple(path), text, accepted) for path, text, accepted in values["nodes"]]})


def test_the_shipped_drawing_is_of_the_recorded_answer():
    svg = answer_picture.FILE.read_text()
    picture = kept(svg)
    assert answer_picture.drawn(picture) == svg
    assert picture.ids == answer_picture.recorded()
    assert sum(picture.lengths) == sum(length for _, length in picture.pieces) == len(picture.ids)
    assert 2 <= sum(ok for _, _, ok in picture.nodes) <= len(picture.nodes) == 1 + answer_picture.NODES


def test_another_answer_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(answer_picture, "recorded", lambda: [1, 2, 3])
    monkeypatch.setattr(answer_picture, "QUESTION", 401)
    monkeypatch.setattr(answer_picture, "FILE", tmp_path / "answer.svg")
    (tmp_path / "question.jsonl").write_text('{"question_id": 401, "category": "math", "turns": ["What is 3 * 9?"]}\n')
    monkeypatch.setattr(sys, "argv", ["answer_picture", str(ROOT / "data/embedded"), str(tmp_path / "question.jsonl")])
    with pytest.raises(SystemExit) as ended:
        answer_picture.main()
    assert ended.value.code == 2 and not answer_picture.FILE.exists()
    assert capsys.readouterr().err.count("error: question 401: the answer is not that of results/reference") == 1
