"""The page as a file: escaped, self-contained, complete; what it says against records of known content."""

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from evaluation.page import HERE, reader, render
from evaluation.page.facts import commands, facts, model_words
from evaluation.records.runs import read_runs
from evaluation.statistics.experiment import Experiment
from evaluation.statistics.notes import heading, headlines
from evaluation.statistics.rendering import page_view
from tests.evaluation.made_runs import answer as timed
from tests.evaluation.made_runs import made
from tests.evaluation.page.conftest import HOSTILE, answer, report, write_run


class Page(HTMLParser):
    """Tags with their attributes, and the text of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.raw, self.inside = [], {"script": [], "style": []}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = tag if tag in self.raw else None

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.raw[self.inside].append(data)


@pytest.fixture(scope="module")
def text(report_folder):
    return (report_folder / "report.html").read_text(encoding="utf-8")


def test_nothing_comes_from_elsewhere_and_what_a_model_or_a_user_wrote_stays_text(text):
    page = Page(text)
    sources = [
        a[key]
        for tag, a in page.tags
        for key in ("src", "href", "xlink:href", "action")
        if key in a
    ]
    assert sources and all(source.startswith(("data:", "#")) for source in sources)
    assert not re.search(
        r"@import|url\(|fetch\(|innerHTML|insertAdjacentHTML|document\.write", text
    )
    policy = next(
        a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    for kind, content in (("style", page.raw["style"][0]), ("script", page.raw["script"][-1])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert not [a for _, a in page.tags if "style" in a or any(key.startswith("on") for key in a)]
    assert [a.get("type") for tag, a in page.tags if tag == "script"] == ["application/json", None]
    assert (
        "<b>device" not in text
        and "<i>" not in text
        and not set("<>&") & set(page.raw["script"][0])
    )
    pieces = ["".join(words["pieces"]) for words in json.loads(page.raw["script"][0])["texts"]]
    assert any(HOSTILE in joined for joined in pieces)
    assert "|safe" not in (HERE / "page.html").read_text(encoding="utf-8")


def rendered(folder):
    return render(Experiment.read(folder), folder)


def test_a_lone_surrogate_is_a_question_mark(tmp_path):
    write_run(tmp_path, "vanilla", [answer(1, "qa", {"ids": [1], "text": "half \ud83d"})])
    assert "half ?" in report(tmp_path).read_text(encoding="utf-8")


def test_the_setup_names_the_models_folder_though_no_fingerprint_does():
    assert model_words(made("vanilla", [], config={"model": {"path": "there"}})).startswith(
        "toy (there), "
    )


@pytest.mark.parametrize("linear", ["half", "half for about [1, 9] rows, torch for others"])
def test_page_and_table_say_how_weights_were_rounded_and_are_held(linear, tmp_path):
    rows = [answer(1, "qa", {"ids": [1]})]
    write_run(
        tmp_path, "vanilla", rows, model={"weights": "float16"}, circumstances={"linear": linear}
    )
    (run,) = runs = read_runs(tmp_path)
    assert heading(runs)[0].startswith(
        "toy rounded to float16 (float32 from 16-bit weights) on a <b>device</b>; "
    )
    assert model_words(run).startswith(
        "toy rounded to float16 (nowhere/toy), float32 from 16-bit weights, "
    )


def test_it_says_what_is_missing_what_agrees_and_what_a_figure_shows(text):
    assert (
        "Not finished." in text
        and "incomplete: recycling (hot), repeat 0: 4 of 6 questions" in text
    )
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
    assert sorted(ran) == [
        "recycling (hot), k=4",
        "recycling (hot), k=8",
        "vanilla, toy, b",
        "vanilla, toy, sample",
    ]
    assert len(ran["recycling (hot), k=4"].runs) == 2
    lines = facts(ran)
    assert lines["started"] == [("2026-02-03 04:05 +0000", "")] and lines["repeats"] == [("2", "")]
    assert lines["device"] == [("a <b>device</b>", "")] and "vanilla, toy, b" in dict(
        map(reversed, lines["bench"])
    )
    assert list(commands(ran).values()) == [list(ran)]


def test_the_table_keeps_numbers_and_hides_what_says_nothing():
    seconds = [1.0, 2.0, 4.0, 8.0, 1.0, 2.0, 4.0, 8.0]
    base = [timed(i, "qa", [([1] * 1000, s)]) for i, s in enumerate(seconds)]
    fast = [
        timed(i, "qa", [([4] * 250, s)]) for i, s in enumerate([*seconds[4:], *seconds[:3], 9.0])
    ]
    runs = [made("vanilla", base), made("x", fast, method={"k": 8})]
    view = page_view(Experiment(runs).table)
    (block,) = view.blocks
    names = [column.name for column in block.columns]
    assert (
        names[:4] == ["method", "category", "questions", "new_tokens"]
        and "k" in names
        and "prefill_ms" not in names
    )
    assert {"steps", "k"} <= block.extra and not {
        "mat",
        "speedup_vanilla",
        "category",
    } & block.extra
    assert {"mat", "k", "steps"} <= block.numbers and not {"method", "category"} & block.numbers
    vanilla, x = (
        dict(zip(names, line.cells, strict=True))
        for line in block.lines
        if line.category == "overall"
    )
    assert (x["mat"].text, x["mat"].value, x["mat"].interval) == ("4.00", "4.0", "")
    assert x["new_tokens"].text == "8,000" and (
        vanilla["k"].text,
        vanilla["k"].value,
        x["k"].text,
    ) == ("-", "", "8")
    assert (
        re.fullmatch(r"\[0\.\d\d, [12]\.\d\d\]", x["speedup_vanilla"].interval)
        and x["speedup_vanilla"].mark == "~"
    )
    assert len(view.footnotes) == 3 and "speedup_hf" not in names
    several = page_view(
        Experiment([*runs, made("x", fast, model={"dtype": "float16"})]).table
    ).blocks[0]
    assert "block" in {c.name for c in several.columns} - several.extra and "block" not in names


def test_a_line_a_block_says_which_accepts_most_and_which_is_fastest():
    runs = [
        made(label, [timed(i, "qa", [(lengths, seconds)]) for i in range(count)])
        for count, pld, lengths in ((1, 2.0, [2]), (2, 0.5, [2]), (3, 0.5, [1]))
        for label, lengths, seconds in (("vanilla", [1] * sum(lengths), 1.0), ("pld", lengths, pld))
    ]
    assert sorted(headlines(Experiment(runs).table)) == [
        "toy on file, 1 questions: pld accepts most, 2.00 tokens per step (MAT). vanilla is fastest, 2 tokens/s.",
        "toy on file, 2 questions: pld accepts most, 2.00 tokens per step (MAT). "
        "It is fastest, 4 tokens/s (2.00 × vanilla).",
        "toy on file, 3 questions: pld is fastest, 2 tokens/s (2.00 × vanilla).",
    ]


# the reader's data


def read(folder):
    return reader.collect(Experiment(read_runs(folder)).named)


def test_the_reader_shows_each_subtask_first_and_says_what_it_leaves_out(tmp_path, monkeypatch):
    categories = ["qa", "qa", "math", "rag"]
    rows = [answer(i, c, {"ids": [1], "text": f"t{i}"}) for i, c in enumerate(categories)]
    bench = tmp_path / "question.jsonl"
    bench.write_text('{"question_id": 2, "category": "math", "turns": ["why?"]}')
    config = {"bench": {"path": str(bench)}, "model": {}}
    digest = hashlib.sha256(bench.read_bytes()).hexdigest()
    for sha256, turns in ((digest, ["why?"]), ("of another file", [])):
        write_run(tmp_path / sha256, "vanilla", rows, config=config, bench={"sha256": sha256})
        assert read(tmp_path / sha256)["questions"][1]["turns"] == turns
    write_run(tmp_path, "vanilla", rows)
    monkeypatch.setattr(reader, "MOST_QUESTIONS", 3)
    data = read(tmp_path)
    assert [q["id"] for q in data["questions"]] == ["0", "2", "3"]
    text = rendered(tmp_path)
    assert "Shown are 3 of 4 questions" in text and "nowhere/toy could not be loaded" in text


def test_equal_answers_are_kept_once_and_steps_are_split_by_turn(report_folder, tmp_path):
    data = read(report_folder)
    assert len(data["answers"]) == 8 and len(data["texts"]) == 4
    for turn in (turn for shown in data["answers"] for turn in shown["turns"]):
        assert sum(turn["lengths"]) == len(data["texts"][turn["text"]]["pieces"])
    turns = [
        {"ids": [1, 2, 3], "steps": [(1, 1, []), (2, 4, [0])]},
        {"ids": [4], "steps": [(1, 4, [])]},
    ]
    write_run(tmp_path, "recycling (hot)", [answer(1, "qa", *turns)])
    (shown,) = read(tmp_path)["answers"]
    assert [turn["lengths"] for turn in shown["turns"]] == [[1, 2], [1]]
    assert [turn["paths"] for turn in shown["turns"]] == [["", "0"], [""]]


def test_the_tokenizer_of_a_gguf_file_is_where_it_was_converted(checkpoint, tmp_path, monkeypatch):
    """Its own path holds none: answers had lost their colours."""
    shutil.copytree(checkpoint, tmp_path / f"models/toy-{'c' * 16}-3")
    monkeypatch.setattr(reader, "CONVERTED", tmp_path / "models")
    for label, sha256 in (("vanilla", "c" * 64), ("pld", "d" * 64)):
        row = answer(1, "qa", {"ids": [5, 6]})
        write_run(
            tmp_path / label,
            label,
            [row],
            model={"path": "toy.gguf"},
            converted_from={"sha256": sha256},
        )
    (shown,) = read(tmp_path / "vanilla")["texts"]
    assert len(shown["pieces"]) == 2
    data = read(tmp_path / "pld")
    assert data["texts"] == [{"text": "text"}] and list(data["failures"]) == ["toy.gguf"]


def test_timings_in_doubt_are_said(tmp_path):
    write_run(tmp_path, "vanilla", [answer(1, "qa", {"ids": [5]})], cores_busy_elsewhere=1.5)
    assert "Timings are doubtful: other processes kept cores busy" in report(tmp_path).read_text(
        encoding="utf-8"
    )


def test_other_peoples_answers_are_shown_without_steps(tmp_path):
    row = answer(1, "qa", {"ids": [5, 6]})
    for key in ("decoding_steps", "output_ids", "step_nodes", "step_paths"):
        del row["choices"][0][key]
    write_run(tmp_path, "vanilla", [row])
    assert report(tmp_path).exists()
    (shown,) = read(tmp_path)["answers"]
    assert shown["turns"] == [{"text": 0, "lengths": []}]


def test_the_reader_keeps_questions_of_one_id_and_shards_apart(tmp_path):
    """By id alone one question's answer had stood below another's text; of shards only the first was shown."""
    for label, number, digest, file in (
        ("vanilla", 1, "a", "f"),
        ("vanilla", 2, "b", "f"),
        ("pld", 1, "c", "g"),
    ):
        row = answer(number, "qa", {"ids": [1], "text": f"{number}{digest}"}) | {
            "question_sha256": digest
        }
        write_run(
            tmp_path, label, [row], question_hashes=[f"{number}:{digest}"], bench={"sha256": file}
        )
    data = read(tmp_path)
    names, ids = data["runs"], [question["id"] for question in data["questions"]]
    texts = [data["texts"][shown["turns"][0]["text"]]["text"] for shown in data["answers"]]
    shown = {
        (names[a["run"]], ids[a["question"]], text)
        for a, text in zip(data["answers"], texts, strict=True)
    }
    assert (
        shown == {("vanilla", "1", "1a"), ("vanilla", "2", "2b"), ("pld", "1", "1c")}
        and len(ids) == 3
    )
