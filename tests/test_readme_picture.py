"""The README's picture: a recorded answer, drawn from the data that it keeps. With SmolLM2 it was decoded by

decoder = Decoder.from_pretrained(folder_rounded_to_float16, dtype="float32", nodes=NODES)
chat = [{"role": "user", "content": first_turn_of_the_question}]
FILE.write_text(Picture.watch(decoder, chat, max_new_tokens=128).svg(*NOTES))
"""

import html
import json
import re

from model.files import ROOT
from model.picture import Picture
from tools.document_results import shipped

FILE = ROOT / "docs/figures/answer.svg"
QUESTION = 242
NODES = 24
NOTES = (
    "SmolLM2-135M-Instruct (a 4-bit file, rounded to float16), greedy; dynamic, 24 nodes, fresh state.",
    "Spec-Bench, question 242, 128 tokens. The text is plain decoding's, token by token.",
)


def kept(svg: str) -> Picture:
    (data,) = re.findall("<metadata>(.*)</metadata>", svg)
    values = json.loads(html.unescape(data))
    return Picture(
        **values
        | {"nodes": [(tuple(path), text, accepted) for path, text, accepted in values["nodes"]]}
    )


def test_the_shipped_drawing_is_of_the_recorded_answer():
    svg = FILE.read_text()
    picture = kept(svg)
    assert picture.svg(*NOTES) == svg
    (plain,) = (pool for pool in shipped("headline").pools if pool.label == "vanilla")
    assert [picture.ids] == [
        row["choices"][0]["output_ids"][0]
        for row in plain.first_answers.values()
        if row["question_id"] == QUESTION
    ]
    assert sum(picture.lengths) == sum(length for _, length in picture.pieces) == len(picture.ids)
    assert 2 <= sum(ok for _, _, ok in picture.nodes) <= len(picture.nodes) == 1 + NODES
