"""Other people's records: Spec-Bench answer files of any method, as runs that the tables take."""

from __future__ import annotations

import glob
import sys
from pathlib import Path
from typing import Any

from model.errors import UserError

from .answer_file import SharedNumbers, read_answers
from .rows import check_records
from .runs import Run

BASELINE_NAMES = ("vanilla", "baseline", "autoregressive", "hf")  # what such files call plain decoding


def read_foreign(pattern: str) -> list[Run]:
    """The files that match, one run each, named after the file. Plain decoding, so named, is the baseline.

    Answers are as they were recorded: which model, device and settings they are of is not known and not guessed. They
    are paired by their questions' hashes where all files have them, else by the questions' ids.

    Raises:
        UserError: no file matches, or one holds no answer.
    """
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file())  # noqa: PTH207
    if not paths:
        raise UserError(f"--answers {pattern}: no such file")
    shared = SharedNumbers()
    names = unique_names(paths)
    runs = []
    for path in paths:
        rows, damage = read_answers(path, shared)
        if str(damage):
            print(f"note: {path}: {damage}", file=sys.stderr)
        if not rows:
            raise UserError(f"{path}: holds no answer in Spec-Bench's format")
        check_records(rows.values(), path)
        runs.append(Run(path.parent, _metadata(names[path], len(rows)), list(rows.values())))
    if not all(row.get("question_sha256") for run in runs for row in run.answers):
        for row in (row for run in runs for row in run.answers):
            row.pop("question_sha256", None)  # only some know their questions: ids stand in for all
    most = max(len(run.answers) for run in runs)
    for run in runs:
        run.metadata["questions"] = run.metadata["settings"]["bench"]["questions"] = most
    return sorted(runs, key=lambda run: (run.label not in ("hf", "vanilla"), run.label))


def unique_names(paths: list[Path]) -> dict[Path, str]:
    """The file's name without its ending; with its folders where two files have the same; plain decoding: vanilla."""
    names = {path: path.stem for path in paths}
    for path in paths:
        if list(names.values()).count(path.stem) > 1:
            names[path] = str(path.with_suffix(""))
    plain = [p for p in paths if any(word in p.stem.lower().replace("_", "-").split("-") for word in BASELINE_NAMES)]
    if len(plain) == 1:  # several: which one is meant is not guessed
        names[plain[0]] = "hf" if "hf" in plain[0].stem.lower().split("-") else "vanilla"
    return names


def _metadata(name: str, questions: int) -> dict[str, Any]:
    unknown = "not recorded"
    return {
        "label": name,
        "device": unknown,
        "questions": questions,
        "versions": {"torch": unknown, "transformers": unknown},
        "settings": {
            "model": {"name": "answers", "dtype": unknown},
            "bench": {"name": "files", "questions": questions},
            "method": {"name": name},
            "max_new_tokens": unknown,
            "execution": unknown,
        },
    }
