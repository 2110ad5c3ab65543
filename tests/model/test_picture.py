"""The picture of an answer: it says what was decoded, and what a model says is no markup."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from model.decoder import Decoder
from model.files import ROOT
from model.picture import COLUMNS, WIDTH, Picture

SVG = "{http://www.w3.org/2000/svg}"
QUESTION = "USER: Noah buys 7 tickets for 9 dollars each and pays with 100 dollars. ASSISTANT:"


@pytest.fixture(scope="module")
def decoder():
    return Decoder.from_pretrained(str(ROOT / "data/embedded"), nodes=12)


def drawn(picture, *notes):
    """The elements of a drawing that hold text, and those that hold boxes."""
    root = ElementTree.fromstring(picture.svg(*notes))
    return root, root.findall(f"{SVG}text"), root.findall(f"{SVG}rect")


@pytest.mark.parametrize("method", ["dynamic", "recycling"])
def test_it_holds_what_a_decoder_answers_and_the_draft_of_its_best_step(decoder, method):
    settings = dict(nodes=12) if method == "dynamic" else dict(tree="best:12")
    ours, other = (
        Decoder(decoder.target.model, decoder.tokenizer, method=method, **settings)
        for _ in range(2)
    )
    answer, picture = (
        ours.generate(QUESTION, max_new_tokens=64),
        Picture.watch(other, QUESTION, max_new_tokens=64),
    )
    assert picture.ids == answer.ids and picture.lengths == answer.accept_lengths
    assert "".join(text for text, _ in picture.pieces) == answer.text
    accepted = [path for path, _, ok in picture.nodes if ok]
    assert max(picture.lengths) > 2 and 2 <= len(accepted) <= len(picture.nodes) == 13
    assert len(accepted) == picture.lengths[picture.step - 1] == max(picture.lengths)
    assert [path[:-1] for path in accepted[1:]] == accepted[:-1], "one path from the root"
    before = sum(picture.lengths[: picture.step - 1])
    said = "".join(text for _, text, ok in picture.nodes[1:] if ok).replace(" ", "")
    assert said and said in other.text_of(picture.ids[before : before + len(accepted)]).replace(
        " ", ""
    )
    assert "observe" not in vars(other.method.session()), "the next answer is not watched"


def test_the_drawing_has_the_text_and_every_node_and_ends_on_its_card(decoder):
    picture = Picture.watch(decoder, QUESTION, max_new_tokens=64)
    root, texts, boxes = drawn(picture, "a note")
    width, height = (float(number) for number in root.get("viewBox").split()[2:])
    answer_text = "".join(text for text, _ in picture.pieces)
    runs = [text.text for text in texts if text.get("class") == "" and float(text.get("y")) > 60]
    assert "".join("".join(runs).split()) == "".join(answer_text.split())
    shades = [
        box.get("class") for box in boxes if box.get("class") != "card" and float(box.get("y")) > 45
    ]
    assert len(shades) == len(runs) and set(shades) <= {f"s{min(n, 5)}" for n in picture.lengths}
    names = [text for text in texts if "small" in text.get("class")]
    cut = (
        f", {len(names) - 1} drawn (… goes on)" if len(names) < len(picture.nodes) else "accepted;"
    )
    assert sum("12 tokens drafted, " in text.text and cut in text.text for text in texts) == 1
    assert len(names) == len(picture.nodes) or any(name.text.endswith("…") for name in names)
    assert sum("on" in name.get("class").split() for name in names) == sum(
        ok for _, _, ok in picture.nodes
    )
    assert len({(name.get("x"), name.get("y")) for name in names}) == len(names)
    for text in texts:
        assert (
            0 < float(text.get("x")) + float(text.get("textLength", 0)) <= width
            and float(text.get("y")) < height
        )
    assert texts[-1].text == "a note" and width >= round(WIDTH)


HOSTILE = "</text><script>alert(1)</script>\"'&\x1b[31m\u202e\ufffe"


def test_what_a_model_says_is_no_markup():
    picture = Picture([(HOSTILE, 2)], [1], [1], 1, [((), HOSTILE, True), ((0,), "<b>", False)])
    root, texts, _ = drawn(picture, "<i>")
    assert {element.tag for element in root.iter()} == {
        SVG + name for name in ("svg", "metadata", "style", "rect", "text", "path")
    }
    assert (
        not re.search("[\x00-\x09\x0b-\x1f\u202e\ufffe]", picture.svg("<i>"))
        and texts[-1].text == "<i>"
    )


def test_words_wrap_and_a_deep_rejected_draft_ends_in_dots():
    words = ["word " * 40, "x" * 2 * COLUMNS, "\n\n漢字", "e\u0301"]
    chain = [((0,) * depth, " token", depth < 3) for depth in range(30)]
    root, texts, _ = drawn(Picture([(text, 1) for text in words], [], [4], 100, chain))
    assert float(root.get("width")) == round(WIDTH)
    assert all(float(text.get("x")) + float(text.get("textLength", 0)) <= WIDTH for text in texts)
    # of 13 pixels, without serifs
    words_wide = [6.6 * len(text.text) for text in texts if "words" in text.get("class")]
    assert max(words_wide) <= WIDTH - 32, "README's last word was cut off"
    lines = {}
    for text in texts[7:]:
        if text.get("class") == "":
            lines.setdefault(float(text.get("y")), []).append(text.text)
    assert len(lines) == 7 and all(len("".join(line)) <= COLUMNS for line in lines.values())
    names = [text.text for text in texts if "small" in text.get("class")]
    assert any(name.endswith("…") for name in names) and len(names) < 30
    assert (
        sum(
            f"29 tokens drafted, 2 accepted, {len(names) - 1} drawn (… goes on);" in text.text
            for text in texts
        )
        == 1
    )
    wide, combined = (next(t for t in texts if t.text == text) for text in ("漢字", "e\u0301"))
    assert float(wide.get("textLength")) == 4 * float(combined.get("textLength"))
    root, *_ = drawn(Picture([("plain", 1)], [1], [1], 0, []))
    assert not root.findall(f"{SVG}path"), "no step drafted"
