"""Published figures stand in the row that they are about, with their source, and in no other."""

import pandas as pd
import pytest

from evaluation.statistics.published import as_published, default_settings, with_published

SPEC = [("spec_bench", "mt_bench"), ("spec_bench", "qa"), ("spec_bench", "overall")]
PAPER = "paper, A100-80GB"
LEADERBOARD = "Spec-Bench leaderboard, A100"
COUNT = {"spec_bench": 480, "mbpp": 399, "other": 480}


def rows(model, method, cases=(*SPEC, ("mbpp", "code"), ("other", "qa")), **more):
    """Rows of the main table for runs as published, whatever else is given."""
    name = method.partition(" (")[0]
    settings = default_settings(name) | ({"tree": "2.2.2"} if "recycling" in name else {}) | more
    about = {"model": model, "method": method, "complete": True, "max_new_tokens": 1024}
    table = []
    for bench, category in cases:
        place = {"bench": bench, "category": category, "bench_questions": COUNT[bench]}
        table.append(about | place | settings)
    return pd.DataFrame(table)


OTHERS = {
    "tree": "best",
    "k": 4,
    "recycle_prompt": True,
    "order": "shuffled-1",
    "temperature": 0.7,
    "repetition_penalty": 1.3,
    "bench_questions": 60,
    "complete": False,
    "max_new_tokens": 64,
    "timed": False,
    "batch": 8,
    "phases": True,
    "quantize": "int8",
    "num_choices": 2,
}


@pytest.mark.parametrize("setting", OTHERS)
def test_other_variants_and_parts_of_a_bench_have_none(setting):
    """The published figures of 80 nodes and 480 questions had stood beside every tree, k and subset."""
    same = rows("vicuna-7b", "recycling (hot)", SPEC)
    other = same.assign(**{setting: OTHERS[setting]})
    table = with_published(pd.concat([same, other], ignore_index=True))
    assert table["published_speedup_hf"].isna().tolist() == [False] * 3 + [True] * 3
    assert table["published_mat"].tolist()[2] == 2.70 and table["published_mat"][3:].isna().all()


@pytest.mark.parametrize(
    ("method", "settings", "same"),
    [
        ("medusa", {"heads_path": "data/vicuna/medusa"}, True),  # the model's own
        ("medusa", {"tree_path": "mine.yaml"}, False),
        ("pld", {"dtype": "float16", "k": None}, True),
        ("pld", {"max_ngram": 2}, False),
        ("hf", {"compiled": None}, True),  # records hold it only where it is on
        ("hf", {"compiled": True}, False),
        ("eagle3", {}, False),  # Spec-Bench's script grows six levels
        ("eagle3", {"depth": 6}, True),
    ],
)
def test_a_methods_settings_are_its_defaults(method, settings, same):
    (row,) = rows("vicuna-7b", method, SPEC[:1], **settings).to_dict("records")
    assert as_published(row) is same


def test_the_papers_own_figures_come_first():
    table = with_published(rows("vicuna-7b", "recycling (hot)"))
    assert table["published_speedup_hf"].tolist()[:4] == [2.17, 1.95, 2.03, 2.34]
    assert table["published_mat"].fillna(0).tolist() == [0, 0, 2.70, 2.93, 0]
    assert table["published_source"].fillna("").tolist() == [PAPER] * 4 + [""]


@pytest.mark.parametrize(
    ("model", "method", "figures"),
    [
        ("vicuna-7b", "hf", [1.0, 1.0, PAPER]),
        ("vicuna-7b", "eagle2", [4.34, 2.36, LEADERBOARD]),
        ("vicuna-7b", "samd", [4.58, 2.73, LEADERBOARD]),
        ("vicuna-7b", "recycling (cold)", [2.55, 1.93, "smpanaro/token-recycling, A100-40GB"]),
        ("vicuna-7b", "suffix_recycling (hot)", [3.03, 2.27, "SAM-Decoding, A6000"]),
    ],
)
def test_what_the_paper_lacks_comes_from_the_other_sources(model, method, figures):
    table = with_published(rows(model, method, SPEC))
    columns = ["published_mat", "published_speedup_hf", "published_source"]
    assert table.iloc[2][columns].tolist() == figures
