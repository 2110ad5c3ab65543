"""The command line that Spec-Bench's users know: inference_recycling."""

import json

import pytest

from evaluation import inference_recycling


@pytest.fixture
def infer(call, checkpoint, bench_file, tmp_path):
    def inferring(*arguments):
        base = ["--model-path", checkpoint, "--model-id", "toy", "--question-file", bench_file, "--bench-name", "toy"]
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
    flags = ["--question-begin", "2", "--question-end", "4", "--num-choices", "2", "--output-id-topk", "3"]
    flags += ["--tree_version", tmp_path / "tree.yaml", "--start", "cold", "--temperature", "0", "--dtype", "bfloat16"]
    outcome = infer(*flags)
    assert outcome.code == 0, outcome.err
    settings = json.loads((tmp_path / "out.jsonl.run/metadata.json").read_text())["settings"]
    assert settings["model"]["dtype"] == "bfloat16" and settings["bench"]["questions"] == 2
    assert (
        settings["method"]["k"] == 3 and settings["method"]["tree_nodes"] == 3 and settings["method"]["start"] == "cold"
    )
    assert settings["num_choices"] == 2 and settings["max_new_tokens"] == 16
