"""Runs of known content on disk, with text that tries to break out of the page."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
from transformers import AutoTokenizer

from evaluation import figures
from evaluation.page import write_page
from evaluation.records.rows import SCHEMA
from evaluation.records.runs import read_runs
from evaluation.statistics.tables import main_table

HOSTILE = "the </script><script>window.broken = 1</script><!-- <img src=x onerror='window.broken = 2'> \u2028 is one."
VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0"}
TREE = "0 1 0,0"  # as metadata.json has it


def write_run(folder: Path, label: str, rows: list[dict], *, questions: int | None = None, **more) -> None:
    """A run's folder: metadata and answers. `more`: settings by group, `model`, `bench`, `method`, or of metadata."""
    name = label.split(" ")[0]
    settings = {
        "schema": SCHEMA,
        "model": {"name": "toy", "path": "nowhere/toy", "dtype": "float32"} | more.pop("model", {}),
        "bench": {"name": "sample", "sha256": "0" * 64} | more.pop("bench", {}),
        "method": {"name": name} | more.pop("method", {}),
        "execution": "eager",
        "max_new_tokens": 64,
        "seed": 0,
    } | more.pop("settings", {})
    command = ["/usr/bin/python", "/home/u/recycling/evaluation/run.py", "-m", "bench=sample", "start=cold,hot"]
    metadata = {
        "settings": settings,
        "label": label,
        "device": "a <b>device</b>",
        "versions": VERSIONS,
        "questions": len(rows) if questions is None else questions,
        "command": command,
        "started": "2026-02-03T04:05:06+0000",
    }
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps(metadata | more))
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def answer(question_id, category: str, turns: list[dict]) -> dict:
    """A row. A turn: `ids`, `steps` as (accepted, nodes, path), `seconds`, and `text` if it is not to be 'text'."""
    choice = {
        "index": 0,
        "turns": [turn.get("text", "text") for turn in turns],
        "decoding_steps": [len(turn["steps"]) for turn in turns],
        "new_tokens": [len(turn["ids"]) for turn in turns],
        "wall_time": [turn.get("seconds", 1.0) for turn in turns],
        "accept_lengths": [accepted for turn in turns for accepted, _, _ in turn["steps"]],
        "output_ids": [turn["ids"] for turn in turns],
        "step_nodes": [[nodes for _, nodes, _ in turn["steps"]] for turn in turns],
        "step_paths": [[path for _, _, path in turn["steps"]] for turn in turns],
    }
    return {"question_id": question_id, "schema": SCHEMA, "category": category, "choices": [choice]}


def plain(ids: list[int]) -> list[tuple]:
    """The steps of plain decoding."""
    return [(1, 1, []) for _ in ids]


def drafted(ids: list[int]) -> list[tuple]:
    """Steps of three tokens where there are as many, by the path 0·0 of TREE."""
    steps = [(1, 1, [])] + [(3, 4, [0, 0])] * ((len(ids) - 1) // 3)
    return steps + [(1, 4, [])] * ((len(ids) - 1) % 3)


@pytest.fixture(scope="session")
def report_folder(checkpoint, tmp_path_factory) -> Path:
    """Vanilla and recycling on four questions with the toy checkpoint's tokenizer; recycling is not finished."""
    folder = tmp_path_factory.mktemp("results") / "study <i>"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = [HOSTILE, "the question is polite.", "a curious user asks.", "the answer is one, 漢字 🙂."]
    for label, seconds, steps in (("vanilla", 1.0, plain), ("recycling (hot)", 0.5, drafted)):
        rows = []
        for i, text in enumerate(texts):
            ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            turn = {"ids": ids, "steps": steps(ids), "seconds": seconds * (i + 1), "text": text}
            rows.append(answer(i, ["writing", "qa", "qa", "<img src=x onerror='window.broken = 3'>"][i], [turn]))
        tree = {"method": {"start": "hot", "tree": "file"}, "draft_tree": TREE} if label != "vanilla" else {}
        write_run(
            folder / "runs" / label, label, rows, model={"path": str(checkpoint)}, questions=4 + len(tree), **tree
        )
    report(folder)
    return folder


def report(folder: Path) -> Path:
    """The page of a folder with two figures."""
    runs = read_runs(folder)
    table = main_table(runs)
    with patch.multiple(figures, FIGURES=(figures.mat, figures.speedup_over_vanilla), ACROSS=(), KINDS=("svg",)):
        figures.draw_all(runs, table, folder / "figures")
        return write_page(runs, table, folder)
