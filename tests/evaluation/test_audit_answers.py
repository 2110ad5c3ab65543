"""The audit of any engine's answers, which transformers' own generate gives here, on the shipped toy model."""

import json
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation import audit
from evaluation.loading.bench import chat_of, prompt_text
from evaluation.loading.engine_answers import force, tokenised
from evaluation.loading.models import load_model
from evaluation.loading.settings import ModelSettings
from evaluation.running import scheduling
from model import cli
from model.engine import Target, target
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
    model, rows = model_in(torch.float32), []
    for question, limit in zip(QUESTIONS, (200, 200, 12), strict=True):
        prompt = prompt_text("vicuna_v1.1", tokenizer, chat_of([question], []))
        before = tokenizer(prompt).input_ids
        ids = greedy(model, before, limit, [2])
        finish = "stop" if ids[-1] == 2 else "length"
        text = tokenizer.decode(ids, skip_special_tokens=True)
        more = {
            "prompt_token_ids": before,
            "token_ids": ids,
            "max_tokens": limit,
            "finish_reason": finish,
        }
        rows.append({"id": question, "prompt": prompt, "text": text, **more})
    assert [row["finish_reason"] for row in rows] == ["stop", "stop", "length"]
    return rows


@pytest.fixture
def audited(call, tmp_path):
    def auditing(rows, *arguments, model="embedded"):
        file = tmp_path / "answers.jsonl"
        file.write_text(
            "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
        )
        return call(audit.main, "--answers", file, "--model", model, *arguments)

    return auditing


def counts(outcome):
    """Of each line of the table: tokens, equal, near ties, wrong."""
    table = outcome.out.split("\n\n")[1].splitlines()[1:]
    return [
        tuple(map(int, re.match(r".*?  +(\d+)" + r" +(\d+)" * 3 + r"(?:  |$)", line).groups()))
        for line in table
    ]


def only(row, *keys, **more):
    return {key: row[key] for key in ("id", "finish_reason", *keys)} | more


def test_right_answers_in_every_form(audited, rows):
    """Ids win over text; text alone is tokenised again; messages get the template, a prompt its BOS, ids nothing."""
    wrong = {"prompt": "another", "text": "another"}
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for forms in (
        [row | wrong for row in rows],
        [only(row, "prompt", "token_ids") for row in rows],
        [only(row, "token_ids", prompt=row["prompt_token_ids"]) for row in rows],
        [only(row, "token_ids", prompt=f"<s>{row['prompt']}") for row in rows],
        [only(row, "token_ids", messages=chat) for row, chat in zip(rows, chats, strict=True)],
        [
            only(row, prompt=row["prompt"], choices=[{"token_ids": row["token_ids"]}])
            for row in rows
        ],
    ):
        outcome = audited(forms)
        assert outcome.code == 0, outcome.err
        assert counts(outcome) == [
            (len(row["token_ids"]), len(row["token_ids"]), 0, 0) for row in rows
        ]
        assert "Lossless in float32" in outcome.out and "text alone" not in outcome.out
    for forms in (
        [only(row, "prompt", "text") for row in rows],
        [
            only(row, messages=m, choices=[{"message": {"content": row["text"]}}])
            for row, m in zip(rows, chats, strict=True)
        ],
    ):
        outcome = audited(forms)
        assert outcome.code == 0 and "Of 3 answers there is text alone" in outcome.out
        assert counts(outcome)[0] == (len(rows[0]["token_ids"]),) * 2 + (0, 0), (
            "EOS, which is not in the text, counts"
        )


@pytest.mark.parametrize("more", [[], ["--raw"]])
def test_output_of_the_command_line(audited, capsys, more):
    """With the template, which makes messages of the prompt, and without."""
    cli.main(
        [
            "generate",
            str(PATH),
            "--prompt",
            QUESTIONS[0],
            "--max-new-tokens",
            "20",
            "--jsonl",
            *more,
        ]
    )
    (line,) = capsys.readouterr().out.splitlines()
    outcome = audited([line])
    assert outcome.code == 0 and counts(outcome) == [
        (len(json.loads(line)["ids"]),) * 2 + (0, 0)
    ], outcome.out
    assert "text alone" not in outcome.out and "ends early" not in outcome.out


def test_bos_is_added_once_and_an_answer_may_fill_the_context():
    loaded = load_model(ModelSettings("embedded", "data/embedded"))
    once, again = (
        {"id": 1, "prompt": prompt, "token_ids": [7]} for prompt in ("hello", "<s>hello")
    )
    first, second = (tokenised("a:1", row, loaded).prompt for row in (once, again))
    assert first == second and first.count(1) == 1
    full = {"id": 1, "prompt_token_ids": [7] * 4000, "token_ids": [7] * 96}
    assert len(tokenised("a:1", full, loaded).ids) == 96


def test_a_token_that_was_changed(audited, rows, tokenizer):
    """And the gap is that of a plain forward."""
    ids = list(rows[0]["token_ids"])
    ids[7] = tokenizer.convert_tokens_to_ids("<0x1B>")
    outcome = audited([rows[0] | {"token_ids": ids}, *rows[1:]])
    assert outcome.code == 1
    with torch.no_grad():
        logits = model_in(torch.float32)(
            torch.tensor([rows[0]["prompt_token_ids"] + ids[:7]])
        ).logits[0, -1]
    said = re.search(r'token 8 is "(.*?)", the model\'s "(.*?)" \(gap ([\d.]+)\)', outcome.out)
    assert said[1] == r"\u001b" and said[2] == tokenizer.decode([rows[0]["token_ids"][7]])
    assert float(said[3]) == pytest.approx(float(logits.max() - logits[ids[7]]), rel=1e-2)
    (first, *others), whole = counts(outcome), [len(row["token_ids"]) for row in rows]
    assert first[0] == whole[0] and first[3] >= 1 and all(row[3] == 0 for row in others)
    assert (
        f"{first[3]} of {sum(whole)} tokens are wrong, in 1 of 3 answers" in outcome.out
        and "\x1b" not in outcome.out
    )


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        ({}, 0, "ends early (no reason given)"),
        ({"finish_reason": "abort\x1b"}, 0, r"ends early (abort\u001b)"),
        ({"finish_reason": "length"}, 0, ""),
        ({"finish_reason": "length", "max_tokens": 6}, 0, ""),
        ({"finish_reason": "length", "max_tokens": 40}, 0, "ends early (length)"),
        *(({"stop": full}, 0, "") for full in ("length", "context")),
        ({"finish_reason": "stop"}, 1, "token 7 is the end, the model's"),
        ({"stop": "eos"}, 1, "token 7 is the end"),
        ({"finish_reason": "stop", "stop": ["\n"]}, 0, "ends early (a stop text, perhaps)"),
    ],
)
def test_a_truncated_answer_is_wrong_only_if_the_engine_says_that_it_ended(
    audited, rows, said, code, words
):
    ids = {"prompt_token_ids": rows[0]["prompt_token_ids"], "token_ids": rows[0]["token_ids"][:6]}
    outcome = audited([ids | said])
    assert (
        outcome.code == code
        and words in outcome.out
        and ("ends early" in outcome.out) is ("early" in words)
    )
    assert counts(outcome) == [(6 + code, 6, 0, code)]


def test_an_answer_without_tokens_is_not_passed(audited, rows):
    nothing = rows[1] | {"token_ids": [], "finish_reason": "length"}
    outcome = audited([rows[0], nothing])
    assert outcome.code == 1 and "Not audited: 1 of 2 answers, which hold no token." in outcome.out
    assert f"of {len(rows[0]['token_ids'])} tokens in 1 answers none is wrong" in outcome.out
    assert "Lossless" not in audited([nothing]).out


def test_of_several_eos_each_is_the_end(audited, rows, tmp_path):
    """A record of an EOS that a server hides has the tokenizer's, and the model's own was another: not lossless."""
    folder = tmp_path / "two"
    shutil.copytree(PATH, folder)
    *ids, other = rows[0]["token_ids"][:7]
    assert other not in ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, other]}))
    answer = only(rows[0], "prompt_token_ids")
    lines = [answer | {"token_ids": [*ids, end]} for end in (2, other)] + [
        answer | {"token_ids": ids}
    ]
    outcome = audited([*lines, answer | {"token_ids": [*ids[:3], 2]}], model=folder)
    assert counts(outcome) == [(7, 7, 0, 0)] * 3 + [(4, 3, 0, 1)], outcome.out
    assert "token 4 is the end, the model's" in outcome.out


@pytest.mark.parametrize(
    "said", [{"finish_reason": "stop"}, {"finish_reason": "length", "max_tokens": 9}]
)
def test_a_text_that_is_cut_inside_a_character_is_not_judged(audited, rows, said):
    """Its ids are not the engine's, and a right answer was not lossless."""
    outcome = audited(
        [rows[0], only(rows[1], "prompt", text=f"{rows[1]['text'][:9]}\ufffd") | said]
    )
    assert outcome.code == 1 and "Not audited: 1 of 2 answers, which hold no token." in outcome.out
    assert (
        counts(outcome)[1] == (0, 0, 0, 0) and "ends early (cut inside a character)" in outcome.out
    )


def test_what_is_behind_eos_is_left_out(audited, rows):
    outcome = audited([rows[0] | {"token_ids": rows[0]["token_ids"] + [7, 7]}])
    assert outcome.code == 0 and "2 tokens behind EOS are left out" in outcome.out
    assert counts(outcome)[0][0] == len(rows[0]["token_ids"])


def test_answers_of_another_type(audited):
    """Made in bfloat16: in float32 some tokens are wrong by little, which is that type's own noise."""
    half, lines = model_in(torch.bfloat16), []
    for seed in range(24):  # processors differ in which tokens their bfloat16 changes
        prompt = torch.randint(
            5, 2048, (12,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        lines.append({"prompt": prompt, "token_ids": greedy(half, prompt, 40), "max_tokens": 40})
    outcomes = [
        audited(lines, *more) for more in ([], ["--made-in=bfloat16"], ["model.dtype=bfloat16"])
    ]
    assert [outcome.code for outcome in outcomes] == [1, 0, 0]
    plain, declared = (counts(outcome) for outcome in outcomes[:2])
    assert sum(row[3] for row in plain) == sum(row[2] for row in declared) >= 3, (
        "the same places, by another measure"
    )
    ties = [float(re.search(r"gap of at most (\S+),", outcome.out)[1]) for outcome in outcomes]
    assert ties[0] < 1e-3 < 0.05 < ties[1] < 2 and 0.05 < ties[2] < 2
    assert "in float32, AMD" not in outcomes[2].out and "Lossless in bfloat16" in outcomes[2].out
    changed = [line | {"token_ids": [7, *line["token_ids"][1:]]} for line in lines]
    assert audited(changed, "--made-in=bfloat16").code == 1, "noise excuses no other token"


def test_records_and_spec_benchs_own_format(audited, evaluate, tmp_path, checkpoint, bench_file):
    """Prompts are the bench's; texts alone get the space that the template has before an answer."""
    assert evaluate("method=pld", "name=a", "max_new_tokens=20").code == 0
    (file,) = (tmp_path / "results/a").rglob("answers.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    outcome = audited(records, "--bench", bench_file, model=checkpoint)
    assert outcome.code == 0, outcome.err
    whole = [len(ids) for row in records for ids in row["choices"][0]["output_ids"]]
    assert [row[:2] for row in counts(outcome)] == [
        (n, n) for n in whole
    ] and "10, turn 2" in outcome.out
    del records[0]["choices"][0]["output_ids"][1:]
    lacking = audited(records, "--bench", bench_file, model=checkpoint)
    assert (
        lacking.code == 2 and "question 10 has 2 turns, and not each has its answer" in lacking.err
    )
    records = [json.loads(line) for line in file.read_text().splitlines()]
    records[0]["choices"][0]["output_ids"][1][4] += 1
    assert re.search(
        r"10, turn 2 .*token 5 is", audited(records, "--bench", bench_file, model=checkpoint).out
    )
    assert "name its bench: --bench" in audited(records, model=checkpoint).err
    records[0]["question_sha256"] = "0" * 16
    assert (
        "question 10 has another text"
        in audited(records, "--bench", bench_file, model=checkpoint).err
    )


def test_texts_in_spec_benchs_format(audited, rows, tmp_path):
    bench = tmp_path / "question.jsonl"
    asked = [
        {"question_id": i, "category": "qa", "turns": [text]} for i, text in enumerate(QUESTIONS)
    ]
    bench.write_text("".join(json.dumps(row) + "\n" for row in asked))
    times = {"new_tokens": [1], "wall_time": [1.0]}
    lines = [
        {"question_id": i, "choices": [{"turns": [r["text"].strip()], **times}]}
        for i, r in enumerate(rows)
    ]
    outcome = audited(lines, "--bench", bench)
    assert outcome.code == 0, outcome.out
    assert (
        "Of 3 answers there is text alone" in outcome.out and outcome.out.count("ends early") == 1
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON, cut short?"),
        ("[" * 100_000, "not JSON, cut short?"),
        ("[1]", "must be a JSON object"),
        ({"choices": [1]}, "its choices a list of objects"),
        ({"text": "x"}, "has no prompt"),
        ({"prompt": "x"}, "has neither token_ids nor an answer that is its text alone"),
        ({"prompt": "x", "choices": [{"message": {"content": "x", "tool_calls": [1]}}]}, "has neither token_ids"),
        ({"prompt": "x", "token_ids": [1, "2"]}, "token_ids: must be a list of int"),
        *(
            ({"prompt": "x", "choices": [{"message": {"content": "x", part: said}}]}, f"its text alone {part}")
            for part, said in (("reasoning_content", "y"), ("reasoning", "y"), ("thinking", "y"), ("refusal", "y"))
        ),
        ({"prompt": "x", "choices": [{"message": {"content": "x", "audio": {"id": "y"}}}]}, "its text alone audio"),
        ({"prompt": "x", "choices": [{"text": "x", "reasoning_details": [{"text": "y"}]}]}, "alone reasoning_details"),
        ({"prompt": "x", "text": "x", "reasoning": "y"}, "its text alone reasoning"),
        ({"prompt": ["x"], "text": "x"}, "prompt_token_ids: must be a list of int"),
        ({"prompt": "x", "text": "x", "temperature": 0.7}, "temperature 0.7: an audit is of greedy answers"),
        ({"prompt": "x", "token_ids": [2048]}, "ids are outside the vocabulary of 2048"),
        ({"prompt": [], "token_ids": [7]}, "its prompt is empty"),
        ({"prompt": [7], "token_ids": [7] * 3, "max_tokens": 2}, "3 tokens, and max_tokens is 2"),
        ({"prompt": [7] * 4000, "token_ids": [7] * 97}, "4097 tokens, and the context has 4096"),
        ({"messages": [{"role": "system", "content": "x"}], "text": "x"}, "vicuna_v1.1 refuses its messages"),
        ({"messages": [{"role": "user", "content": "x"}], "text": "x", "tools": [{}]}, "give prompt_token_ids"),
        ({"messages": [{"role": "user"}], "text": "x"}, "vicuna_v1.1 refuses its messages"),
        ({"question_id": 1, "choices": [{"turns": ["x"]}]}, "new_tokens: must be"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_audited_is_one_line(audited, rows, line, words):
    outcome = audited([rows[0], line])
    assert outcome.code == 2 and not outcome.out
    (said,) = outcome.err.strip().splitlines()
    assert "answers.jsonl:2: " in said and words in said


def test_parts_that_are_empty_or_among_the_ids_refuse_no_answer(audited, rows):
    empty = {
        "role": "assistant",
        "refusal": None,
        "reasoning": "",
        "tool_calls": [],
        "audio": None,
        "annotations": [],
    }
    known = {
        "index": 0,
        "finish_reason": "stop",
        "logprobs": {"content": [1]},
        "stop_reason": None,
        "matched_stop": 2,
    }
    row = only(rows[0], "prompt", category="reasoning", reasoning_effort="low")
    texts = row | {"choices": [known | {"message": empty | {"content": rows[0]["text"]}}]}
    ids = row | {
        "choices": [
            {"message": {"content": "", "reasoning": "so"}, "token_ids": rows[0]["token_ids"]}
        ]
    }
    outcome = audited([texts, ids])
    assert outcome.code == 0, outcome.err
    assert "Of 1 answers there is text alone" in outcome.out


def test_a_text_behind_prompt_ids_is_tokenised_with_them(audited, rows):
    outcome = audited([only(rows[0], "prompt_token_ids", text=f"{rows[0]['text']} </s>")])
    assert "tokens behind EOS" not in outcome.out, "a special word in a text is a word"


def test_mistakes_on_the_command_line(audited, call, tmp_path):
    for arguments, words in (
        ((), "name an experiment's folder, or --answers FILE and --model NAME"),
        (("--answers", "x"), "--answers FILE and --model NAME"),
        ((tmp_path, "--made-in=float16"), "with --answers only"),
        (("--answers", tmp_path / "none.jsonl", "--model=embedded"), "none.jsonl does not exist"),
        (("--answers", "x", "--model=embedded", "method=pld"), "method=pld: only model=NAME"),
        (
            ("--answers", "x", "--model=embedded", "--bench=none"),
            "none/question.jsonl does not exist",
        ),
    ):
        outcome = call(audit.main, *arguments)
        assert outcome.code == 2 and words in outcome.err and len(outcome.err.splitlines()) == 1, (
            outcome.err
        )
    assert "holds no answer" in audited([""]).err


def test_progress_is_shown_and_a_near_tie_is_of_twice_the_noise(audited, rows, monkeypatch):
    monkeypatch.setattr(scheduling, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(audit, "noise", lambda one, other: 0.25)
    total = sum(len(row["prompt_token_ids"]) + len(row["token_ids"]) for row in rows)
    outcome = audited(rows)
    assert f"audit: {total} of {total} tokens; 00:00 left" in outcome.err
    assert "near tie: a gap of at most 0.5, twice" in outcome.out


def test_logits_come_in_parts_and_as_a_plain_forward_gives_them(monkeypatch):
    model = toy_model("llama-grouped")
    prompt, ids = (
        [3, 4, 5],
        [int(i) for i in torch.randint(3, 61, (30,), generator=torch.Generator().manual_seed(0))],
    )
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, 2:]
    said = torch.tensor(ids)[:, None]
    gaps = [
        *(logits[:-1].amax(-1) - logits[:-1].gather(1, said)[:, 0]).tolist(),
        float(logits[-1].max() - logits[-1, 2]),
    ]
    whole = Target(model)
    for parts in (1 << 20, 4 * 61 * 7):
        monkeypatch.setattr(target, "LOGITS_BYTES", parts)
        for by_steps in (False, True):
            forced = force(whole, prompt, ids, [2], by_steps=by_steps)
            assert forced.own == logits.argmax(-1).tolist()
            assert forced.gaps == pytest.approx(gaps, abs=1e-4)
            margins = logits.topk(2).values
            assert forced.margins == pytest.approx(
                (margins[:, 0] - margins[:, 1]).tolist(), abs=1e-4
            )
