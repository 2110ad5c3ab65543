"""Published figures (data/reference/, with their sources): next to measured ones, and as Table 1.

A published figure is shown only next to the same measurement: the whole bench, the paper's limit,
batch 1, no phases, weights that are not quantised, a method with its default settings, Token
Recycling with the tree 2.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pandas as pd
import yaml

from model.files import ROOT

from ..records.questions import FILE_ORDER, SUBTASKS
from .metrics import OVERALL
from .pools import SAMPLED
from .tables import TABLE1, unavailable

REFERENCE = ROOT / "data/reference"
PARTS = {"spec_bench": "specbench", "mbpp": "mbpp"}  # benches and the beginnings of their columns
CODE = "code"  # MBPP's subtask
PAPER_SUBTASKS = {"mt": "mt_bench"} | {
    name: name for name in SUBTASKS if name not in ("mt_bench", CODE)
}
PAPER_NAMES = {"hf": "ar"}  # what the paper calls a method of ours


def read_published(name: str) -> list[dict[str, Any]]:
    """Return the rows of one file of data/reference."""
    rows: list[dict[str, Any]] = pd.read_csv(REFERENCE / f"{name}.csv").to_dict("records")  # type: ignore[assignment]
    return rows


# File of data/reference, device of its rows, our name for the source, and the source's names for
# our methods.
SAM_NAMES = {"suffix": "sam", "suffix_recycling (hot)": "sam+recycling"}
SOURCES: tuple[tuple[str, str | None, str, dict[str, str]], ...] = (
    ("paper_table1", None, "paper, A100-80GB", PAPER_NAMES | {"recycling (hot)": "recycling"}),
    ("unofficial_a100_40gb", "A100-40GB", "smpanaro/token-recycling, A100-40GB", {}),
    ("specbench_leaderboard", "A100", "Spec-Bench leaderboard, A100", {"samd": "samd+eagle2"}),
    ("sam_decoding_a6000", "A6000", "SAM-Decoding, A6000", SAM_NAMES),
)
# number of questions of the benches with published figures
WHOLE = {"spec_bench": 480, "mbpp": 399}
PUBLISHED_EXECUTION = "eager"  # execution of the published methods and of their baselines
LIMIT = 1024  # new tokens a turn
# Columns of the main table that name conditions, with their values in published figures
CONDITIONS: dict[str, Any] = {
    **dict.fromkeys(SAMPLED, 0.0),
    "batch": 1,
    "num_choices": 1,
    "timed": True,
    "phases": False,
    "quantize": "",
    "order": FILE_ORDER,
}
TREES = {"recycling": "2.2.2", "suffix_recycling": "2.2.2"}
# settings of published figures that are no defaults
OTHERWISE: dict[str, dict[str, Any]] = {"eagle3": {"depth": 6}}
ANY = ("name", "drafter", "dtype")  # a method's settings that do not change its figures
PAPER_COLUMNS = {subtask: column for column, subtask in PAPER_SUBTASKS.items()}


def with_published(table: pd.DataFrame) -> pd.DataFrame:
    """Add `published_mat`, `published_speedup_hf` and `published_source` to the main table.

    Rows of a part of a bench, of another variant of a method or of unfinished runs have none. The
    speedups are over transformers' own decoding on the source's device. A table without published
    figures is returned unchanged.
    """
    sources = []
    for name, device, words, names in SOURCES:
        rows = [row for row in read_published(name) if device in (None, row.get("device"))]
        sources.append(({(row["model"], row["method"]): row for row in rows}, words, names))

    figures = [_published(row, sources) for row in table.to_dict("records")]
    if all(source is None for _, _, source in figures):
        return table

    columns = ["published_mat", "published_speedup_hf", "published_source"]
    added = pd.DataFrame(figures, index=table.index, columns=columns)
    return pd.concat([table, added.astype(dict.fromkeys(columns[:2], float))], axis=1)


def as_published(row: dict[Any, Any]) -> bool:
    """Return whether a row of the main table measures the same as published figures do."""
    if row.get("bench_questions") != WHOLE.get(row["bench"]) or row.get("complete") is not True:
        return False
    return row.get("max_new_tokens") == LIMIT and not departures(row)


def departures(row: dict[Any, Any]) -> dict[str, Any]:
    """Return conditions and settings of a row that published figures do not have; None: unknown."""
    method = str(row["method"]).partition(" (")[0]
    usual = {key: value for key, value in CONDITIONS.items() if _cell(row, key) is not None}
    usual |= {"tree": TREES.get(method)} | default_settings(method) | OTHERWISE.get(method, {})

    different = {}
    for key, value in usual.items():
        cell = _cell(row, key)
        if (cell or None) != (value or None):  # a setting that is off may be in no record
            different[key] = cell
    return different


def _cell(row: dict[Any, Any], column: str) -> Any:
    """Return a cell; None where it is empty."""
    value = row.get(column)
    return None if value != value else value


@lru_cache(maxsize=64)
def default_settings(method: str) -> dict[str, Any]:
    """Return a method's settings in configs/method, without those in ANY and paths of weights.

    {} if the method is unknown.
    """
    file = ROOT / f"configs/method/{method}.yaml"
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError:
        return {}

    kept = {}
    for key, value in settings.items():
        is_weights = key.endswith("path") and value is not None
        if key not in ANY and not is_weights:
            kept[key] = str(value) if isinstance(value, list | dict) else value
    return kept


def _published(
    row: dict[Any, Any], sources: list[Any]
) -> tuple[float | None, float | None, str | None]:
    """Return the published (MAT, speedup, source) for a row of the main table."""
    part = PARTS.get(row["bench"])
    if part is None or not as_published(row):
        return None, None, None
    category = row["category"]
    whole = category == OVERALL or (row["bench"], category) == ("mbpp", CODE)

    for rows, words, names in sources:
        figures = rows.get((row["model"], names.get(row["method"], row["method"])), {})
        if "mat" in figures:  # sources other than the paper have only Spec-Bench
            figures = figures | {
                "specbench_mat": figures["mat"],
                "specbench_speedup": figures["speedup"],
            }
        speedup = figures.get(f"{part}_speedup" if whole else PAPER_COLUMNS.get(category, ""))
        if pd.notna(speedup):
            return figures.get(f"{part}_mat") if whole else None, speedup, words
    return None, None, None


# The paper's rows, in its order and by its names; what it calls AR is transformers' own generate.
PAPER_METHODS = {
    "ar": "AR",
    "lookahead": "Lookahead",
    "pld": "PLD",
    "rest": "REST",
    "medusa": "Medusa",
    "recycling": "Token Recycling",
}
PUBLISHED = "published"
MEASURED = "measured"
COUNTS = [f"{part}_questions" for part in PARTS.values()]
ABOUT = ("model", "method", "name", "source", "measured", "complete", "execution")
PAPER_DTYPE = "float16"
# they identify a measured row
ALIKE = ["model", "dtype", "device", "max_new_tokens", "execution", "method", "variant"]


def table1(table: pd.DataFrame, left_out: Sequence[dict[str, str]] = ()) -> pd.DataFrame:
    """Build the paper's Table 1: published rows and those of the main table, in the paper's order.

    Speedups are over `hf` (the paper's AR), and empty without such a run. A method that was left
    out (by model and method, with `why`) has a row whose source says so. `measured` names a row's
    benches and questions, and settings that differ from the paper's. Without a run on the paper's
    benches, runs on another bench rehearse the layout.
    """
    absent = {(entry["model"], entry["method"]): entry["why"] for entry in left_out}
    for model, method in zip(table["model"], table["method"], strict=True):
        absent.pop((model, method.partition(" (")[0]), None)

    rows = _measured(table)
    for (model, method), why in absent.items():
        rows.append({"model": model, "method": method, "source": unavailable(why)})
    rows += [row | {"source": PUBLISHED} for row in read_published("paper_table1")]

    models = list(dict.fromkeys(row["model"] for row in rows))  # measured ones first
    order = list(PAPER_METHODS)
    for row in rows:
        method = PAPER_NAMES.get(row["method"], row["method"])
        row["method"] = method
        row["name"] = PAPER_METHODS.get(method, method) + row.get("name", "")
        at = order.index(method) if method in order else len(order)
        row["place"] = (models.index(row["model"]), at, row["source"] != PUBLISHED)
    rows.sort(key=lambda row: row["place"])

    blank = dict.fromkeys(("measured", "execution", "device"), "")
    columns = [*ABOUT, *(column.name for column in TABLE1), *COUNTS, "device"]
    filled = pd.DataFrame([blank | row for row in rows]).reindex(columns=columns)
    return filled.astype(dict.fromkeys(COUNTS, "Int64"))


def _measured(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Build a row for each combination of ALIKE.

    It is from the configurations with most questions of each bench. `name` is appended to the
    method's name: a start other than the paper's, and the variant.
    """
    table = table[table["batch"] == 1]  # as the paper's
    parts = PARTS
    if not table["bench"].isin(PARTS).any():
        parts = dict.fromkeys(table["bench"][:1], "specbench")

    rows: dict[Any, dict[str, Any]] = {}
    for bench, part in parts.items():
        of_bench = table[table["bench"] == bench]
        of_bench = of_bench.sort_values("bench_questions", ascending=False, kind="stable")
        for key, group in of_bench.groupby(ALIKE, sort=False):
            largest = group["questions_sha256"].iloc[0]
            figures = group[group["questions_sha256"] == largest].set_index("category")
            overall = figures.loc[OVERALL].to_dict()

            row = rows.setdefault(key, _about(overall))
            for name in ("mat", "tokens_per_second", "questions"):
                row[f"{part}_{name}"] = overall[name]
            row[f"{part}_speedup"] = overall["speedup_hf"]
            if part == "specbench":
                for name, subtask in PAPER_SUBTASKS.items():
                    row[name] = figures["speedup_hf"].get(subtask)
            row["complete"] = row["complete"] and overall["complete"]
            row["measured"].append(_conditions(overall))

    for (_, dtype, _, limit, *_), row in rows.items():
        if limit != LIMIT:
            row["measured"].append(f"max_new_tokens {limit}")
        if dtype != PAPER_DTYPE:
            row["measured"].append(dtype)
        row["measured"] = "; ".join(row["measured"])
    return list(rows.values())


def _about(overall: dict[Any, Any]) -> dict[str, Any]:
    """Begin a measured row of Table 1."""
    method, _, start = overall["method"].partition(" (")
    more = f" ({start}" if start not in ("", "hot)") else ""
    if overall["variant"]:
        more += f", {overall['variant']}"
    return {
        "model": overall["model"],
        "device": overall["device"],
        "execution": overall["execution"],
        "method": method,
        "name": more,
        "source": MEASURED,
        "complete": True,
        "measured": [],
    }


def _conditions(row: dict[Any, Any]) -> str:
    """Say what a row of the main table measured.

    This is the bench, how many of its questions, and whether all are answered.
    """
    bench = row["bench"]
    questions = row["bench_questions"]
    answered = row["questions"]
    of = "" if answered == questions else f" of {questions}"
    text = f"{bench}, {answered}{of} questions"
    if bench not in WHOLE:
        text = f"rehearsal on {text}"
    elif questions < WHOLE[bench]:
        text += f" of its {WHOLE[bench]}"

    for name, value in departures(row).items():
        if value is not None:
            text += f", {name} {value}".removesuffix(".0")
    return text if row["complete"] else f"{text}, incomplete"
