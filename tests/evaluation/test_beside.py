"""Published figures stand in the row that they are about, with their source, and in no other."""

import pandas as pd

from evaluation.beside import beside
from evaluation.write_tables import to_text
from tests.evaluation.records import answer, made

SPEC = [("spec_bench", "mt_bench"), ("spec_bench", "qa"), ("spec_bench", "overall")]
PAPER, LEADERBOARD = "paper, A100-80GB", "Spec-Bench leaderboard, A100"


def rows(model, method, cases=(*SPEC, ("mbpp", "code"), ("other", "qa"))):
    return pd.DataFrame([{"model": model, "bench": b, "method": method, "category": c} for b, c in cases])


def test_the_papers_own_figures_come_first():
    table = beside(rows("vicuna-7b", "recycling (hot)"))
    assert table["published_speedup_hf"].tolist()[:4] == [2.17, 1.95, 2.03, 2.34]
    assert table["published_mat"].tolist()[2:4] == [2.70, 2.93] and table["published_mat"][:2].isna().all()
    assert table["published_source"].tolist()[:4] == [PAPER] * 4
    assert table.iloc[4][["published_mat", "published_speedup_hf", "published_source"]].isna().all()


def test_what_the_paper_lacks_comes_from_the_other_sources():
    def overall(model, method):
        table = beside(rows(model, method, SPEC))
        return table.iloc[2][["published_mat", "published_speedup_hf", "published_source"]].tolist()

    assert overall("vicuna-7b", "hf") == [1.0, 1.0, PAPER]
    assert overall("vicuna-7b", "eagle2") == [4.34, 2.36, LEADERBOARD]
    assert overall("vicuna-13b", "sps") == [2.19, 1.54, LEADERBOARD]
    assert overall("vicuna-7b", "recycling (cold)") == [2.55, 1.93, "smpanaro/token-recycling, A100-40GB"]
    assert overall("vicuna-7b", "suffix_recycling (hot)") == [3.03, 2.27, "SAM-Decoding, A6000"]
    # MBPP is in the paper's table only, and there without Medusa
    assert beside(table := rows("vicuna-7b", "medusa", [("mbpp", "code"), ("mbpp", "overall")])) is table


def test_other_models_have_none(tmp_path):
    ours = rows("embedded", "recycling (hot)")
    assert beside(ours) is ours
    theirs = rows("vicuna-7b", "recycling (hot)")
    assert beside(theirs, tmp_path) is theirs, "a checkout without the published figures"


def test_the_terminal_names_the_source():
    from evaluation.tables import main_table

    run = made("recycling (hot)", [answer(1, "qa", [([2, 1], 1.0)])], model={"name": "vicuna-7b"},
               bench={"name": "spec_bench"})  # fmt: skip
    text = to_text([run], beside(main_table([run])))
    assert "published_mat" in text and f"published: {PAPER} (data/reference)" in text
