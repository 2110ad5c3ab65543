"""Columns as documents and tables define them."""

from evaluation.statistics.columns import column


def test_a_deviation_and_a_setting_without_a_row_are_columns():
    spread = column("mat_std")
    assert (spread.title, spread.unit) == ("MAT std", "of X") and spread.meaning.startswith("sample standard")
    assert column("tokens_per_second_total_std").form == ",.1f"
    assert (column("max_draft").definition, column("max_draft").shown) == ("", ())
