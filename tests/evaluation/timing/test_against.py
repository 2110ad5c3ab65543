"""Another report beside this one."""

import json

import pytest

from evaluation.timing.against import ratio_lines, ratios, read_report
from model.errors import UserError

CELL = dict(model="m", dtype="float32", execution="eager", context=200)


def test_ratios_by_hand():
    now = [CELL | {"plain_s": 2.0, "step_s": {"0": 3.0, "80": 8.0}}, CELL | {"context": 9, "plain_s": 1, "step_s": {}}]
    before = [CELL | {"plain_s": 1.0, "step_s": {"80": 32.0, "160": 9.0}}]
    (row,) = ratios(now, before)
    assert row["ratio"] == {"plain": 2.0, "80": 0.25} and row["median"] == 1.125
    assert ratio_lines([row])[1] == "  m float32 eager at 200: plain 2.00, 80 0.25 nodes; median of all 1.12"
    assert ratios(now, []) == [] and "that both have" in ratio_lines([])[0]


@pytest.mark.parametrize(
    "text",
    [
        None,
        "no json",
        "[]",
        "{}",
        '{"steps": {"cells": [{"plain_s": 1}]}}',
        json.dumps({"steps": {"cells": [CELL | {"plain_s": 0.0, "step_s": {}}]}}),
        json.dumps({"steps": {"cells": [CELL | {"plain_s": 1.0, "step_s": {"many": 1.0}}]}}),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match="--against .*: not a report") as refused:
        read_report(path)
    assert "\n" not in str(refused.value)
