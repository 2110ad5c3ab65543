"""Every table says how steps were taken, of the method and of its baseline."""

import html
import re

import pandas as pd
import pytest

from evaluation.page import write_page
from evaluation.records.runs import GENERATE
from evaluation.statistics.experiment import Experiment
from evaluation.statistics.notes import execution_words, not_compared
from evaluation.statistics.pools import pools
from evaluation.statistics.rendering import page_view
from tests.evaluation.made_runs import answer, in_terminal, made, on_paper


def ran(label, execution="eager", **settings):
    run = made(label, [answer(1, "qa", [([2, 1], 1.0)]), answer(2, "rag", [([3], 0.5)])])
    run.metadata["settings"] |= {"execution": execution} | settings
    return run


def overall(runs):
    table = Experiment(runs).table
    return table[table["category"] == "overall"].set_index(["method", "variant"])


ALIKE = [ran("hf"), ran("vanilla"), ran("pld")]
MIXED = [
    *ALIKE,
    ran("vanilla", "compiled"),
    ran("pld", "compiled"),
    ran("recycling (hot)", "graph"),
]
ALONE = "no speedup over vanilla for recycling (hot): execution graph here, eager for vanilla"


def test_pairs_are_of_one_execution_and_without_phases():
    """A run with phases=true had 0.45 of an hf whose time holds no phases."""
    rows = overall(MIXED)
    assert rows["execution"].tolist() == [
        GENERATE,
        "eager",
        "eager",
        "compiled",
        "compiled",
        "graph",
    ]
    assert rows["execution_hf"].tolist() == [GENERATE] * 6
    of_baselines = rows["execution_vanilla"].tolist()
    assert of_baselines[1:5] == rows["execution"].tolist()[1:5] and pd.isna(of_baselines[5])
    assert rows["speedup_vanilla"].notna().tolist() == [True] * 5 + [False]
    inside = [
        *MIXED,
        ran("vanilla", "graph"),
        ran("pld", "custom_generate"),
        ran("pld", "custom_generate, graph"),
    ]
    named = overall(inside).loc["pld"].set_index("execution")["execution_vanilla"]
    assert [named["custom_generate"], named["custom_generate, graph"]] == ["eager", "graph"], (
        "as their steps ran"
    )
    assert (
        "in the same execution (custom_generate: that of its steps);"
        in execution_words(Experiment(inside).table)[0]
    )
    assert not_compared(pools(MIXED)) == [ALONE] and not_compared(pools(ALIKE)) == []
    assert execution_words(Experiment(ALIKE[:1]).table) == []
    rows = overall(
        [ran("hf"), *(ran(label, phases=True) for label in ("hf", "vanilla", "pld"))]
    ).droplevel(1)
    assert (
        rows.loc["pld", "speedup_vanilla"] == 1.0
        and rows.loc[["pld", "vanilla"], "speedup_hf"].isna().all()
    )


def test_an_hf_that_was_not_timed_is_no_baseline_of_timed_runs():
    """It came first among those of other executions, and there was no speedup."""
    untimed = made("hf", [answer(1, "qa", [([2, 1], 0.0)]), answer(2, "rag", [([3], 0.0)])])
    untimed.metadata["settings"] |= {"timed": False}
    rows = overall([untimed, ran("hf", timed=True), ran("recycling (hot)", "graph", timed=True)])
    assert rows.loc["recycling (hot)", "speedup_hf"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("runs", "line", "several"),
    [
        (
            ALIKE,
            "execution: eager; hf is transformers' own generate, so speedup_hf also includes",
            False,
        ),
        (
            MIXED,
            "execution: see its column; speedup_vanilla compares with vanilla in the same execution; hf is",
            True,
        ),
    ],
)
def test_one_execution_is_stated_once_and_several_are_a_column(tmp_path, runs, line, several):
    table = Experiment(runs).table
    for text in (in_terminal(runs), on_paper(runs)):
        assert f"\n{line}" in text and text.count("execution: ") == 1 and (ALONE in text) is several
        assert bool(re.search(r"pld +\|? *execution=compiled +\|? *compiled", text)) is several
        assert bool(re.search(r"execution [ |]", text)) is several, "no column"
    page = html.unescape(write_page(Experiment(runs), tmp_path).read_text())
    paragraph = page[page.index("<h2>Main table") : page.index('id="filters"')]
    assert line[0].upper() + line[1:] in paragraph and (ALONE[1:] in paragraph) is several
    assert ("execution" in page_view(table).blocks[0].extra) is not several, (
        "hidden until asked for"
    )
