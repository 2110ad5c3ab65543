"""Runs end to end on a toy checkpoint of Vicuna's layout: every method gives the same text."""

import json

import pandas as pd
import torch

from evaluation.records.runs import read_runs
from tests.evaluation.conftest import CATEGORIES, answers_in
from tests.evaluation.running.conftest import records


def texts_of(runs):
    """The token ids of each run's answers; one entry if all runs agree."""
    texts = []
    for run in runs:
        ids = [[choice["output_ids"] for choice in row["choices"]] for row in run.answers]
        if ids not in texts:
            texts.append(ids)
    return texts


def test_an_experiment_keeps_its_threads_whatever_else_is_at_work_later(
    evaluate, tmp_path, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for name, method, free in (("one", "hf", 2), ("one", "vanilla", 1), ("other", "hf", 1)):
            monkeypatch.setattr("model.tuning.free_cores", lambda free=free: free)
            assert evaluate(f"method={method}", "bench.end=1", f"name={name}").code == 0
            assert torch.get_num_threads() == 2, "given back to the caller"
    finally:
        torch.set_num_threads(before)
    one, other = (read_runs(tmp_path / f"results/{name}") for name in ("one", "other"))
    assert [run.metadata["threads"] for run in [*one, *other]] == [2, 2, 1]
    assert "cores were free" in other[0].metadata["threads_why"]


def check_times(choice):
    """The steps' times of a choice add up to its turns'."""
    for turn, us in enumerate(choice["step_us"]):
        prefill = choice["prefill_time"][turn]
        decode = choice["decode_time"][turn]
        assert len(us) == choice["decoding_steps"][turn] and min(us) > 0
        assert us[0] == round(1e6 * prefill) and sum(us) <= 1e6 * (prefill + decode) + 1


def test_every_method_gives_the_same_text_and_the_tables_add_up(evaluate, drawn, tmp_path):
    sweep = ("-m", "method=hf,vanilla,pld,recycling", "start=cold,hot")
    outcome = evaluate(*sweep, "name=all")
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "results/all"
    runs = read_runs(folder)
    assert len(runs) == 5, "stateless methods ran once each, not once a start"
    assert len(texts_of(runs)) == 1
    for run in runs:
        assert [row["category"] for row in run.answers] == CATEGORIES
        assert {"command", "device", "versions", "git", "config"} <= run.metadata.keys()
        assert (run.folder / "state.safetensors").exists() == (run.label == "recycling (hot)")
        accepted = 0
        for row in run.answers:
            (choice,) = row["choices"]
            assert len(choice["turns"]) == (2 if row["question_id"] == 10 else 1)
            assert [len(ids) for ids in choice["output_ids"]] == choice["new_tokens"]
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
            accepted += sum(choice["accept_lengths"]) - sum(choice["decoding_steps"])
            if run.label != "hf":
                check_times(choice)
        assert (accepted == 0) == (run.label in ("hf", "vanilla"))
        if run.label.startswith("recycling"):
            lines = (run.folder / "acceptance.jsonl").read_text().splitlines()
            counts = [json.loads(line)["metrics"]["speculative_decoding"] for line in lines]
            kept = sum(count["num_accepted_draft_tokens"] for count in counts)
            # a path may end at the answer's last token, which is no bonus
            assert accepted <= kept <= accepted + len(lines)

    table = pd.read_csv(folder / "tables/main.csv")
    assert {*table["category"]} == {*CATEGORIES, "overall"} - {"writing", "math"} | {"mt_bench"}
    overall = table[table["category"] == "overall"].set_index(["method", "tree"])
    assert overall.loc["vanilla", "mat"].item() == overall.loc["hf", "speedup_hf"].item() == 1
    assert overall.loc[("recycling (hot)", "2.2.2"), "mat"] > 1
    for name in ("speedup_over_hf", "mat"):
        assert (folder / f"figures/{name}.svg").stat().st_size > 2000
    assert " on " in outcome.out.splitlines()[1], "the device stands above the table"


def test_a_later_turn_without_room_is_a_result_and_no_crash(evaluate, tmp_path):
    # the first prompt fits the context; the second, behind the first answer, does not
    outcome = evaluate("method=recycling", "bench.end=1", "model.context=110", "max_new_tokens=60")
    assert outcome.code == 0, outcome.err
    (row,) = answers_in(tmp_path)
    assert row["choices"][0]["stop"] == ["context", "context"]
    assert row["choices"][0]["new_tokens"][1] == 0


def test_choices_have_noise_of_their_own_which_methods_share(evaluate, tmp_path):
    few = ("num_choices=2", "bench.end=2", "sampling.temperature=1", "timed=false", "name=n")
    assert evaluate("-m", "method=vanilla,recycling", *few).code == 0
    ((first, second),) = texts_of(read_runs(tmp_path / "results/n"))
    assert first[0] != first[1] and second[0] != second[1]


def test_a_repetition_penalty_is_transformers_own(evaluate, tmp_path):
    sweep = ("-m", "method=hf,recycling", "bench.end=2", "max_new_tokens=24", "name=p")
    assert evaluate(*sweep, "sampling.repetition_penalty=1.3").code == 0
    runs = read_runs(tmp_path / "results/p")
    assert len(runs) == 2 and len(texts_of(runs)) == 1


def test_nodes_auto_finds_sizes_while_decoding_and_gives_the_same_text(evaluate, tmp_path):
    methods = "method=dynamic,pld,vanilla"
    few = ("method.nodes=auto:16", "bench.end=1", "max_new_tokens=24", "name=auto")
    outcome = evaluate("-m", methods, "start=hot", *few)
    assert outcome.code == 0, outcome.err
    runs = read_runs(tmp_path / "results/auto")
    by_label = {run.label: run for run in runs}
    assert by_label.keys() == {"vanilla", "pld", "dynamic (auto)"}
    sized = by_label["dynamic (auto)"]
    assert sized.settings["method"]["nodes"] == 16, "the budget, as in records of earlier versions"
    found = sized.summary["drafter"]
    assert found["sizes"][-1] == 16 and sum(found["steps_by_size"]) > 0
    assert len(texts_of(runs)) == 1


def test_inside_transformers_generate_a_method_accepts_the_same(evaluate, tmp_path):
    sweep = ("-m", "method=vanilla,recycling,pld", "start=hot", "interleave=true", "name=g")
    assert evaluate(*sweep, "execution=eager,custom_generate").code == 0
    runs = read_runs(tmp_path / "results/g")
    used = [run.execution for run in runs]
    assert used.count("eager") == used.count("custom_generate") == 3
    assert len(records(tmp_path / "results/g")) == 3, "by label, with the same steps"
    assert len(texts_of(runs)) == 1
