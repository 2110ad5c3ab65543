"""python -m tools.answer_picture MODEL QUESTIONS: draw docs/figures/answer.svg, a recorded answer decoded once more.

MODEL is SmolLM2's folder, QUESTIONS Spec-Bench's question.jsonl. The drawing keeps its data.
"""

import argparse
import html
import json
from dataclasses import asdict
from pathlib import Path

from evaluation.errors import user_errors
from evaluation.records.questions import read_questions
from model.decoder import Decoder
from model.errors import UserError
from model.files import ROOT, write_text
from model.picture import Picture
from tools.document_results import Experiment

FILE = ROOT / "docs/figures/answer.svg"
EXPERIMENT, QUESTION, NODES = "dynamic_tree", 402, 24
NOTES = (
    "SmolLM2-135M-Instruct, float32, greedy; dynamic, 24 nodes, fresh state.",
    "Spec-Bench, question 402. The text is plain decoding's, token by token.",
)


def recorded() -> list[int]:
    """Return the answer's token ids by plain decoding, from the shipped records."""
    pool = Experiment(EXPERIMENT).find({"method": "vanilla"})
    assert pool is not None
    row = next(row for row in pool.first_answers if row["question_id"] == QUESTION)
    return list(row["choices"][0]["output_ids"][0])


def drawn(picture: Picture) -> str:
    """Draw it, with its data."""
    data = html.escape(json.dumps(asdict(picture)), quote=False)
    return picture.svg(*NOTES).replace("<style>", f"<metadata>{data}</metadata>\n<style>", 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.answer_picture", description="Draw the README's answer.")
    parser.add_argument("model")
    parser.add_argument("questions", type=Path)
    given, expected = parser.parse_args(), recorded()
    with user_errors():
        turn = next(q.turns[0] for q in read_questions(given.questions) if q.question_id == QUESTION)
        decoder = Decoder.from_pretrained(given.model, dtype="float32", nodes=NODES)
        picture = Picture.watch(decoder, [{"role": "user", "content": turn}], max_new_tokens=len(expected))
        if picture.ids != expected:
            raise UserError(f"question {QUESTION}: the answer is not that of results/reference/{EXPERIMENT}")
        write_text(FILE, drawn(picture))


if __name__ == "__main__":
    main()
