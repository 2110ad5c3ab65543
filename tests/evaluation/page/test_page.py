"""The page as a file: escaped, self-contained, complete; what it says against known records."""

import base64
import hashlib
import html
import json
import re
import shutil

import pytest

from evaluation.page import reader, render
from evaluation.page.facts import commands, facts, model_words
from evaluation.records.runs import read_runs
from evaluation.statistics.experiment import Experiment
from evaluation.statistics.notes import heading, headlines
from evaluation.statistics.rendering import page_view
from tests.evaluation.made_runs import answer as timed
from tests.evaluation.made_runs import made
from tests.evaluation.page.conftest import HOSTILE, answer, report, write_run

RAW = re.compile(r"<(script|style)[^>]*>(.*?)</\1>", flags=re.S)


@pytest.fixture(scope="module")
def text(report_folder):
    return (report_folder / "report.html").read_text(encoding="utf-8")


def test_nothing_comes_from_elsewhere(text):
    tags = re.findall("<[^>]*>", RAW.sub("", text))
    sources = re.findall(r'\s(?:src|href|action)="([^"]*)"', " ".join(tags))
    assert sources and all(source.startswith(("data:", "#")) for source in sources)
    names = [re.sub('"[^"]*"', "", tag) for tag in tags]
    assert not [tag for tag in names if re.search(r"\s(style|on\w+)=", tag)]
    assert not re.search("@import|url\\(|fetch\\(|innerHTML|insertAdjacentHTML", text)
    (policy,) = (tag for tag in tags if "Content-Security-Policy" in tag)
    assert "default-src" in policy
    (style, data, script) = RAW.findall(text)
    assert data[0] == "script"
    for kind, content in (style, script):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in html.unescape(policy)


def test_what_a_model_or_a_user_wrote_stays_text(text):
    _, (_, data), _ = RAW.findall(text)
    assert "<b>device" not in text and "<i>" not in text and not set("<>&") & set(data)
    pieces = ["".join(words["pieces"]) for words in json.loads(data)["texts"]]
    assert any(HOSTILE in joined for joined in pieces)


def rendered(folder):
    return render(Experiment.read(folder), folder)


@pytest.mark.parametrize("linear", ["half", "half for about [1, 9] rows, torch for others"])
def test_page_and_table_say_how_weights_were_rounded_and_are_held(linear, tmp_path):
    more = {"model": {"weights": "float16"}, "circumstances": {"linear": linear}}
    write_run(tmp_path, "vanilla", [answer(1, "qa", {"ids": [1]})], **more)
    (run,) = read_runs(tmp_path)
    words = "toy rounded to float16 (float32 from 16-bit weights) on a <b>device</b>; "
    assert heading([run])[0].startswith(words)
    words = "toy rounded to float16 (nowhere/toy), float32 from 16-bit weights, "
    assert model_words(run).startswith(words)


def test_it_says_what_is_missing_what_agrees_and_what_a_figure_shows(text):
    assert "Not finished." in text
    assert "incomplete: recycling (hot), repeat 0: 4 of 6 questions" in text
    assert "python -m evaluation.run -m bench=sample start=cold,hot" in text
    assert re.search(r"4 of 4 turns equal those of vanilla, token for token \(\d\d+ tokens\)", text)
    assert "<strong>mat</strong>. Tokens per step (MAT) by subtask and method." in text


def test_configurations_have_names_of_their_own(tmp_path):
    rows = [answer(1, "qa", {"ids": [1]})]
    for k, repeat in ((4, 0), (4, 1), (8, 0)):
        write_run(tmp_path, "recycling (hot)", rows, method={"k": k}, repeat=repeat)
    write_run(tmp_path, "vanilla", rows)
    there = write_run(tmp_path / "b", "vanilla", rows, bench={"name": "b"})
    there.rename(tmp_path / "runs/elsewhere")
    ran = Experiment(read_runs(tmp_path)).named
    recycling = ["recycling (hot), k=4", "recycling (hot), k=8"]
    assert sorted(ran) == [*recycling, "vanilla, toy, b", "vanilla, toy, sample"]
    assert len(ran["recycling (hot), k=4"].runs) == 2
    lines = facts(ran)
    assert lines["started"] == [("2026-02-03 04:05 +0000", "")] and lines["repeats"] == [("2", "")]
    assert lines["device"] == [("a <b>device</b>", "")]
    assert "vanilla, toy, b" in [names for _, names in lines["bench"]]
    assert list(commands(ran).values()) == [list(ran)]


def test_the_table_keeps_numbers_and_hides_what_says_nothing():
    seconds = [1.0, 2.0, 4.0, 8.0, 1.0, 2.0, 4.0, 8.0]
    others = [*seconds[4:], *seconds[:3], 9.0]
    base = [timed(i, "qa", [([1] * 1000, s)]) for i, s in enumerate(seconds)]
    fast = [timed(i, "qa", [([4] * 250, s)]) for i, s in enumerate(others)]
    runs = [made("vanilla", base), made("x", fast, method={"k": 8})]
    view = page_view(Experiment(runs).table)
    (block,) = view.blocks
    names = [column.name for column in block.columns]
    assert names[:4] == ["method", "category", "questions", "new_tokens"] and "k" in names
    assert "prefill_ms" not in names and "speedup_hf" not in names and "block" not in names
    assert {"steps", "k"} <= block.extra
    assert not {"mat", "speedup_vanilla", "category"} & block.extra
    assert {"mat", "k", "steps"} <= block.numbers and not {"method", "category"} & block.numbers
    lines = [line for line in block.lines if line.category == "overall"]
    vanilla, x = (dict(zip(names, line.cells, strict=True)) for line in lines)
    assert (x["mat"].text, x["mat"].value, x["mat"].interval) == ("4.00", "4.0", "")
    assert (x["new_tokens"].text, vanilla["k"].text, x["k"].text) == ("8,000", "-", "8")
    assert re.fullmatch(r"\[0\.\d\d, [12]\.\d\d\]", x["speedup_vanilla"].interval)
    assert x["speedup_vanilla"].mark == "~" and len(view.footnotes) == 3
    several = Experiment([*runs, made("x", fast, model={"dtype": "float16"})])
    assert "block" in {column.name for column in page_view(several.table).blocks[0].columns}


@pytest.mark.parametrize(
    ("lengths", "seconds", "words"),
    [
        ([2], 2.0, "pld accepts most, 2.00 tokens per step (MAT). vanilla is fastest, 2 tokens/s."),
        (
            [2],
            0.5,
            "pld accepts most, 2.00 tokens per step (MAT). "
            "It is fastest, 4 tokens/s (2.00 × vanilla).",
        ),
        ([1], 0.5, "pld is fastest, 2 tokens/s (2.00 × vanilla)."),
    ],
)
def test_a_line_a_block_says_which_accepts_most_and_which_is_fastest(lengths, seconds, words):
    vanilla = timed(1, "qa", [([1] * sum(lengths), 1.0)])
    pld = timed(1, "qa", [(lengths, seconds)])
    table = Experiment([made("vanilla", [vanilla]), made("pld", [pld])]).table
    assert headlines(table) == [f"toy on file: {words}"]


# the reader's data


def read(folder):
    return reader.collect(Experiment(read_runs(folder)).named)


@pytest.mark.parametrize("known", [True, False])
def test_questions_are_read_from_the_benchs_file_unless_it_changed(known, tmp_path):
    bench = tmp_path / "question.jsonl"
    bench.write_text('{"question_id": 2, "category": "math", "turns": ["why?"]}')
    digest = hashlib.sha256(bench.read_bytes()).hexdigest() if known else "of another file"
    config = {"bench": {"path": str(bench)}, "model": {}}
    rows = [answer(2, "math", {"ids": [1]})]
    write_run(tmp_path, "vanilla", rows, config=config, bench={"sha256": digest})
    (question,) = read(tmp_path)["questions"]
    assert question["turns"] == (["why?"] if known else [])


def test_the_reader_shows_each_subtask_first_and_says_what_it_leaves_out(tmp_path, monkeypatch):
    categories = ["qa", "qa", "math", "rag"]
    rows = [answer(i, c, {"ids": [1], "text": f"t{i}"}) for i, c in enumerate(categories)]
    write_run(tmp_path, "vanilla", rows)
    monkeypatch.setattr(reader, "MOST_QUESTIONS", 3)
    assert [question["id"] for question in read(tmp_path)["questions"]] == ["0", "2", "3"]
    text = rendered(tmp_path)
    assert "Shown are 3 of 4 questions" in text and "nowhere/toy could not be loaded" in text


def test_equal_answers_are_kept_once_and_steps_are_split_by_turn(report_folder, tmp_path):
    data = read(report_folder)
    assert len(data["answers"]) == 8 and len(data["texts"]) == 4
    for shown in data["answers"]:
        for turn in shown["turns"]:
            assert sum(turn["lengths"]) == len(data["texts"][turn["text"]]["pieces"])
    first = {"ids": [1, 2, 3], "steps": [(1, 1, []), (2, 4, [0])]}
    second = {"ids": [4], "steps": [(1, 4, [])]}
    write_run(tmp_path, "recycling (hot)", [answer(1, "qa", first, second)])
    (shown,) = read(tmp_path)["answers"]
    assert [turn["lengths"] for turn in shown["turns"]] == [[1, 2], [1]]
    assert [turn["paths"] for turn in shown["turns"]] == [["", "0"], [""]]


@pytest.mark.parametrize("converted", [True, False])
def test_the_tokenizer_of_a_gguf_file_is_where_it_was_converted(
    converted, checkpoint, tmp_path, monkeypatch
):
    shutil.copytree(checkpoint, tmp_path / f"models/toy-{'c' * 16}-3")
    monkeypatch.setattr(reader, "CONVERTED", tmp_path / "models")
    source = {"sha256": ("c" if converted else "d") * 64}
    rows = [answer(1, "qa", {"ids": [5, 6]})]
    write_run(tmp_path, "vanilla", rows, model={"path": "toy.gguf"}, converted_from=source)
    data = read(tmp_path)
    (shown,) = data["texts"]
    assert len(shown.get("pieces", [])) == (2 if converted else 0)
    assert list(data["failures"]) == ([] if converted else ["toy.gguf"])


def test_timings_in_doubt_are_said(tmp_path):
    write_run(tmp_path, "vanilla", [answer(1, "qa", {"ids": [5]})], cores_busy_elsewhere=1.5)
    assert "Timings are doubtful: other processes kept cores busy" in rendered(tmp_path)


def test_other_peoples_answers_are_shown_without_steps(tmp_path):
    row = answer(1, "qa", {"ids": [5, 6]})
    for key in ("decoding_steps", "output_ids", "step_nodes", "step_paths"):
        del row["choices"][0][key]
    write_run(tmp_path, "vanilla", [row])
    assert report(tmp_path).exists()
    (shown,) = read(tmp_path)["answers"]
    assert shown["turns"] == [{"text": 0, "lengths": []}]


def test_the_reader_keeps_questions_of_one_id_and_shards_apart(tmp_path):
    answered = {("vanilla", "1", "1a"), ("vanilla", "2", "2b"), ("pld", "1", "1c")}
    for label, number, text in answered:
        row = answer(int(number), "qa", {"ids": [1], "text": text})
        row["question_sha256"] = text
        bench = {"sha256": f"of {label}"}
        write_run(tmp_path, label, [row], question_hashes=[f"{number}:{text}"], bench=bench)
    data = read(tmp_path)
    assert len(data["questions"]) == 3
    shown = set()
    for one in data["answers"]:
        text = data["texts"][one["turns"][0]["text"]]["text"]
        shown.add((data["runs"][one["run"]], data["questions"][one["question"]]["id"], text))
    assert shown == answered
