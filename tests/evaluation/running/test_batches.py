"""Runs with batch above 1: the texts of batch 1, whole batches kept or none, shares that add up."""

import json

import pytest

from evaluation.loading.answerers import TransformersGenerate
from evaluation.loading.models import LoadedModel
from evaluation.records.runs import read_runs
from evaluation.statistics.agreement import audits
from evaluation.tables.experiment import Experiment
from model.engine import GREEDY, Target
from tests.conftest import greedy, toy_model
from tests.evaluation.running.conftest import core

HOT = ("-m", "method=hf,vanilla,recycling", "start=hot", "name=b")
# the choices of seven questions that one batch of three answers, with the turn
GROUPS = [[(0, 0), (1, 0), (2, 0)], [(0, 1)], [(3, 0), (4, 0), (5, 0)], [(6, 0)]]


def test_texts_are_those_of_batch_1_and_shares_are_of_the_whole(evaluate, tmp_path):
    outcome = evaluate(*HOT, "batch=1,3", "interleave=true")
    assert outcome.code == 0, outcome.err
    experiment = Experiment.read(tmp_path / "results/b")
    audited = audits(experiment.pools)
    assert len(audited) == 5 and all(audit.identical == len(audit.turns) == 8 for audit in audited)
    assert {audit.base.first.label for audit in audited} == {"vanilla"}
    together = {run.label: run for run in experiment.runs if "batch" in run.settings}
    assert len(together) == 3
    for label, run in together.items():
        choices = [row["choices"][0] for row in run.answers]
        for group in GROUPS:
            # behind the first, which may be the prompt's
            later = [choices[index]["step_batch"][turn][1:] for index, turn in group]
            assert max(max(sizes, default=1) for sizes in later) == len(group)
            if label != "hf":  # whose ended rows are forwarded on as padding
                shares = sum(1 / size for sizes in later for size in sizes)
                assert shares == pytest.approx(max(map(len, later)))
    table = experiment.table[experiment.table["category"] == "overall"]
    table = table.set_index(["method", "batch"])
    rows = table["rows_per_forward"]
    assert rows["vanilla", 1] == 1 < rows["vanilla", 3] <= 3
    assert rows["recycling (hot)", 3] > rows["recycling (hot)", 1] > 3
    for size in (1, 3):
        assert table["speedup_hf"]["hf", size] == table["speedup_vanilla"]["vanilla", size] == 1

    assert evaluate(*HOT, "batch=3", "timed=false", "name=u", "method=vanilla,recycling").code == 0
    for run in read_runs(tmp_path / "results/u"):
        assert core(run.answers) == core(together[run.label].answers)


@pytest.mark.slow
def test_generate_with_a_static_cache_is_a_row_next_to_hf_with_the_same_text(evaluate, tmp_path):
    sweep = ("-m", "method=hf,vanilla", "method.compiled=false,true", "batch=1,3", "bench.end=4")
    assert evaluate(*sweep, "name=s").code == 0
    pools = Experiment.read(tmp_path / "results/s").pools
    assert {pool.label for pool in pools} == {"hf", "hf (static cache)", "vanilla"}
    audited = audits(pools)
    assert len(audited) == 5 and all(audit.identical == len(audit.turns) == 5 for audit in audited)


@pytest.mark.parametrize("lines", [3, 5])
def test_a_run_cut_within_a_batch_answers_all_of_it_again(evaluate, tmp_path, lines):
    folder = tmp_path / "runs/run"
    command = ("method=recycling", "start=hot", "batch=3")
    assert evaluate(*command, f"run_dir={folder}").code == 0
    (whole,) = read_runs(tmp_path)
    state = (folder / "state.safetensors").read_bytes()
    answers = folder / "answers.jsonl"
    kept = answers.read_text().splitlines(keepends=True)[:lines]
    (folder / "summary.json").unlink()
    # the state after the first batch: of a run of three questions
    assert evaluate(*command, "bench.end=3", f"run_dir={tmp_path / 'three'}").code == 0
    (tmp_path / "three/state.safetensors").rename(folder / "state-3.safetensors")
    answers.write_text("".join(kept) + '{"question_id": 16, "cho')
    assert evaluate(*command, f"run_dir={folder}").code == 0
    (again,) = read_runs(tmp_path)
    assert core(again.answers) == core(whole.answers)
    assert (folder / "state.safetensors").read_bytes() == state
    stamps = [json.loads(line)["tstamp"] for line in kept]
    left = [row["tstamp"] for row in again.answers]
    assert stamps[:3] == left[:3] and not {*stamps[3:]} & {*left}, "and no other"


def test_answers_of_a_padded_batch_end_at_their_own_end(monkeypatch):
    """transformers pads rows that have ended, and goes on until all have."""
    target = Target(toy_model("llama-grouped"), context=60)
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", None)
    prompts = [[5, 6, 7], [9] * 20, [11, 4], [8, 30, 12, 44, 3]]

    def answers(limit, *eos):
        loaded = LoadedModel(None, target, None, "raw", frozenset(eos))
        answerer = TransformersGenerate(loaded, None, {}, "eager")
        return answerer.answer_batch(prompts, limit, [GREEDY] * 4)

    texts = [greedy(target.model, prompt, 24) for prompt in prompts]
    assert [out.tokens for out in answers(24)] == texts
    eos = texts[0][5]
    for text, out in zip(texts, answers(24, eos), strict=True):
        assert out.tokens == (text[: text.index(eos) + 1] if eos in text else text)
        assert (out.stop == "eos") == (eos in text)
    # the context ends the long one alone: all are answered alone
    longest = [(len(out.tokens), out.steps[0].batch) for out in answers(50)]
    assert longest == [(50, 1), (40, 1), (50, 1), (50, 1)]
    assert {out.stop for out in answers(59)} == {"context"}, "no prompt has room: IndexError"
