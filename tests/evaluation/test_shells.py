"""The command line that Spec-Bench's users know: inference_recycling."""

import json
import shutil
from pathlib import Path

import pytest

from evaluation import inference_recycling
from model.files import ROOT
from tests.model.methods.public_traces import TRACE


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def infer(call, checkpoint, bench_file, tmp_path):
    def inferring(*arguments):
        base = ["--model-path", checkpoint, "--model-id", "toy", "--question-file", bench_file]
        base += ["--bench-name", "toy", "--max-new-tokens", "16"]
        base += ["--answer-file", tmp_path / "out.jsonl"]
        return call(inference_recycling.main, *base, *arguments)

    return inferring


def test_inference_resumes_and_refuses_other_settings(infer, tmp_path):
    assert infer("--question-end", 3).code == 0
    rows = rows_of(tmp_path / "out.jsonl")
    assert [row["question_id"] for row in rows] == [10, 11, 12]
    assert {"category", "answer_id", "model_id", "choices", "tstamp"} <= rows[0].keys()
    choice_keys = {"index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"}
    assert choice_keys <= rows[0]["choices"][0].keys()
    assert infer("--question-end", 3).code == 0
    refused = infer("--question-end", 3, "--output-id-topk", 9)
    assert refused.code != 0 and "method.k is 8 there and 9 now" in refused.err
    assert rows_of(tmp_path / "out.jsonl") == rows


def test_every_flag_arrives(infer, tmp_path):
    (tmp_path / "tree.yaml").write_text("[[0], [1], [0, 2]]")
    flags = "--question-begin 2 --question-end 4 --num-choices 2 --output-id-topk 3 --start cold"
    flags += f" --tree_version {tmp_path / 'tree.yaml'} --temperature 0 --dtype bfloat16"
    outcome = infer(*flags.split())
    assert outcome.code == 0, outcome.err
    settings = json.loads((tmp_path / "out.jsonl.run/metadata.json").read_text())["settings"]
    method = settings["method"]
    assert settings["model"]["dtype"] == "bfloat16" and settings["bench"]["questions"] == 2
    assert (method["k"], method["tree_nodes"], method["start"]) == (3, 3, "cold")
    assert settings["num_choices"] == 2 and settings["max_new_tokens"] == 16


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    """The shipped model as a Vicuna's files are, without a chat template; the trace's questions."""
    folder = tmp_path_factory.mktemp("official")
    model = Path(shutil.copytree(ROOT / "data/embedded", folder / "checkpoint-final"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    rows = rows_of(ROOT / "data/sample/question.jsonl")[:3]
    # the trace has first turns alone
    asked = [json.dumps(row | {"turns": row["turns"][:1]}) for row in rows]
    (folder / "question.jsonl").write_text("\n".join(asked))
    return folder


@pytest.fixture
def official_command(call, official, tmp_path):
    def asking(*flags):
        base = ["--model-path", official / "checkpoint-final", "--max-new-tokens", "200"]
        base += ["--question-file", official / "question.jsonl"]
        base += ["--answer-file", tmp_path / "answers.jsonl"]
        outcome = call(inference_recycling.main, *base, *flags)
        assert outcome.code == 0, outcome.err
        rows = rows_of(tmp_path / "answers.jsonl")
        return outcome, {row["question_id"]: row["choices"][0] for row in rows}

    return asking


@pytest.mark.parametrize("start", ["cold", "hot"])
def test_a_vicuna_of_any_name_gives_the_official_trace(official_command, start):
    outcome, found = official_command(*(["--start", start] if start == "cold" else []))
    assert "template vicuna_v1.1" in outcome.out and len(found) == 3
    for turn in [turn for turn in TRACE if turn["start"] == start][: len(found)]:
        choice = found[turn["question_id"]]
        official = turn["output_ids"]
        assert choice["prompt_tokens"] == [len(turn["prompt_ids"])]
        assert choice["output_ids"][0][: len(official)] == official[: choice["new_tokens"][0]]
        assert choice["accept_lengths"][:-1] == turn["accept_lengths"][:-1], turn["question_id"]
