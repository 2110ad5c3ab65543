"""Published figures stand in the row that they are about, with their source, and in no other."""

import re

import pandas as pd
import pytest

from evaluation.statistics import published as module
from evaluation.statistics.experiment import Experiment
from evaluation.statistics.published import as_published, default_settings, table1, with_published
from tests.evaluation.made_runs import answer, in_terminal, made

SPEC = [("spec_bench", "mt_bench"), ("spec_bench", "qa"), ("spec_bench", "overall")]
PAPER, LEADERBOARD = "paper, A100-80GB", "Spec-Bench leaderboard, A100"
COUNT = {"spec_bench": 480, "mbpp": 399, "other": 480}


def rows(model, method, cases=(*SPEC, ("mbpp", "code"), ("other", "qa")), **more):
    """Rows of the main table for runs as published, whatever else is given."""
    name = method.partition(" (")[0]
    tree = {"tree": "2.2.2"} if "recycling" in name else {}
    about = {"complete": True, "max_new_tokens": 1024} | tree | default_settings(name) | more
    return pd.DataFrame([
        {"model": model, "bench": b, "method": method, "category": c, "bench_questions": COUNT[b]} | about
        for b, c in cases
    ])  # fmt: skip


OTHERS = {
    **{
        "tree": "best",
        "k": 4,
        "update": "path",
        "recycle_prompt": True,
        "order": "shuffled-1",
        "temperature": 0.7,
    },
    **{
        "bench_questions": 60,
        "complete": False,
        "max_new_tokens": 64,
        "repetition_penalty": 1.3,
        "timed": False,
    },
    **{"batch": 8, "phases": True, "quantize": "int8", "num_choices": 2},
}


@pytest.mark.parametrize("setting", OTHERS)
def test_other_variants_and_parts_of_a_bench_have_none(setting):
    """The published figures of 80 nodes and 480 questions had stood beside every tree, k and subset."""
    as_published_of = rows("vicuna-7b", "recycling (hot)", SPEC)
    other = as_published_of.assign(**{setting: OTHERS[setting]})
    table = with_published(pd.concat([as_published_of, other], ignore_index=True))
    assert (
        table["published_speedup_hf"].isna().tolist()
        == table["published_source"].isna().tolist()
        == [0] * 3 + [1] * 3
    )
    assert table["published_mat"].tolist()[2] == 2.70 and table["published_mat"][3:].isna().all()


def test_a_methods_weights_and_types_are_its_models_own():
    (medusa,) = rows("vicuna-7b", "medusa", SPEC[:1], heads_path="data/vicuna/medusa").to_dict(
        "records"
    )
    assert as_published(medusa) and not as_published(medusa | {"tree_path": "mine.yaml"})
    (pld,) = rows("vicuna-7b", "pld", SPEC[:1], dtype="float16", k=None).to_dict("records")
    assert as_published(pld) and not as_published(pld | {"max_ngram": 2})
    (spine,) = rows("vicuna-7b", "spine", SPEC[:1]).to_dict("records")
    assert isinstance(spine["accept_probs"], str) and as_published(spine)
    (hf,) = rows("vicuna-7b", "hf", SPEC[:1], compiled=None).to_dict("records")
    assert as_published(hf) and not as_published(hf | {"compiled": True}), (
        "records hold it only where it is on"
    )


def test_the_papers_own_figures_come_first():
    table = with_published(rows("vicuna-7b", "recycling (hot)"))
    assert table["published_speedup_hf"].tolist()[:4] == [2.17, 1.95, 2.03, 2.34]
    assert (
        table["published_mat"].tolist()[2:4] == [2.70, 2.93]
        and table["published_mat"][:2].isna().all()
    )
    assert table["published_source"].tolist()[:4] == [PAPER] * 4
    assert table.iloc[4][["published_mat", "published_speedup_hf", "published_source"]].isna().all()


def test_what_the_paper_lacks_comes_from_the_other_sources():
    def overall(model, method):
        table = with_published(rows(model, method, SPEC))
        return table.iloc[2][["published_mat", "published_speedup_hf", "published_source"]].tolist()

    assert overall("vicuna-7b", "hf") == [1.0, 1.0, PAPER]
    assert overall("vicuna-7b", "eagle2") == [4.34, 2.36, LEADERBOARD]
    assert overall("vicuna-13b", "sps") == [2.19, 1.54, LEADERBOARD]
    assert overall("vicuna-7b", "samd") == [4.58, 2.73, LEADERBOARD]
    (eagle3,) = rows("vicuna-13b", "eagle3", SPEC[:1]).to_dict("records")
    assert not as_published(eagle3) and as_published(eagle3 | {"depth": 6}), (
        "Spec-Bench's script grows six levels"
    )
    assert overall("vicuna-7b", "recycling (cold)") == [
        2.55,
        1.93,
        "smpanaro/token-recycling, A100-40GB",
    ]
    assert overall("vicuna-7b", "suffix_recycling (hot)") == [3.03, 2.27, "SAM-Decoding, A6000"]
    # MBPP is in the paper's table only, and there without Medusa
    assert (
        with_published(
            table := rows("vicuna-7b", "medusa", [("mbpp", "code"), ("mbpp", "overall")])
        )
        is table
    )
    assert with_published(table := rows("embedded", "recycling (hot)")) is table


GGUF = {"file": "vicuna.gguf", "sha256": "", "tensor_types": {"F32": 2, "F16": 3}}


@pytest.mark.parametrize(
    ("settings", "more", "shown"),
    [
        ({}, {}, True),
        ({}, {"converted_from": GGUF}, True),
        ({}, {"converted_from": GGUF | {"tensor_types": {"F32": 2, "Q4_1": 3}}}, False),
        ({}, {"model": {"quantize": "int8"}}, False),
        ({"phases": True}, {}, False),
        ({"batch": 4}, {}, False),
        ({"num_choices": 2}, {}, False),
    ],
)
def test_runs_under_other_conditions_have_none(monkeypatch, settings, more, shown):
    """Published figures of batch 1 had stood next to batches, runs with phases, and quantised models."""
    monkeypatch.setattr(module, "WHOLE", {"spec_bench": 1})
    own = default_settings("recycling") | {"tree": "2.2.2"}
    model = {"name": "vicuna-7b"} | more.pop("model", {})
    more |= {"model": model, "bench": {"name": "spec_bench"}}
    rows = [answer(1, "qa", [([2, 1], 1.0)])]
    runs = [
        made(label, rows, method=method, **more)
        for label, method in (("recycling (hot)", own), ("hf", {}))
    ]
    for run in runs:
        run.metadata["settings"] |= {"max_new_tokens": 1024} | settings
    table = Experiment(runs).table
    drafted = table[table["method"] == "recycling (hot)"]
    assert ("published_mat" in drafted and bool(drafted["published_mat"].notna().any())) is shown
    measured = [text for text in table1(table)["measured"] if text]
    assert all(("phases True" in text) is ("phases" in settings) for text in measured[-1:])
    assert all(
        ("quantize" in text) is ("quantize" in model or "Q4_1" in str(more)) for text in measured
    )


def test_the_terminal_names_the_source_and_the_cells_say_what_executes(monkeypatch):
    """A speedup of eager steps had stood next to one of replayed graphs."""
    monkeypatch.setattr(module, "WHOLE", {"spec_bench": 1})
    own = default_settings("recycling") | {"tree": "2.2.2"}
    rows = [answer(1, "qa", [([2, 1], 1.0)])]
    runs = [made(label, rows, model={"name": "vicuna-7b"}, bench={"name": "spec_bench"}, method=method)
            for label, method in (("recycling (hot)", own), ("hf", {}))]  # fmt: skip
    for run in runs:
        run.metadata["settings"] |= {"max_new_tokens": 1024, "execution": "graph"}
    text = in_terminal(runs)
    assert "published_mat" in text and f"published: {PAPER} (data/reference)" in text
    (line,) = [line for line in text.splitlines() if line.startswith("recycling (hot)")]
    assert re.search(r"1\.00 \(graph\) .* 2\.70 +2\.03 \(eager\)", line)
