"""Every table says how steps were taken, of the method and of its baseline."""

import pandas as pd

from evaluation.records.runs import GENERATE
from tests.evaluation.made_runs import answer, made, overall


def ran(label, execution="eager", seconds=1.0, **settings):
    run = made(label, [answer(1, "qa", [([2, 1], seconds)])])
    run.metadata["settings"] |= {"execution": execution} | settings
    return run


ALIKE = [ran("hf"), ran("vanilla"), ran("pld")]
MIXED = [
    *ALIKE,
    ran("vanilla", "compiled"),
    ran("pld", "compiled"),
    ran("recycling (hot)", "graph"),
]


def test_pairs_are_of_one_execution():
    rows = overall(MIXED)
    executions = [GENERATE, "eager", "eager", "compiled", "compiled", "graph"]
    assert rows["execution"].tolist() == executions
    assert rows["execution_hf"].tolist() == [GENERATE] * 6
    assert rows["execution_vanilla"].tolist()[1:5] == executions[1:5]
    assert pd.isna(rows["execution_vanilla"].iloc[5])
    assert rows["speedup_vanilla"].notna().tolist() == [True] * 5 + [False]

    inside = [ran("pld", "custom_generate"), ran("pld", "custom_generate, graph")]
    named = overall([*MIXED, ran("vanilla", "graph"), *inside]).loc["pld"]
    named = named.set_index("execution")["execution_vanilla"]
    assert named["custom_generate"] == "eager", "as its steps ran"
    assert named["custom_generate, graph"] == "graph"


def test_steps_timed_in_parts_or_not_at_all_are_no_baseline():
    """A run with phases=true had 0.45 of an hf whose time holds no phases."""
    rows = overall([ran("hf"), *(ran(label, phases=True) for label in ("vanilla", "pld"))])
    assert rows.loc["pld", "speedup_vanilla"] == 1.0
    assert rows.loc[["pld", "vanilla"], "speedup_hf"].isna().all()
    untimed = ran("hf", seconds=0.0, timed=False)
    rows = overall([untimed, ran("hf", timed=True), ran("recycling (hot)", "graph", timed=True)])
    assert rows.loc["recycling (hot)", "speedup_hf"] == 1.0
