"""The audit of any engine's answers, which transformers' own generate gives here, on the shipped toy model."""

import json
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation import audit
from evaluation.loading.bench import chat_of, prompt_text
from evaluation.loading.engine_answers import force
from model.engine import Target
from model.engine.target import target
from model.files import ROOT
from tests.conftest import greedy, toy_model

QUESTIONS = ["Write a poem about Vienna.", "Who is Max?", "Translate: the vase is great."]
PATH = ROOT / "data/embedded"


def model_in(dtype):
    return AutoModelForCausalLM.from_pretrained(PATH, dtype=dtype).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(PATH)


@pytest.fixture(scope="module")
def rows(tokenizer):
    """Greedy answers, a line each: text and ids of prompt and answer; the last one is cut at 12 tokens."""
    model = model_in(torch.float32)
    rows = []
    for question, limit in zip(QUESTIONS, (200, 200, 12), strict=True):
        prompt = prompt_text("vicuna_v1.1", chat_of([question], []))
        before = tokenizer(prompt).input_ids
        ids = greedy(model, before, limit, [2])
        row = {"id": question, "prompt_token_ids": before, "token_ids": ids}
        row["finish_reason"] = "stop" if ids[-1] == 2 else "length"
        rows.append(row | {"max_tokens": limit})
    assert [row["finish_reason"] for row in rows] == ["stop", "stop", "length"]
    return rows


@pytest.fixture
def audited(call, tmp_path):
    def auditing(rows, *arguments, model="embedded"):
        file = tmp_path / "answers.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        file.write_text("\n".join(lines) + "\n")
        return call(audit.main, "--answers", file, "--model", model, *arguments)

    return auditing


def counts(outcome):
    """Of each line of the table: tokens, equal, near ties, wrong."""
    lines = outcome.out.split("\n\n")[1].splitlines()[1:]
    found = [re.match(r".*?  +(\d+) +(\d+) +(\d+) +(\d+)(?:  |$)", line) for line in lines]
    return [tuple(map(int, match.groups())) for match in found]


def only(row, *keys, **more):
    return {key: row[key] for key in ("id", "finish_reason", *keys)} | more


def test_right_answers(audited, rows):
    outcome = audited(rows)
    assert outcome.code == 0, outcome.err
    lengths = [len(row["token_ids"]) for row in rows]
    assert counts(outcome)[:2] == [(n, n, 0, 0) for n in lengths[:2]], "EOS counts"
    assert "Lossless in float32" in outcome.out


def test_a_token_that_was_changed(audited, rows, tokenizer):
    ids = list(rows[0]["token_ids"])
    ids[7] = tokenizer.convert_tokens_to_ids("<0x1B>")
    outcome = audited([rows[0] | {"token_ids": ids}, *rows[1:]])
    assert outcome.code == 1
    own = tokenizer.decode([rows[0]["token_ids"][7]])
    assert f'token 8 is "\\u001b", the model\'s "{own}" (gap ' in outcome.out
    wrong = [row[3] for row in counts(outcome)]
    assert wrong[0] >= 1 and wrong[1:] == [0, 0]
    assert f"Not lossless in float32: {wrong[0]} of " in outcome.out


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        ({}, 0, "ends early (no reason given)"),
        ({"max_tokens": 6}, 0, ""),
        ({"finish_reason": "stop"}, 1, "token 7 is the end, the model's"),
        ({"finish_reason": "stop", "stop_reason": "\n"}, 0, "ends early (a stop text, perhaps)"),
    ],
)
def test_a_truncated_answer_is_wrong_only_if_the_engine_says_that_it_ended(
    audited, rows, said, code, words
):
    ids = {"prompt_token_ids": rows[0]["prompt_token_ids"], "token_ids": rows[0]["token_ids"][:6]}
    outcome = audited([ids | said])
    assert outcome.code == code and words in outcome.out
    assert ("ends early" in outcome.out) is ("early" in words)
    assert counts(outcome) == [(6 + code, 6, 0, code)]


def test_an_answer_without_tokens_is_not_passed(audited, rows):
    nothing = rows[1] | {"token_ids": [], "finish_reason": "length"}
    outcome = audited([rows[0], nothing])
    assert outcome.code == 1 and "Not audited: 1 of 2 answers, which hold no token." in outcome.out
    assert counts(outcome)[1] == (0, 0, 0, 0)
    assert "Lossless" not in audited([nothing]).out


def test_of_several_eos_each_is_the_end(audited, rows, tmp_path):
    """A record of an EOS that a server hides has the tokenizer's, and the model's own is another."""
    folder = shutil.copytree(PATH, tmp_path / "two")
    *ids, other = rows[0]["token_ids"][:7]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, other]}))
    answers = ([*ids, 2], [*ids, other], ids, [*ids[:3], 2], [*ids, 2, 7, 7])
    lines = [only(rows[0], "prompt_token_ids", token_ids=said) for said in answers]
    outcome = audited(lines, model=folder)
    right = (7, 7, 0, 0)
    assert counts(outcome) == [right, right, right, (4, 3, 0, 1), right], outcome.out
    assert "token 4 is the end, the model's" in outcome.out
    assert "2 tokens behind EOS are left out" in outcome.out


@pytest.mark.slow
def test_answers_of_another_type(audited):
    """Made in bfloat16: in float32 some tokens are wrong by little, which is that type's own noise."""
    half = model_in(torch.bfloat16)
    lines = []
    for seed in range(14):  # processors differ in which tokens their bfloat16 changes
        random = torch.Generator().manual_seed(seed)
        prompt = torch.randint(5, 2048, (12,), generator=random).tolist()
        lines.append(
            {"prompt_token_ids": prompt, "token_ids": greedy(half, prompt, 40), "max_tokens": 40}
        )
    plain = audited(lines)
    declared = audited(lines, "--made-in=bfloat16")
    assert (plain.code, declared.code) == (1, 0)
    wrong = sum(row[3] for row in counts(plain))
    assert wrong == sum(row[2] for row in counts(declared)) >= 1, "the same, by another measure"
    changed = [line | {"token_ids": [7, *line["token_ids"][1:]]} for line in lines]
    assert audited(changed, "--made-in=bfloat16").code == 1, "noise excuses no other token"


def test_records_and_spec_benchs_own_format(audited, evaluate, tmp_path, checkpoint, bench_file):
    """Prompts are the bench's; texts alone get the space that the template has before an answer."""
    assert evaluate("method=pld", "name=a", "max_new_tokens=20").code == 0
    (file,) = (tmp_path / "results/a").rglob("answers.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]

    def judged(*bench):
        return audited(records, *bench, model=checkpoint)

    bench = ("--bench", bench_file)
    outcome = judged(*bench)
    assert outcome.code == 0, outcome.err
    lengths = [len(ids) for row in records for ids in row["choices"][0]["output_ids"]]
    assert [row[:2] for row in counts(outcome)] == [(n, n) for n in lengths]
    assert "name its bench: --bench" in judged().err
    choice = records[0]["choices"][0]
    choice["output_ids"][1][4] += 1
    assert re.search(r"10, turn 2 .*token 5 is", judged(*bench).out)
    for row in records:
        row["choices"][0].pop("output_ids")
    assert f"Of {len(lengths)} answers there is text alone" in judged(*bench).out
    records[0]["question_sha256"] = "0" * 16
    assert "question 10 has another text" in judged(*bench).err


IDS = {"prompt_token_ids": [7], "token_ids": [7]}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON, cut short?"),
        ({"prompt": "x", "text": "x"}, "prompt_token_ids: must be a list of int"),
        ({"prompt_token_ids": [7], "token_ids": [1, "2"]}, "token_ids: must be a list of int"),
        ({"choices": [{"text": "x"}]}, "prompt_token_ids: must be a list of int"),
        ({**IDS, "temperature": 0.7}, "an audit is of greedy answers"),
        ({**IDS, "token_ids": [2048]}, "ids are outside the vocabulary of 2048"),
        ({**IDS, "token_ids": [7] * 3, "max_tokens": 2}, "3 tokens, and max_tokens is 2"),
        (
            {"prompt_token_ids": [7] * 4000, "token_ids": [7] * 97},
            "4097 tokens, and the context has 4096",
        ),
    ],
)
def test_a_line_that_cannot_be_audited_is_one_line(audited, rows, line, words):
    outcome = audited([rows[0], line])
    assert outcome.code == 2 and not outcome.out
    (printed,) = outcome.err.strip().splitlines()
    assert "answers.jsonl:2: " in printed and words in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "name an experiment's folder, or --answers FILE and --model NAME"),
        ("--answers none.jsonl --model=embedded", "none.jsonl does not exist"),
        ("--answers x --model=embedded method=pld", "method=pld: only model=NAME"),
        ("--answers /dev/null --model=embedded", "holds no answer"),
    ],
)
def test_mistakes_on_the_command_line(call, arguments, words):
    outcome = call(audit.main, *arguments.split())
    assert outcome.code == 2 and words in outcome.err and outcome.err.count("\n") == 1


@pytest.mark.parametrize("by_steps", [False, True])
def test_logits_come_in_parts_and_as_a_plain_forward_gives_them(monkeypatch, by_steps):
    model = toy_model("llama-grouped")
    random = torch.Generator().manual_seed(0)
    text = torch.randint(3, 61, (33,), generator=random)
    with torch.no_grad():
        logits = model(text[None]).logits[0, 2:]
    best = logits.topk(2).values
    last = logits[-1:, 2]  # of EOS
    said = torch.cat([logits[:-1].gather(1, text[3:, None])[:, 0], last])
    for size in (1 << 20, 4 * 61 * 7):
        monkeypatch.setattr(target, "LOGITS_BYTES", size)
        ids = text.tolist()
        forced = force(Target(model), ids[:3], ids[3:], [2], by_steps=by_steps)
        assert forced.choices == logits.argmax(-1).tolist()
        assert forced.gaps == pytest.approx((best[:, 0] - said).tolist(), abs=1e-4)
        assert forced.margins == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-4)
