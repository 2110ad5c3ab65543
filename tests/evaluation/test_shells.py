"""The command line that Spec-Bench's users know: inference_recycling."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from evaluation import inference_recycling, run
from model.files import ROOT
from tests.model.methods.public_traces import TRACE


@pytest.fixture
def infer(call, checkpoint, bench_file, tmp_path):
    def inferring(*arguments):
        base = [
            "--model-path",
            checkpoint,
            "--model-id",
            "toy",
            "--question-file",
            bench_file,
            "--bench-name",
            "toy",
        ]
        base += ["--max-new-tokens", "16", "--answer-file", tmp_path / "out.jsonl"]
        return call(inference_recycling.main, *base, *arguments)

    return inferring


def test_inference_resumes_and_refuses_other_settings(infer, tmp_path):
    assert infer("--question-end", 3).code == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [r["question_id"] for r in rows] == [10, 11, 12]
    keys = {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
    assert keys <= rows[0].keys() and rows[0]["model_id"].startswith("toy")
    choice_keys = {"index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"}
    assert choice_keys <= rows[0]["choices"][0].keys()
    before = (tmp_path / "out.jsonl").read_bytes()
    assert infer("--question-end", 3).code == 0
    refused = infer("--question-end", 3, "--output-id-topk", 9)
    assert refused.code != 0 and "method.k is 8 there and 9 now" in refused.err
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_every_flag_arrives(infer, tmp_path):
    (tmp_path / "tree.yaml").write_text("[[0], [1], [0, 2]]")
    flags = [
        "--question-begin",
        "2",
        "--question-end",
        "4",
        "--num-choices",
        "2",
        "--output-id-topk",
        "3",
    ]
    flags += [
        "--tree_version",
        tmp_path / "tree.yaml",
        "--start",
        "cold",
        "--temperature",
        "0",
        "--dtype",
        "bfloat16",
    ]
    outcome = infer(*flags)
    assert outcome.code == 0, outcome.err
    settings = json.loads((tmp_path / "out.jsonl.run/metadata.json").read_text())["settings"]
    assert settings["model"]["dtype"] == "bfloat16" and settings["bench"]["questions"] == 2
    assert (
        settings["method"]["k"] == 3
        and settings["method"]["tree_nodes"] == 3
        and settings["method"]["start"] == "cold"
    )
    assert settings["num_choices"] == 2 and settings["max_new_tokens"] == 16


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    """The shipped model as a Vicuna's files are, without a chat template, under another name; the trace's questions."""
    folder = tmp_path_factory.mktemp("official")
    model = Path(shutil.copytree(ROOT / "data/embedded", folder / "checkpoint-final"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    rows = [
        json.loads(line) for line in (ROOT / "data/sample/question.jsonl").read_text().splitlines()
    ]
    # the trace has first turns alone
    asked = [json.dumps(row | {"turns": row["turns"][:1]}) for row in rows[:6]]
    (folder / "question.jsonl").write_text("\n".join(asked))
    return folder


@pytest.fixture
def official_command(call, official, tmp_path):
    def asking(*flags):
        base = [
            "--model-path",
            official / "checkpoint-final",
            "--question-file",
            official / "question.jsonl",
        ]
        base += ["--max-new-tokens", "200", "--answer-file", tmp_path / "answers.jsonl"]
        outcome = call(inference_recycling.main, *base, *flags)
        assert outcome.code == 0, outcome.err
        rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
        return outcome, {row["question_id"]: row["choices"][0] for row in rows}

    return asking


@pytest.mark.parametrize("start", ["cold", "hot"])
def test_a_vicuna_of_any_name_gives_the_official_trace(official_command, start):
    outcome, found = official_command(*(["--start", start] if start == "cold" else []))
    assert "template vicuna_v1.1" in outcome.out and len(found) == 6
    for turn in [turn for turn in TRACE if turn["start"] == start][: len(found)]:
        choice, official = found[turn["question_id"]], turn["output_ids"]
        assert choice["prompt_tokens"] == [len(turn["prompt_ids"])]
        assert choice["output_ids"][0][: len(official)] == official[: choice["new_tokens"][0]]
        assert choice["accept_lengths"][:-1] == turn["accept_lengths"][:-1], turn["question_id"]


def test_another_template_is_taken_if_it_is_named(official_command, official):
    outcome, found = official_command("--template", "raw", "--question-end", "1")
    tokenizer = AutoTokenizer.from_pretrained(official / "checkpoint-final")
    (question,) = json.loads((official / "question.jsonl").read_text().splitlines()[0])["turns"]
    assert "template raw" in outcome.out and found[1]["prompt_tokens"] == [
        len(tokenizer(question).input_ids)
    ]


@pytest.mark.parametrize(
    ("template", "why"), [("chat", "no chat template"), ("vicuna_v9", "no such conversation")]
)
def test_a_template_that_the_model_or_fschat_lacks_is_refused(infer, template, why):
    refused = infer("--template", template)
    assert refused.code == 2 and f"model.template={template}" in refused.err and why in refused.err


def test_run_says_how_to_take_vicunas_template(call, official, tmp_path):
    settings = [
        "model=path",
        f"model.path={official / 'checkpoint-final'}",
        "bench=file",
        "max_new_tokens=4",
    ]
    settings += [
        f"bench.path={official / 'question.jsonl'}",
        "bench.end=1",
        f"results_dir={tmp_path / 'results'}",
    ]
    outcome = call(run.main, *settings)
    assert outcome.code == 0, outcome.err
    (said,) = [line for line in outcome.err.splitlines() if "has no chat template" in line]
    assert "model.template=vicuna_v1.1" in said
