"""The picture of an answer: it says what was decoded, and what a model says is no markup."""

import xml.etree.ElementTree as ElementTree

import pytest

from model.decoder import Decoder
from model.files import ROOT
from model.picture import Picture

SVG = "{http://www.w3.org/2000/svg}"
QUESTION = "USER: Noah buys 7 tickets for 9 dollars each and pays with 100 dollars. ASSISTANT:"


@pytest.fixture(scope="module")
def decoder():
    return Decoder.from_pretrained(str(ROOT / "data/embedded"), nodes=12)


def texts_of(picture, *notes):
    """The elements of a drawing, and those that hold text."""
    root = ElementTree.fromstring(picture.svg(*notes))
    return root, root.findall(f"{SVG}text")


def test_it_holds_what_a_decoder_answers_and_the_draft_of_its_best_step(decoder):
    answer = Decoder(decoder.target.model, decoder.tokenizer, nodes=12).generate(
        QUESTION, max_new_tokens=64
    )
    picture = Picture.watch(decoder, QUESTION, max_new_tokens=64)
    assert picture.ids == answer.ids and picture.lengths == answer.accept_lengths
    assert "".join(text for text, _ in picture.pieces) == answer.text
    accepted = [path for path, _, ok in picture.nodes if ok]
    assert 2 < len(accepted) == picture.lengths[picture.step - 1] == max(picture.lengths)
    assert [path[:-1] for path in accepted[1:]] == accepted[:-1], "one path from the root"

    _, texts = texts_of(picture, "a note")
    boxes = [text.text for text in texts if text.get("class") == "" and float(text.get("y")) > 60]
    assert "".join("".join(boxes).split()) == "".join(answer.text.split())
    assert texts[-1].text == "a note"


def test_what_a_model_says_is_no_markup():
    hostile = "</text><script>alert(1)</script>\"'&\x1b[31m\u202e\ufffe"
    picture = Picture([(hostile, 2)], [1], [1], 1, [((), hostile, True), ((0,), "<b>", False)])
    root, texts = texts_of(picture, "<i>")
    kinds = ("svg", "metadata", "style", "rect", "text", "path")
    assert {element.tag for element in root.iter()} == {SVG + kind for kind in kinds}
    assert texts[-1].text == "<i>"
