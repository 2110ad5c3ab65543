"""One view of a table, rendered for the terminal and as Markdown; the page and the tables word `~` alike."""

from evaluation.statistics.columns import Column
from evaluation.statistics.rendering import Block, Cell, Line, View, to_markdown, to_text


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
