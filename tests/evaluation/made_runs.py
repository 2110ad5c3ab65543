"""Runs made by hand, for tables and figures whose values are known."""

import json
from pathlib import Path

from evaluation.records.rows import SCHEMA, Question
from evaluation.records.runs import GENERATE, Run, row_key
from evaluation.tables.experiment import Experiment
from evaluation.tables.rendering import main_view, to_markdown, to_text


def answer(question_id, category, turns, **more):
    """`turns`: one (accepted lengths, seconds) a turn; `more`: further keys of the only choice."""
    choice = {
        "index": 0,
        "turns": ["text"] * len(turns),
        "decoding_steps": [len(lengths) for lengths, _ in turns],
        "new_tokens": [sum(lengths) for lengths, _ in turns],
        "wall_time": [seconds for _, seconds in turns],
        "accept_lengths": [n for lengths, _ in turns for n in lengths],
    }
    return {
        "question_id": question_id,
        "schema": SCHEMA,
        "category": category,
        "choices": [choice | more],
    }


def asked(question_id, category, turns, prompt="why?", **more):
    """An answer with the hash of its question, as runs write it."""
    question = Question(question_id, category, (prompt,))
    return answer(question_id, category, turns, **more) | {"question_sha256": question.sha256}


def made(
    label,
    answers,
    *,
    repeat=0,
    method=None,
    questions=None,
    folder="run",
    model=None,
    bench=None,
    **more,
):
    """A run with these answers; `method`: further settings of it."""
    name, _, start = label.partition(" (")
    settings = (
        {"name": name, "drafter": None}
        | ({"start": start.rstrip(")")} if start else {})
        | (method or {})
    )
    metadata = {
        "label": label,
        "device": "a machine",
        "questions": len(answers) if questions is None else questions,
        "versions": {"torch": "2", "transformers": "5"},
        "settings": {
            "schema": SCHEMA,
            "model": {"name": "toy", "dtype": "float32"} | (model or {}),
            "bench": {"name": "file", "questions": questions or len(answers), "order": "file"}
            | (bench or {}),
            "method": settings,
            "execution": "eager",
            "max_new_tokens": 16,
            "num_choices": 1,
            "seed": 0,
            "phases": False,
            "batch": 1,
            "repeat": repeat,
        },
    }
    if name == "hf":
        metadata["execution_used"] = GENERATE
    if (tree := more.pop("draft_tree", None)) is not None:
        metadata["draft_tree"] = " ".join(",".join(map(str, path)) for path in tree)
    return Run(Path(folder), metadata | more, list(answers))


def write(run, folder):
    """The run as it would lie on disk below an experiment's folder."""
    what = abs(hash((run.configuration, run.selection))) % 10**8
    path = folder / "runs" / f"{run.label.replace(' ', '_')}-{what}-{run.repeat}"
    path.mkdir(parents=True)
    (path / "metadata.json").write_text(json.dumps(run.metadata))
    (path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run.answers))
    return path


def shard(label, answers, **more):
    """A run that asked just these questions, each with its hash, of the bench file "f"."""
    file = {"sha256": "f"} | more.pop("bench", {})
    return made(
        label, answers, bench=file, question_hashes=[row_key(row) for row in answers], **more
    )


def in_terminal(runs):
    """The main table as the terminal shows it."""
    return to_text(main_view(Experiment(runs), category="overall"))


def on_paper(runs):
    """The main table as main.md holds it."""
    return to_markdown(main_view(Experiment(runs)))


def overall(runs):
    """The rows of all categories together, by method."""
    table = Experiment(runs).table
    return table[table["category"] == "overall"].set_index("method")
