"""Every table says how steps were taken, of the method and of its baseline."""

import html
import re

import pandas as pd
import pytest

from evaluation.page import write_page
from evaluation.records.runs import GENERATE
from evaluation.statistics.notes import execution_words, not_compared
from evaluation.statistics.pools import pools
from evaluation.statistics.rendering import page_view
from evaluation.statistics.tables import main_table
from tests.evaluation.made_runs import answer, in_terminal, made, on_paper

ROWS = [answer(1, "qa", [([2, 1], 1.0)]), answer(2, "rag", [([3], 0.5)])]


def ran(label, execution="eager"):
    run = made(label, ROWS)
    run.metadata["settings"]["execution"] = execution
    return run


def overall(runs):
    table = main_table(runs)
    return table[table["category"] == "overall"].set_index(["method", "variant"])


ALIKE = [ran("hf"), ran("vanilla"), ran("pld")]
MIXED = [*ALIKE, ran("vanilla", "compiled"), ran("pld", "compiled"), ran("recycling (hot)", "graph")]


def test_one_execution_is_said_once():
    for write_out in (in_terminal, on_paper):
        text = write_out(ALIKE, main_table(ALIKE))
        assert "\nexecution: eager; hf is transformers' own generate, so speedup_hf also includes" in text
        assert text.count("execution: ") == 1 and not re.search(r"execution [ |]", text), "no column"
    assert "execution: eager" in in_terminal(ALIKE[1:], main_table(ALIKE[1:]))
    assert execution_words(main_table(ALIKE[:1])) == []


def test_several_are_a_column_and_pairs_are_of_one():
    rows = overall(MIXED)
    assert rows["execution"].tolist() == [GENERATE, "eager", "eager", "compiled", "compiled", "graph"]
    assert rows["execution_hf"].tolist() == [GENERATE] * 6
    theirs = rows["execution_vanilla"].tolist()
    assert theirs[1:5] == rows["execution"].tolist()[1:5] and pd.isna(theirs[5])
    assert rows["speedup_vanilla"].notna().tolist() == [True] * 5 + [False]
    told = "no speedup over vanilla for recycling (hot): execution graph here, eager for vanilla"
    for write_out in (in_terminal, on_paper):
        text = write_out(MIXED, main_table(MIXED))
        (line,) = [line for line in text.splitlines() if line.startswith("execution: ")]
        assert "see its column; speedup_vanilla compares with vanilla in the same execution; hf is" in line
        assert re.search(r"pld +\|? *execution=compiled +\|? *compiled", text) and told in text
    assert not_compared(pools(MIXED)) == [told] and not_compared(pools(ALIKE)) == []


@pytest.mark.parametrize(
    ("runs", "said", "column"), [(ALIKE, "Execution: eager; hf is", False), (MIXED, "Execution: see its", True)]
)
def test_the_page_says_it(tmp_path, runs, said, column):
    table = main_table(runs)
    text = html.unescape(write_page(runs, table, tmp_path).read_text())
    paragraph = text[text.index("<h2>Main table") : text.index('id="filters"')]
    assert said in paragraph and ("No speedup over vanilla for recycling (hot)" in paragraph) is column
    assert ("execution" in page_view(table).blocks[0].extra) is not column, "hidden until asked for where there is one"


def test_steps_slowed_by_phases_are_not_compared_with_transformers(tmp_path):
    """A run with phases=true had 0.45 of an hf whose time holds no phases."""
    rows = [answer(1, "qa", [([2, 2], 1.0)])]
    runs = [made(label, rows) for label in ("hf", "vanilla", "pld")]
    for run in runs:
        run.metadata["settings"]["phases"] = True
    table = main_table([*runs, made("hf", rows, folder="plain")]).set_index("method")
    table = table[table["category"] == "overall"]
    assert table.loc["pld", "speedup_vanilla"] == 1.0 and table.loc[["pld", "vanilla"], "speedup_hf"].isna().all()
