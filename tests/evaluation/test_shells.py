"""The command lines that Spec-Bench's users know: inference_recycling, speed, equal; and the step bench."""

import json

import pytest
from transformers import AutoTokenizer

from evaluation import equal, inference_recycling, speed
from tests.evaluation.made_runs import answer
from tests.evaluation.statistics.test_metrics import ROWS


def write(path, rows, tail=""):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
    return path


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
            "--max-new-tokens",
            "16",
        ]
        base += ["--answer-file", tmp_path / "out.jsonl", "--bench-name", "toy"]
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
        2,
        "--question-end",
        4,
        "--num-choices",
        2,
        "--dtype",
        "bfloat16",
        "--output-id-topk",
        3,
    ]
    outcome = infer(*flags, "--tree_version", tmp_path / "tree.yaml", "--start", "cold", "--temperature", "0")
    assert outcome.code == 0, outcome.err
    settings = json.loads((tmp_path / "out.jsonl.run/metadata.json").read_text())["settings"]
    assert settings["model"]["dtype"] == "bfloat16" and settings["bench"]["questions"] == 2
    assert (
        settings["method"]["k"] == 3 and settings["method"]["tree_nodes"] == 3 and settings["method"]["start"] == "cold"
    )
    assert settings["num_choices"] == 2 and settings["max_new_tokens"] == 16


def test_speed_prints_spec_benchs_four_lines_over_what_both_have(call, tmp_path):
    # question 1 at 1 token/s in the baseline, question 2 missing there, question 3 missing here; one torn line
    base = write(
        tmp_path / "base.jsonl", [answer(1, "writing", [([1] * 4, 4.0)]), answer(3, "qa", [([1], 1.0)])], tail="{torn"
    )
    method = write(tmp_path / "method.jsonl", [*ROWS, ROWS[0]])
    outcome = call(speed.main, "--file-path", method, "--base-path", base)
    assert outcome.code == 0
    assert "base.jsonl: 1 broken line(s): 3" in outcome.out
    assert "method.jsonl: 1 question id(s) repeated, the later one counts: 1" in outcome.out
    assert (
        "base.jsonl: 1 question(s) missing: 2" in outcome.out
        and "method.jsonl: 1 question(s) missing: 3" in outcome.out
    )
    blocks = outcome.out.split("Task: ")[1:]
    assert [b.split()[0] for b in blocks] == ["mt_bench", "overall"]
    for block in blocks:
        assert "#Mean accepted tokens:  2.0\n" in block
        assert "Tokens per second:  2.0\n" in block
        assert "Tokens per second for the baseline:  1.0\n" in block
        assert "Speedup ratio:  2.0\n" in block


def test_speed_retokenizes_the_baseline_on_request(call, checkpoint, tmp_path):
    base_row = answer(1, "writing", [([1] * 4, 2.0)])
    base_row["choices"][0]["turns"] = ["the answer is one."]
    base, method = write(tmp_path / "base.jsonl", [base_row]), write(tmp_path / "method.jsonl", ROWS[:1])
    files = ["--file-path", method, "--base-path", base]
    tokens = len(AutoTokenizer.from_pretrained(checkpoint)("the answer is one.").input_ids) - 1
    outcome = call(speed.main, *files, "--retokenize", "--tokenizer-path", checkpoint)
    assert f"Tokens per second for the baseline:  {tokens / 2.0}\n" in outcome.out
    outcome = call(speed.main, *files, "--tokenizer-path", checkpoint)
    assert "Tokens per second for the baseline:  2.0\n" in outcome.out and "read with --retokenize only" in outcome.out
    assert "needs --tokenizer-path" in call(speed.main, *files, "--retokenize").err


def test_equal_files_are_equal(call, tmp_path):
    write(tmp_path / "a.jsonl", ROWS)
    write(tmp_path / "b.jsonl", reversed(ROWS))
    outcome = call(equal.main, "--file-path", tmp_path, "--jsonfile1", "a.jsonl", "--jsonfile2", "b.jsonl")
    assert outcome.code == 0 and outcome.out.splitlines()[-1] == "equal"


def changed(rows, **choice):
    rows = json.loads(json.dumps(rows))
    rows[1]["choices"][0] |= choice
    return rows


@pytest.mark.parametrize(
    ("rows", "tail", "says"),
    [
        (ROWS[:1], "", "b.jsonl: 1 question(s) missing: 2"),
        (ROWS, '{"question_id": 3, "ch', "1 broken line(s): 3"),
        (changed(ROWS, turns=["texts"]), "", "question 2 differs: choice 0, turn 0: character 4"),
        (changed(ROWS, output_ids=[[1, 2, 4]]), "", "question 2 differs: choice 0, turn 0: token 2"),
        (changed(ROWS, turns=["text", "more"], new_tokens=[6, 1], wall_time=[0.5, 1.0]), "", "1 turns against 2"),
        ([], "", "0 of 0 common"),
    ],
)
def test_what_differs_or_is_cut_short_is_never_equal(call, tmp_path, rows, tail, says):
    write(tmp_path / "a.jsonl", changed(ROWS, output_ids=[[1, 2, 3]]))
    write(tmp_path / "b.jsonl", rows, tail)
    outcome = call(equal.main, "--file-path", tmp_path, "--jsonfile1", "a.jsonl", "--jsonfile2", "b.jsonl")
    assert outcome.code == 1 and says in outcome.out and outcome.out.splitlines()[-1] == "NOT equal"


def test_questions_of_one_id_and_other_text_are_not_compared(call, tmp_path):
    """Two files of the same ids had been taken for the same questions."""
    asked = [[row | {"question_sha256": digest} for row, digest in zip(ROWS, own, strict=True)] for own in ("aa", "ab")]
    a, b = (write(tmp_path / f"{name}.jsonl", rows) for name, rows in zip("ab", asked, strict=True))
    outcome = call(equal.main, "--jsonfile1", a, "--jsonfile2", b)
    assert outcome.code == 1 and "1 question(s) of the same id are others: 2" in outcome.out
    assert "1 of 1 common questions are identical" in outcome.out
    outcome = call(speed.main, "--file-path", a, "--base-path", b)
    assert outcome.code == 0 and outcome.out.count("Task: ") == 2, "question 1's subtask and overall"
    other = write(tmp_path / "c.jsonl", [row | {"question_sha256": "c"} for row in ROWS])
    assert "no question in common" in call(speed.main, "--file-path", a, "--base-path", other).err
