"""One view of a table, rendered for the terminal and as Markdown; the page and the tables word `~` alike."""

from evaluation.statistics.notes import unsure_note
from evaluation.statistics.rendering import Block, Cell, Heading, Line, View, main_view, page_view, to_markdown, to_text
from evaluation.statistics.tables import main_table
from tests.evaluation.made_runs import made
from tests.evaluation.statistics.test_tables import eight


def test_a_view_made_by_hand_is_rendered_for_each_output():
    columns = [Heading("method", "method", False), Heading("speedup_hf", "speedup")]
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


def test_the_mark_of_an_unsure_speedup_has_one_wording():
    base = made("vanilla", eight([1] * 4, [1] * 8, 2.0, 4.0))
    slow = made("pld", eight([3, 1], [4, 4], 8.0, 2.0))
    table = main_table([base, slow])
    assert unsure_note("95 % interval") in main_view([base, slow], table).footnotes
    assert unsure_note("interval") + "." in page_view(table).footnotes
    marked = [[c.text for c in view.cells if c.mark] for view in (main_view([base, slow], table), page_view(table))]
    assert marked == [["1.12", "1.12"]] * 2, "by subtask and overall"
