"""Columns as documents and tables define them; one view of a table, rendered for the terminal and as Markdown."""

from evaluation.statistics.columns import Column, column, defined
from evaluation.statistics.rendering import Block, Cell, Line, View, markdown, to_markdown, to_text
from model.files import ROOT


def test_concepts_holds_every_definition():
    table = markdown(("name", "unit", "definition"), defined())
    assert table in (ROOT / "docs/concepts.md").read_text(), f"docs/concepts.md is to hold:\n{table}"


def test_a_deviation_and_a_setting_without_a_row_are_columns():
    spread = column("mat_std")
    assert (spread.title, spread.unit) == ("MAT std", "of X") and spread.meaning.startswith("sample standard")
    assert (column("max_draft").definition, column("max_draft").shown) == ("", ())


def test_a_view_made_by_hand_is_rendered_for_each_output():
    columns = [Column("method"), Column("speedup_hf", title="speedup")]
    lines = [Line([Cell("pld"), Cell("2.25", "[0.90, 3.00]", "~")], "pld"), Line([Cell("hf"), Cell("-")], "hf")]
    view = View([Block(columns, lines, "toy, a bench")], "Main table", ["what ran"], ["~: why"])
    assert to_text(view) == "what ran\n\ntoy, a bench:\nmethod  speedup\npld       2.25~\nhf            -\n~: why"
    assert to_markdown(view).split("\n\n") == [
        "# Main table",
        "what ran",
        "## toy, a bench",
        "| method | speedup |\n|---|---|\n| pld | 2.25~ [0.90, 3.00] |\n| hf | - |",
        "~: why\n",
    ]
    (block,) = view.blocks
    assert block.baselines == ["hf"]
