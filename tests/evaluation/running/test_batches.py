"""Runs with batch above 1: the texts of batch 1, whole batches kept or none, shares that add up."""

import json
import time

import pytest

from evaluation.answerers import TransformersGenerate
from evaluation.loading import stock
from evaluation.loading.models import LoadedModel
from evaluation.records.runs import read_runs
from evaluation.running import runner
from evaluation.statistics.agreement import audits
from evaluation.statistics.experiment import Experiment
from model.engine import Target
from model.engine.sampling import GREEDY
from tests.conftest import greedy, toy_model
from tests.evaluation.running.test_run import core

HOT = ("-m", "method=hf,vanilla,recycling", "start=hot")


def test_texts_are_those_of_batch_1_and_shares_are_of_the_whole(evaluate, tmp_path, monkeypatch):
    sizes, real = [], runner.answer

    def noting(questions, answerers):
        sizes.append((answerers[0][0].label, len(questions)))
        return real(questions, answerers)

    monkeypatch.setattr(runner, "answer", noting)
    outcome = evaluate(*HOT, "batch=1,3", "interleave=true", "name=b")
    assert outcome.code == 0, outcome.err
    for label in ("hf", "vanilla", "recycling (hot)"):
        assert sorted(n for of, n in sizes if of == label) == [1] * 8 + [3, 3], (
            "seven questions, by one and by three"
        )
    experiment = Experiment.read(tmp_path / "results/b")
    (vanilla,) = (
        run
        for run in experiment.runs
        if (run.label, run.settings.get("batch")) == ("vanilla", None)
    )
    audited = audits(experiment.pools)
    assert len(audited) == 5 and all(audit.base.first is vanilla for audit in audited), (
        "batches next to batch 1"
    )
    assert all(audit.identical == len(audit.turns) == 8 for audit in audited)
    for run in experiment.runs:
        choices = [row["choices"][0] for row in run.answers]
        assert ("step_batch" in choices[0]) == (run.settings.get("batch") == 3)
        if run.settings.get("batch") == 3:
            groups = [
                [(c, 0) for c in choices[:3]],
                [(choices[0], 1)],
                [(c, 0) for c in choices[3:6]],
                [(choices[6], 0)],
            ]
            for group in groups:
                # behind the first, which may be the prompt's
                later = [c["step_batch"][turn][1:] for c, turn in group]
                if run.label != "hf":  # whose ended rows are forwarded on as padding
                    assert sum(1 / size for sizes in later for size in sizes) == pytest.approx(
                        max(map(len, later))
                    )
                assert max(max(sizes, default=1) for sizes in later) == len(group)
    table = experiment.table.set_index(["method", "batch", "category"])["rows_per_forward"]
    assert table["vanilla", 1, "overall"] == 1 and 1 < table["vanilla", 3, "overall"] <= 3
    assert table["recycling (hot)", 3, "overall"] > table["recycling (hot)", 1, "overall"] > 3
    overall = experiment.table[experiment.table["category"] == "overall"].set_index(
        ["method", "batch"]
    )
    for size in (1, 3):
        assert (
            overall["speedup_hf"]["hf", size] == overall["speedup_vanilla"]["vanilla", size] == 1
        ), "of its own size"
        hf, vanilla = (overall["tokens_per_second"][name, size] for name in ("hf", "vanilla"))
        assert overall["speedup_hf"]["vanilla", size] == pytest.approx(vanilla / hf)
    assert evaluate(*HOT, "batch=3", "timed=false", "name=u", "method=vanilla,recycling").code == 0
    timed = {run.label: core(run.answers) for run in experiment.runs if "batch" in run.settings}
    untimed = {run.label: core(run.answers) for run in read_runs(tmp_path / "results/u")}
    assert len(untimed) == 2 and untimed.items() <= timed.items()
    assert (
        evaluate(
            "method=vanilla", "batch=3", "bench.order=interleaved", "timed=false", "name=u"
        ).code
        == 0
    )
    assert len(read_runs(tmp_path / "results/u")) == 3, "other batches"


@pytest.mark.slow
def test_generate_with_a_static_cache_is_a_row_next_to_hf_with_the_same_text(
    evaluate, tmp_path, monkeypatch
):
    words = (
        "-m",
        "method=hf,vanilla",
        "method.compiled=false,true",
        "batch=1,3",
        "bench.end=4",
        "name=s",
    )
    assert evaluate(*words).code == 0
    experiment = Experiment.read(tmp_path / "results/s")
    rows = [(pool.label, pool.first.facets["batch"]) for pool in experiment.pools]
    assert sorted(rows) == [
        (name, size) for name in ("hf", "hf (static cache)", "vanilla") for size in (1, 3)
    ]
    audited = audits(experiment.pools)
    assert len(audited) == 5 and all(audit.identical == len(audit.turns) == 5 for audit in audited)
    recorded = {
        run.label: run.settings["method"].get("compiled", "not recorded") for run in experiment.runs
    }
    assert recorded == {"hf": "not recorded", "vanilla": "not recorded", "hf (static cache)": True}
    assert all(pool.baselines["hf"].label == "hf" for pool in experiment.pools)
    words = (
        "-m",
        "method=hf,vanilla",
        "method.compiled=false,true",
        "sampling.temperature=1.0",
        "num_choices=2",
    )
    assert evaluate(*words, "bench.end=2", "name=t").code == 0
    sampled = Experiment.read(tmp_path / "results/t").pools
    assert len(sampled) == 3 and audits(sampled) == [], "transformers draws its own noise"
    drawn = [
        [c["output_ids"] for c in pool.rows[0]["choices"]]
        for pool in sampled
        if pool.method == "hf"
    ]
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1], "by each choice's seed"
    monkeypatch.setattr(stock, "StaticCache", lambda **settings: 1 / 0)
    outcome = evaluate(
        "-m",
        "method=hf,vanilla",
        "method.compiled=true",
        "bench.end=1",
        "batch=1",
        "max_new_tokens=2000",
    )
    assert outcome.code == 2 and "method.compiled=true: transformers fails on toy" in outcome.err
    assert "Traceback" not in outcome.err and "vanilla" in outcome.out, "the other row is there"


@pytest.mark.parametrize("lines", [3, 4, 5])
def test_a_run_cut_within_a_batch_answers_all_of_it_again(evaluate, tmp_path, lines):
    folder = tmp_path / "runs/run"
    command = ("method=recycling", "start=hot", "batch=3", f"run_dir={folder}")
    assert evaluate(*command).code == 0
    whole, state = read_runs(tmp_path)[0], (folder / "state.safetensors").read_bytes()
    answers = folder / "answers.jsonl"
    kept = answers.read_text().splitlines(keepends=True)[:lines]
    (folder / "summary.json").unlink()
    # the state after the first batch: of a run of three questions
    assert evaluate(*command[:3], "bench.end=3", f"run_dir={tmp_path / 'three'}").code == 0
    (tmp_path / "three/state.safetensors").rename(folder / "state-3.safetensors")
    answers.write_text("".join(kept) + '{"question_id": 16, "cho')
    outcome = evaluate(*command)
    assert outcome.code == 0, outcome.err
    again = read_runs(tmp_path)[0]
    assert (
        core(again.answers) == core(whole.answers)
        and (folder / "state.safetensors").read_bytes() == state
    )
    stamps = [
        [json.loads(line)["tstamp"] for line in text]
        for text in (kept, answers.read_text().splitlines())
    ]
    assert stamps[0][:3] == stamps[1][:3] and not {*stamps[0][3:]} & {*stamps[1]}, "and no other"
    # killed after the last answer: the last batch holds one question
    (folder / "summary.json").unlink()
    assert evaluate(*command).code == 0
    assert read_runs(tmp_path)[0].summary == again.summary


def test_answers_of_a_padded_batch_end_at_their_own_end(monkeypatch):
    """transformers pads rows that have ended, and goes on until all have."""
    target = Target(toy_model("llama-grouped"), context=60)
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", None)
    prompts, own = [[5, 6, 7], [9] * 20, [11, 4], [8, 30, 12, 44, 3]], [GREEDY] * 4
    plain = TransformersGenerate(
        LoadedModel(None, target, None, "raw", frozenset()), None, {}, "eager"
    )
    texts = [out.tokens for out in plain.answer_batch(prompts, 24, own)]
    assert texts == [greedy(target.model, prompt, 24) for prompt in prompts]
    for eos in (frozenset({texts[0][5], texts[2][9]}), frozenset({texts[3][0]})):
        ending = TransformersGenerate(
            LoadedModel(None, target, None, "raw", eos), None, {}, "eager"
        )
        start = time.perf_counter()
        outs = ending.answer_batch(prompts, 24, own)
        assert sum(out.decode_s for out in outs) <= time.perf_counter() - start
        assert [out.tokens for out in outs] == [
            ending.answer(prompt, 24).tokens for prompt in prompts
        ]
        assert all(
            (out.stop == "eos") == (out.tokens[-1] in eos) and len(out.steps) == len(out.tokens)
            for out in outs
        )
        assert (
            len({len(out.tokens) for out in outs}) > 1 and len({out.decode_s for out in outs}) == 1
        )
    longest = plain.answer_batch(prompts, 50, own)
    assert [len(out.tokens) for out in longest] == [50, 40, 50, 50], (
        "the context ends the long one alone"
    )
    assert [out.steps[0].batch for out in longest] == [3, 1, 3, 3], "which is answered alone"
    crowded = plain.answer_batch(prompts, 59, own)  # no prompt has room: IndexError
    assert [(len(out.tokens), out.stop) for out in crowded] == [
        (60 - len(p), "context") for p in prompts
    ]


def test_no_speedup_is_predicted_of_a_batch(evaluate, tmp_path):
    """The prediction was of the last batch's step times, whose width differs."""
    command = (
        "-m",
        "method=dynamic",
        "start=hot",
        "tree=auto",
        "tree.nodes=8",
        "batch=1,3",
        "name=p",
    )
    outcome = evaluate(*command)
    assert outcome.code == 0, outcome.err
    alone, batch = (
        line
        for line in outcome.out.splitlines()
        if line.startswith("dynamic (auto)") and "steps:" in line
    )
    assert "predicted" in alone and batch.endswith(" nodes")
    drafted = {
        run.settings.get("batch", 1): run.summary["drafter"]
        for run in read_runs(tmp_path / "results/p")
    }
    assert "predicted_speedup" in drafted[1] and not any("predicted" in key for key in drafted[3])
