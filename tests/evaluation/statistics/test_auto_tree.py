"""What tree=auto promised beside what came of it: of every run, against the same repeat of the baseline."""

import json

from evaluation.records.runs import read_runs
from evaluation.statistics.trees import auto_lines, auto_runs
from tests.evaluation.made_runs import answer, made, write


def test_every_repeat_and_variant_is_told(tmp_path):
    """By label alone the last run had replaced the others, and all were measured by vanilla's first repeat."""

    def decoded(seconds):
        return [answer(i, "qa", [([2, 1], seconds)], decode_time=[seconds]) for i in (1, 2)]

    for repeat, drift in enumerate((1.0, 2.0)):
        write(made("vanilla", decoded(4.0 * drift), repeat=repeat), tmp_path)
        for k, seconds in ((4, 2.0), (8, 1.0)):
            method = {"k": k, "tree": "auto"}
            folder = write(made("recycling (auto)", decoded(seconds * drift), repeat=repeat, method=method), tmp_path)
            told = {"sizes": [0, 8, 16], "step_seconds": [1, 1, 2], "predicted_speedup_by_size": [1.0, 1.5, 1.2]}
            told |= {"chosen": 8 * (1 + repeat), "predicted_speedup": 1.5}
            (folder / "summary.json").write_text(json.dumps({"drafter": told}))
    runs = read_runs(tmp_path)
    found = auto_runs(runs)
    assert [(f["method"], f["repeat"], f["chosen"], f["achieved_speedup"]) for f in found] == [
        ("recycling (auto), k=4", 0, 8, 2.0),
        ("recycling (auto), k=4", 1, 16, 2.0),
        ("recycling (auto), k=8", 0, 8, 4.0),
        ("recycling (auto), k=8", 1, 16, 4.0),
    ]
    lines = auto_lines(found)
    assert len(lines) == 4 and lines[1].startswith("recycling (auto), k=4, repeat 1 on file: last choice 16 nodes")


def test_nothing_is_said_without_a_choice_and_nothing_measured_without_vanilla(tmp_path):
    rows = [answer(1, "qa", [([1], 1.0)])]
    assert auto_runs([made("vanilla", rows)]) == []
    alone = made("recycling (auto)", rows, summary={"drafter": {"chosen": 0, "predicted_speedup": 1.0}})
    (line,) = auto_lines(auto_runs([alone]))
    assert "not measured, as there is no timed run of vanilla; drafting does not pay here" in line
