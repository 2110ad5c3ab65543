"""Columns as documents and tables define them."""

from evaluation.statistics.columns import column, defined
from evaluation.statistics.rendering import markdown
from model.files import ROOT


def test_concepts_holds_every_definition():
    table = markdown(("name", "unit", "definition"), defined())
    assert table in (ROOT / "docs/concepts.md").read_text(), f"docs/concepts.md is to hold:\n{table}"


def test_a_deviation_and_a_setting_without_a_row_are_columns():
    spread = column("mat_std")
    assert (spread.title, spread.unit) == ("MAT std", "of X") and spread.meaning.startswith("sample standard")
    assert column("tokens_per_second_total_std").form == ",.1f"
    assert (column("max_draft").definition, column("max_draft").shown) == ("", ())
