"""Runs of known content on disk, with names that try to break out of the page."""

from pathlib import Path
from unittest.mock import patch

import pytest

from evaluation import figures
from evaluation.page import write_page
from evaluation.tables.experiment import Experiment
from tests.evaluation import made_runs

TREE = [[0], [1], [0, 0]]
COMMAND = [
    "/usr/bin/python",
    "/home/u/recycling/evaluation/run.py",
    "-m",
    "bench=sample",
    "start=cold,hot",
]


def write_run(folder: Path, label: str, rows: list[dict], **more) -> Path:
    """A run's folder below an experiment's, as `made` takes it."""
    about = {"device": "a <b>device</b>", "command": COMMAND, "started": "2026-02-03T04:05:06+0000"}
    model = {"path": "nowhere/toy"} | more.pop("model", {})
    bench = {"name": "sample", "questions": 4} | more.pop("bench", {})
    return made_runs.write(
        made_runs.made(label, rows, model=model, bench=bench, **about, **more), folder
    )


def answer(question_id, category: str, *turns: dict) -> dict:
    """A row. A turn: `ids`; `steps` as (accepted, nodes, path), by default plain decoding's; `seconds`."""
    steps = [turn.get("steps") or [(1, 1, [])] * len(turn["ids"]) for turn in turns]
    counted = [
        ([n for n, _, _ in own], turn.get("seconds", 1.0))
        for own, turn in zip(steps, turns, strict=True)
    ]
    row = made_runs.answer(question_id, category, counted)
    row["choices"][0] |= {
        "output_ids": [turn["ids"] for turn in turns],
        "step_nodes": [[nodes for _, nodes, _ in own] for own in steps],
        "step_paths": [[path for _, _, path in own] for own in steps],
    }
    return row


def drafted(ids: list[int]) -> list[tuple]:
    """Steps of three tokens where there are as many, by the path 0·0 of TREE."""
    steps = [(1, 1, [])] + [(3, 4, [0, 0])] * ((len(ids) - 1) // 3)
    return steps + [(1, 4, [])] * ((len(ids) - 1) % 3)


@pytest.fixture(scope="session")
def report_folder(tmp_path_factory) -> Path:
    """Vanilla and recycling on four questions; recycling is not finished."""
    folder = tmp_path_factory.mktemp("results") / "study <i>"
    categories = ["writing", "qa", "qa", "<img src=x onerror='window.broken = 3'>"]
    recycling = {
        "method": {"tree": "file"},
        "draft_tree": TREE,
        "questions": 6,
        "bench": {"questions": 4},
    }
    for label, seconds, more in (("vanilla", 1.0, {}), ("recycling (hot)", 0.5, recycling)):
        rows = []
        for i, category in enumerate(categories):
            ids = list(range(7 + i))
            turn = {"ids": ids, "seconds": seconds * (i + 1)}
            rows.append(answer(i, category, turn | ({"steps": drafted(ids)} if more else {})))
        write_run(folder, label, rows, **more)
    report(folder)
    return folder


def report(folder: Path) -> Path:
    """The page of a folder with two figures."""
    experiment = Experiment.read(folder)
    few = (figures.mat, figures.speedup_over_vanilla)
    with patch.multiple(figures, FIGURES=few, KINDS=("svg",)):
        figures.draw_all(experiment, folder / "figures")
        return write_page(experiment, folder)
