"""Runs end to end on a toy checkpoint of Vicuna's layout: every method, resume, sweeps, the quickstart."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from evaluation.answerers import Answerer
from evaluation.records.questions import Question
from evaluation.records.runs import read_runs
from evaluation.running.answering import sampling_of
from evaluation.running.scheduling import recorded_threads
from evaluation.statistics.agreement import audits
from evaluation.statistics.pools import pools
from model.engine.linear import packable
from model.tuning import Load
from tests.evaluation.conftest import CATEGORIES, answers_in

ROOT = Path(__file__).resolve().parents[3]


def core(rows):
    """What must repeat: everything but times and random ids."""
    keys = ("turns", "new_tokens", "accept_lengths", "output_ids", "step_paths", "stop")
    return [(r["question_id"], [{k: c[k] for k in keys} for c in r["choices"]]) for r in rows]


def test_an_experiment_keeps_its_threads_whatever_else_is_at_work_later(
    evaluate, tmp_path, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(Load, "threads", lambda load: free)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        free = 2
        assert evaluate("method=vanilla", "name=one").code == 0
        (folder,) = (tmp_path / "results/one/runs").iterdir()
        lines = (folder / "answers.jsonl").read_text().splitlines(keepends=True)
        (folder / "answers.jsonl").write_text("".join(lines[:3]))
        (folder / "summary.json").unlink()
        free = 1
        outcome = evaluate("method=vanilla", "name=one")
        assert outcome.code == 0, outcome.err
        assert len(answers_in(tmp_path / "results/one")) == 7
        assert evaluate("method=pld", "name=one").code == 0
        assert {run.metadata["threads"] for run in read_runs(tmp_path / "results/one")} == {2}
        outcome = evaluate("method=vanilla", "name=another")
        assert "threads: 1, as 1 of" in outcome.err and torch.get_num_threads() == 2, (
            "given back to the caller"
        )
        (run,) = read_runs(tmp_path / "results/another")
        assert run.metadata["threads"] == 1 and "cores were free" in run.metadata["threads_why"]
        for summary in folder.parent.glob("*/summary.json"):
            summary.unlink()
        shutil.copytree(run.folder, folder.with_name("finished"))
        assert (
            recorded_threads({"run_dir": None, "results_dir": tmp_path / "results", "name": "one"})
            == 2
        )
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        assert "other circumstances: device is" in evaluate("method=vanilla", "name=one").err
    finally:
        torch.set_num_threads(before)


def test_every_method_gives_the_same_text_and_the_tables_add_up(evaluate, drawn, tmp_path):
    outcome = evaluate(
        "-m", "method=hf,vanilla,pld,recycling", "start=cold,hot", "tree=2.2.2,best", "name=all"
    )
    assert outcome.code == 0, outcome.err
    runs = read_runs(tmp_path / "results/all")
    assert len(runs) == 7  # stateless methods ran once each, not once a start and tree
    for run in runs:
        assert [row["category"] for row in run.answers] == CATEGORIES
        assert {
            "command",
            "device",
            "versions",
            "git",
            "config",
            "template_sha256",
        } <= run.metadata.keys()
        now = run.metadata["circumstances"]
        assert now.keys() == {
            "device",
            "platform",
            "threads",
            "versions",
            "linear",
            "sources_sha256",
        }
        packed = packable(torch.device("cpu"), torch.float32)
        assert (
            now["linear"] == ("onednn" if packed else "torch") and len(now["sources_sha256"]) == 64
        )
        assert (run.folder / "state.safetensors").exists() == (run.label == "recycling (hot)")
        for row in run.answers:
            (choice,) = row["choices"]
            assert len(choice["turns"]) == (2 if row["question_id"] == 10 else 1)
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
            assert [len(ids) for ids in choice["output_ids"]] == choice["new_tokens"]
            assert all(seconds > 0 for seconds in choice["wall_time"])
            assert run.label not in ("hf", "vanilla") or set(choice["accept_lengths"]) == {1}
            if run.label == "hf":
                assert choice["step_us"] is None
                continue
            for us, steps, *seconds in zip(
                *(choice[k] for k in ("step_us", "decoding_steps", "prefill_time", "decode_time")),
                strict=True,
            ):
                assert len(us) == steps and us[0] == round(1e6 * seconds[0]) and min(us) > 0
                assert sum(us) <= 1e6 * sum(seconds) + 1, (
                    "decoding ends with the device's last work"
                )
        acceptance = run.folder / "acceptance.jsonl"
        assert acceptance.exists() == (run.label != "hf")
        if run.label.startswith("recycling"):
            counts = [
                json.loads(line)["metrics"]["speculative_decoding"] for line in acceptance.open()
            ]
            paths = [turn for row in run.answers for turn in row["choices"][0]["step_paths"]]
            most = {len(c["acceptance_histogram"]) - 1 for c in counts}
            assert len(counts) == 8 and most == {run.settings["method"]["tree_nodes"]}
            assert [c["num_accepted_draft_tokens"] for c in counts] == [
                sum(map(len, turn)) for turn in paths
            ]
    texts = [
        [choice["output_ids"] for row in run.answers for choice in row["choices"]] for run in runs
    ]
    assert all(text == texts[0] for text in texts)
    table = pd.read_csv(tmp_path / "results/all/tables/main.csv")
    wanted = (
        "model bench method category questions steps new_tokens mat mat_macro tokens_per_second"
    )
    assert {*wanted.split(), "speedup_hf", "speedup_vanilla"} <= set(table.columns)
    assert set(table["category"]) == {
        "mt_bench",
        "translation",
        "qa",
        "rag",
        "code",
        "poetry",
        "overall",
    }
    overall = table[table["category"] == "overall"].set_index(["method", "tree"])
    assert (
        overall.loc["vanilla", "mat"].item() == 1.0
        and overall.loc["hf", "speedup_hf"].item() == 1.0
    )
    assert overall.loc[("recycling (hot)", "2.2.2"), "mat"] > 1.0
    assert (
        overall["time_to_first_token_ms_p50"]
        .notna()
        .equals(overall["inter_token_latency_ms_p50"].notna())
    )
    assert overall["inter_token_latency_ms_p99"].isna().tolist() == [
        name == "hf" for name, _ in overall.index
    ]
    for name in (
        "speedup_over_hf",
        "speedup_over_vanilla",
        "mat",
        "accepted_lengths",
        "mat_over_questions",
    ):
        assert (tmp_path / f"results/all/figures/{name}.svg").stat().st_size > 2000
    assert "speedup_vanilla" in outcome.out and " on " in outcome.out.splitlines()[1], (
        "the device stands above the table"
    )


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_equals_uninterrupted(checkpoint, tmp_path):
    """kill -9 from outside, hot start, real processes on the sample bench; the answers must equal a calm run's."""
    command = [
        sys.executable,
        "-m",
        "evaluation.run",
        "model=path",
        f"model.path={checkpoint}",
        "start=hot",
    ]
    command += [
        "bench.per_category=2",
        "model.context=512",
        "max_new_tokens=40",
        "bench.categories=[mt_bench,qa,code]",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def start(folder):
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [*command, f"run_dir={folder}"], cwd=ROOT, env=environment, **streams
        )

    calm = start(tmp_path / "calm")
    assert calm.wait(120) == 0, calm.stderr.read()
    answers, rng, kills = tmp_path / "killed" / "answers.jsonl", random.Random(0), 0
    for target in (1, 3, 4):  # kill it some moment after so many answers are there
        process = start(tmp_path / "killed")
        while process.poll() is None:
            if answers.exists() and answers.read_bytes().count(b"\n") >= target:
                time.sleep(rng.random() * 0.05)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.002)
        process.wait(60)
    last = start(tmp_path / "killed")
    assert last.wait(120) == 0, last.stderr.read()
    assert kills >= 1
    assert core(answers_in(tmp_path / "killed")) == core(answers_in(tmp_path / "calm"))


def test_num_choices_answers_each_question_so_often(evaluate, tmp_path):
    assert evaluate("method=vanilla", "num_choices=2", "bench.end=2").code == 0
    for row in answers_in(tmp_path):
        assert [c["index"] for c in row["choices"]] == [0, 1]
        assert row["choices"][0]["output_ids"] == row["choices"][1]["output_ids"]


def test_a_later_turn_without_room_is_a_result_and_no_crash(evaluate, tmp_path):
    # the first prompt fits the context; the second, behind the first answer, does not
    outcome = evaluate("method=recycling", "bench.end=1", "model.context=110", "max_new_tokens=60")
    assert outcome.code == 0, outcome.err
    (row,) = answers_in(tmp_path)
    assert row["choices"][0]["stop"] == ["context", "context"]
    assert row["choices"][0]["new_tokens"][1] == 0


def test_a_repetition_penalty_is_transformers_own(evaluate, tmp_path):
    sweep = ("-m", "method=hf,vanilla,recycling", "bench.end=2", "max_new_tokens=40", "name=p")
    assert evaluate(*sweep, "sampling.repetition_penalty=1.3").code == 0
    texts = [
        [json.loads(line)["choices"][0]["output_ids"] for line in path.open()]
        for path in (tmp_path / "results/p/runs").glob("*/answers.jsonl")
    ]
    assert len(texts) == 3 and texts[0] == texts[1] == texts[2]


def test_tree_auto_finds_sizes_while_decoding_and_gives_the_same_text(evaluate, tmp_path):
    methods = "method=recycling,dynamic,suffix_recycling,pld,vanilla"
    few = ("tree.nodes=16", "bench.end=1", "max_new_tokens=24")
    outcome = evaluate("-m", methods, "tree=auto", "start=hot", "name=auto", *few)
    assert outcome.code == 0, outcome.err
    table = pd.read_csv(tmp_path / "results/auto/tables/main.csv")
    sized = ("recycling", "dynamic", "suffix_recycling")
    assert set(table["method"]) == {"vanilla", "pld", *(f"{name} (auto)" for name in sized)}
    summaries = [
        json.loads(path.read_text())
        for path in (tmp_path / "results/auto/runs").glob("*/summary.json")
    ]
    sizes = [summary["drafter"] for summary in summaries if "sizes" in summary.get("drafter", {})]
    assert len(sizes) == 3 and all(
        chosen["sizes"][-1] == 16 and sum(chosen["steps_by_size"]) > 0 for chosen in sizes
    )
    texts = {
        json.dumps([c["output_ids"] for line in p.open() for c in json.loads(line)["choices"]])
        for p in tmp_path.rglob("answers.jsonl")
    }
    assert len(texts) == 1
    assert (
        Answerer(None, None, {"name": "x", "tree": "auto"}, "eager", "cold").label
        == "x (auto, cold)"
    )


def test_inside_transformers_generate_a_method_accepts_the_same(evaluate, tmp_path):
    sweep = (
        "-m",
        "method=vanilla,recycling,pld",
        "start=hot,cold",
        "interleave=true",
        "max_new_tokens=24",
        "name=g",
    )
    assert evaluate(*sweep, "execution=eager,custom_generate").code == 0
    runs = {(run.label, run.execution): run for run in read_runs(tmp_path / "results/g")}
    labels = {label for label, _ in runs}
    assert len(labels) == 4 and len(runs) == 8
    for label in labels:
        assert core(runs[label, "custom_generate"].answers) == core(runs[label, "eager"].answers), (
            label
        )
    del runs["vanilla", "custom_generate"]
    pooled = pools(list(runs.values()))
    inside = [pool for pool in pooled if pool.first.execution == "custom_generate"]
    audited = audits(inside)
    assert len(audited) == len(inside) == 3 and all(len(audit.turns) == 8 for audit in audited)
    assert all(audit.base.first.execution == "eager" for audit in audited), (
        "the execution of their steps"
    )


def test_the_noise_of_an_answer_is_its_questions_and_its_choices_own():
    config, one, other = (
        {"seed": 1, "sampling": {}},
        Question(1, "qa", ("a",)),
        Question(2, "qa", ("a",)),
    )
    seeds = [
        sampling_of(config, question, index).seed for question in (one, other) for index in (0, 1)
    ]
    assert len(set(seeds)) == 4 and sampling_of(config, one, 1).seed == seeds[1]
