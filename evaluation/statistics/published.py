"""Published figures (data/reference/, with their sources) next to measured ones.

A published figure is shown only next to the same measurement: the whole bench, the paper's limit,
batch 1, no phases, weights that are not quantised, default settings, the tree 2.2.2.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import pandas as pd
import yaml

from model.files import ROOT

from ..records.rows import FILE_ORDER, SUBTASKS
from .metrics import OVERALL
from .pools import SAMPLED

REFERENCE = ROOT / "data/reference"
WHOLE = {"spec_bench": 480, "mbpp": 399}  # questions of the benches with published figures
CODE = "code"  # MBPP's subtask
# the benches of Table 1 and the beginnings of their columns
PARTS = {"spec_bench": "specbench", "mbpp": "mbpp"}

# the bench, category and column of the main table that a column of Table 1 is from
PLACES = {"mt": ("spec_bench", "mt_bench", "speedup_hf")}
for _subtask in SUBTASKS:
    if _subtask not in ("mt_bench", CODE):
        PLACES[_subtask] = ("spec_bench", _subtask, "speedup_hf")
for _bench, _part in PARTS.items():
    PLACES[f"{_part}_mat"] = (_bench, OVERALL, "mat")
    PLACES[f"{_part}_tokens_per_second"] = (_bench, OVERALL, "tokens_per_second")
    PLACES[f"{_part}_speedup"] = (_bench, OVERALL, "speedup_hf")


class Source(NamedTuple):
    """A file of data/reference, and which of its rows are shown."""

    name: str  # in tables
    file: str
    device: str | None  # of its rows; None: of all
    names: dict[str, str]  # our names by what it calls our methods


# The first source that has a figure counts.
SOURCES = (
    Source("paper, A100-80GB", "paper_table1", None, {"ar": "hf", "recycling": "recycling (hot)"}),
    Source("smpanaro/token-recycling, A100-40GB", "unofficial_a100_40gb", "A100-40GB", {}),
    Source(
        "Spec-Bench leaderboard, A100", "specbench_leaderboard", "A100", {"samd+eagle2": "samd"}
    ),
    Source(
        "SAM-Decoding, A6000",
        "sam_decoding_a6000",
        "A6000",
        {"sam": "suffix", "sam+recycling": "suffix_recycling (hot)"},
    ),
)
# Columns of the main table that name conditions, with their values in published figures
CONDITIONS: dict[str, Any] = {
    **dict.fromkeys(SAMPLED, 0.0),
    "max_new_tokens": 1024,
    "batch": 1,
    "num_choices": 1,
    "timed": True,
    "phases": False,
    "quantize": "",
    "order": FILE_ORDER,
}
# settings of published figures that are no defaults
OTHERWISE: dict[str, dict[str, Any]] = {
    "recycling": {"tree": "2.2.2"},
    "suffix_recycling": {"tree": "2.2.2"},
    "eagle3": {"depth": 6},
}
ANY = ("name", "drafter", "dtype")  # a method's settings that do not change its figures


def read_published(name: str) -> list[dict[str, Any]]:
    of_spec_bench = {"mat": "specbench_mat", "speedup": "specbench_speedup"}
    table = pd.read_csv(REFERENCE / f"{name}.csv").rename(columns=of_spec_bench)
    return table.to_dict("records")  # type: ignore[return-value]


# the columns of a published figure, by those of the main table
PUBLISHED = {"mat": "published_mat", "speedup_hf": "published_speedup_hf"}
KEY = ["model", "method", "bench", "category"]


@lru_cache(maxsize=1)
def published_figures() -> pd.DataFrame:
    """Return PUBLISHED and `published_source` by KEY."""
    parts = []
    for source in SOURCES:
        rows = pd.DataFrame(read_published(source.file))
        if source.device is not None:
            rows = rows[rows["device"] == source.device]
        rows["method"] = rows["method"].replace(source.names)
        for name, (bench, category, measure) in PLACES.items():
            if name in rows and measure in PUBLISHED:
                about = {"bench": bench, "category": category, "measure": PUBLISHED[measure]}
                part = rows[["model", "method"]].assign(**about, value=rows[name])
                parts.append(part.assign(published_source=source.name))

    index = [*KEY, "published_source"]
    cells = pd.concat(parts).set_index([*index, "measure"])["value"]
    figures = cells.unstack("measure", sort=False).dropna(subset="published_speedup_hf")
    figures = figures.reset_index("published_source")
    return figures[~figures.index.duplicated()]  # the first source counts


def with_published(table: pd.DataFrame) -> pd.DataFrame:
    """Add the columns of `published_figures` to the main table, unless no row has any.

    The speedups are over transformers' own decoding on the source's device.
    """
    key = table[KEY].replace({"category": {CODE: OVERALL}})  # all of MBPP
    added = key.join(published_figures(), on=KEY).drop(columns=KEY)
    added = added[[*PUBLISHED.values(), "published_source"]]
    added[~table.apply(as_published, axis="columns")] = None
    return table.join(added) if added.notna().any(axis=None) else table


def as_published(row: dict[Any, Any]) -> bool:
    """True if a row of the main table measures the same as published figures do."""
    is_whole = row["bench_questions"] == WHOLE.get(row["bench"])
    return is_whole and row["complete"] is True and not departures(row)


def departures(row: dict[Any, Any]) -> dict[str, Any]:
    """Return conditions and settings of a row that published figures do not have."""
    method = str(row["method"]).partition(" (")[0]
    usual = CONDITIONS | {"tree": None} | default_settings(method)
    usual |= OTHERWISE.get(method, {})

    different = {}

    for key, value in usual.items():
        cell = row.get(key)
        if cell != cell:
            cell = None
        if cell is None and key in CONDITIONS:
            continue  # not known
        if (cell or None) != (value or None):  # a setting that is off may be in no record
            different[key] = cell

    return different


@lru_cache(maxsize=64)
def default_settings(method: str) -> dict[str, Any]:
    """Return a method's settings in configs/method, without those in ANY and paths of weights."""
    file = ROOT / f"configs/method/{method}.yaml"
    if not file.is_file():
        return {}

    settings = {}
    for key, value in yaml.safe_load(file.read_text(encoding="utf-8")).items():
        is_weights = key.endswith("path") and value is not None
        if key not in ANY and not is_weights:
            settings[key] = str(value) if isinstance(value, list | dict) else value

    return settings
