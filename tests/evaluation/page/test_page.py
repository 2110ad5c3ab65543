"""The page as a file: escaped, self-contained, complete; what it says against records of known content."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pandas as pd
import pytest

from evaluation.page import page as page_module
from evaluation.page import reader
from evaluation.page.captions import short
from evaluation.page.facts import _model, commands, configurations, facts
from evaluation.page.page import script_json
from evaluation.page.tokens import Decoder
from evaluation.records.runs import read_runs
from evaluation.statistics.audits import audits
from evaluation.statistics.pools import pools
from evaluation.statistics.rendering import page_view
from evaluation.statistics.tables import main_table
from tests.evaluation.page.conftest import HOSTILE, answer, plain, report, write_run


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


def test_nothing_comes_from_elsewhere(text):
    page = Page(text)
    sources = [a[key] for tag, a in page.tags for key in ("src", "href", "xlink:href", "action") if key in a]
    assert sources and all(source.startswith(("data:", "#")) for source in sources)
    assert not re.search(r"@import|url\(|fetch\(|innerHTML|insertAdjacentHTML|document\.write", text)
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    for kind, content in (("style", page.raw["style"][0]), ("script", page.raw["script"][-1])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert not [a for _, a in page.tags if "style" in a or any(key.startswith("on") for key in a)]


def test_what_a_model_or_a_user_wrote_stays_text(text):
    page = Page(text)
    assert [a.get("type") for tag, a in page.tags if tag == "script"] == ["application/json", None]
    assert not [a for tag, a in page.tags if tag == "img" and a["src"] == "x"]
    assert "<b>device" not in text and "<i>" not in text and "\u2028" not in text
    data = json.loads(page.raw["script"][0])
    pieces = ["".join(found["pieces"]) for found in data["texts"]]
    assert any(HOSTILE in joined for joined in pieces)


def test_script_json_reads_back_the_same():
    data = {"a": ["</script>", "<!--", "]]>", "&amp;", "\u2028\u2029", "é漢🙂"]}
    written = str(script_json(data))
    assert json.loads(written) == data and not set("<>&\u2028\u2029") & set(written)
    with pytest.raises(ValueError):
        script_json({"a": float("nan")})


def test_a_lone_surrogate_does_not_stop_the_page(tmp_path):
    row = answer(1, "qa", [{"ids": [1], "steps": plain([1]), "text": "half \ud83d"}])
    write_run(tmp_path / "runs/a", "vanilla", [row])
    assert "half ?" in report(tmp_path).read_text(encoding="utf-8")


def test_the_setup_names_the_models_folder_though_no_fingerprint_does():
    run = SimpleNamespace(settings={"model": {"name": "toy"}}, config={"model": {"path": "there"}}, metadata={})
    assert _model(run).startswith("toy (there), ")


def test_it_says_what_is_missing_and_names_the_command(text):
    assert "Not finished." in text and "4 of 6 answers" in text
    assert "python -m evaluation.run -m bench=sample start=cold,hot" in text
    assert "2 answers are missing" in text


def test_configurations_have_names_of_their_own(tmp_path):
    rows = [answer(1, "qa", [{"ids": [1], "steps": plain([1])}])]
    for i, (k, repeat) in enumerate([(4, 0), (4, 1), (8, 0)]):
        write_run(tmp_path / f"runs/{i}", "recycling (hot)", rows, method={"k": k}, settings={"repeat": repeat})
    write_run(tmp_path / "runs/9", "vanilla", rows)
    found = configurations(read_runs(tmp_path))
    assert sorted(found) == ["recycling (hot), k=4", "recycling (hot), k=8", "vanilla"]
    assert len(found["recycling (hot), k=4"].runs) == 2
    lines = {fact.term: fact.values for fact in facts(found)}
    assert lines["started"] == [("2026-02-03 04:05 +0000", "")] and lines["repeats"] == [("2", "")]
    assert lines["device"] == [("a <b>device</b>", "")]
    assert [command.missing for command in commands(found)] == [0]


def test_the_audit_by_hand(tmp_path):
    def turns(*all_ids):
        return [{"ids": ids, "steps": plain(ids)} for ids in all_ids]

    write_run(tmp_path / "runs/v", "vanilla", [answer(1, "qa", turns([1, 2, 3], [4])), answer(2, "qa", turns([5, 6]))])
    rows = [answer(1, "qa", turns([1, 9, 3], [4])), answer(2, "qa", turns([5, 6])), answer(3, "qa", turns([7]))]
    write_run(tmp_path / "runs/p", "pld", rows)
    write_run(tmp_path / "runs/h", "hf", [answer(2, "qa", turns([5]))])
    found = {a.pool.label: a for a in audits(pools(read_runs(tmp_path)), ("vanilla", "hf"))}
    assert set(found) == {"vanilla", "pld"}
    own = found["pld"]
    assert own.base.label == "vanilla" and (own.identical, len(own.turns), own.left_out) == (1, 2, 1)
    assert [(turn.where, turn.differs_at) for turn in own.different] == [("question 1, turn 1", 1)]
    assert "1 of 2 turns (50.0 %)" in own.in_words("vanilla") and "token 2 (question 1, turn 1)" in own.in_words(
        "vanilla"
    )
    assert found["vanilla"].base.label == "hf" and found["vanilla"].turns[0].differs_at == 1  # one of them ends sooner


def test_the_table_keeps_numbers_and_hides_what_says_nothing():
    rows = [
        {"model": "m", "method": "hf", "category": "overall", "mat": 1.0, "mat_low": 1.0, "mat_high": 1.0, "steps": 7}
        | {"k": None, "peak": float("nan"), "speedup_hf": 1.0, "speedup_hf_low": 1.0, "speedup_hf_high": 1.0},
        {
            "model": "m",
            "method": "x",
            "category": "overall",
            "mat": 2.345,
            "mat_low": 2.0,
            "mat_high": 3.0,
            "steps": 1234,
        }
        | {"k": 8, "peak": float("nan"), "speedup_hf": float("nan"), "speedup_hf_low": 0.9, "speedup_hf_high": 1.2},
    ]
    shown = page_view(pd.DataFrame(rows))
    (block,) = shown.blocks
    assert [(c.name, c.extra) for c in block.columns] == [
        ("method", False), ("category", False), ("mat", False), ("speedup_hf", False), ("steps", True), ("k", True),
    ]  # fmt: skip
    hf, x = ({c.name: cell for c, cell in zip(block.columns, line.cells, strict=True)} for line in block.lines)
    assert (x["mat"].text, x["mat"].value, x["mat"].interval) == ("2.35", "2.345", "2.00–3.00")
    assert x["steps"].text == "1,234" and (hf["k"].text, hf["k"].value, x["k"].text) == ("–", "", "8")
    assert x["speedup_hf"].text == "–" and x["speedup_hf"][1:3] == ("0.90–1.20", "~")
    assert hf["mat"].interval == "" and len(shown.footnotes) == 2
    assert block.baselines == ["hf"]
    assert next(c for c in block.columns if c.name == "mat").meaning.startswith("micro mean")


def test_a_line_a_block_says_which_accepts_most_and_which_is_fastest(report_folder, tmp_path):
    table = main_table(read_runs(report_folder))
    assert short(table) == [
        f"toy on sample: recycling (hot) accepts most, {table['mat'].iloc[-1]:.2f} tokens per step (MAT). "
        f"It is fastest, {table['tokens_per_second'].iloc[-1]:,.0f} tokens/s (2.00 × vanilla)."
    ]
    for count, seconds in ((1, 2.0), (2, 0.5)):
        for label, factor in (("vanilla", 1.0), ("pld", seconds)):
            rows = [answer(i, "qa", [{"ids": [1], "steps": plain([1]), "seconds": factor}]) for i in range(count)]
            write_run(tmp_path / f"runs/{label}{count}", label, rows, bench={"questions": count})
    assert [line.partition(": ")[::2] for line in short(main_table(read_runs(tmp_path)))] == [
        ("toy on sample, 2 questions", "pld is fastest, 2 tokens/s (2.00 × vanilla)."),
        ("toy on sample, 1 questions", "vanilla is fastest, 1 tokens/s."),
    ]


def test_a_figure_has_its_docstring_as_caption(text):
    assert "<strong>mat</strong>. Tokens per step (MAT) by subtask and method." in text


def test_figures_that_do_not_fit_are_named(report_folder, monkeypatch):
    monkeypatch.setattr(page_module, "MOST_FIGURE_BYTES", 0)
    monkeypatch.setattr(page_module, "MOST_TREES", 0)
    runs = read_runs(report_folder)
    text = page_module.render(runs, main_table(runs), report_folder)
    assert "data:image/svg" not in text and "mat.svg" in text


# the reader's data


def test_the_reader_shows_each_subtask_first_and_says_what_it_leaves_out(tmp_path, monkeypatch):
    rows = [
        answer(i, c, [{"ids": [1], "steps": plain([1]), "text": f"t{i}"}])
        for i, c in enumerate(["qa", "qa", "math", "rag"])
    ]
    write_run(tmp_path / "runs/v", "vanilla", rows)
    ran = configurations(read_runs(tmp_path))
    monkeypatch.setattr(reader, "MOST_QUESTIONS", 3)
    data = reader.collect(ran, Decoder())
    assert [q["id"] for q in data["questions"]] == ["0", "2", "3"]
    assert any("3 of 4 questions" in note for note in data["notes"])
    assert any("nowhere/toy could not be loaded" in note for note in data["notes"])
    monkeypatch.setattr(reader, "MOST_BYTES", 1)
    data = reader.collect(ran, Decoder())
    assert [q["id"] for q in data["questions"]] == ["0"] and [t.get("text") for t in data["texts"]] == ["t0", None]


def test_equal_answers_are_kept_once_and_steps_are_split_by_turn(report_folder, tmp_path):
    data = reader.collect(configurations(read_runs(report_folder)), Decoder())
    assert len(data["answers"]) == 8 and len(data["texts"]) == 4
    for found in data["answers"]:
        for turn in found["turns"]:
            assert sum(turn["lengths"]) == len(data["texts"][turn["text"]]["pieces"])
    two = [{"ids": [1, 2, 3], "steps": [(1, 1, []), (2, 4, [0])]}, {"ids": [4], "steps": [(1, 4, [])]}]
    write_run(tmp_path / "runs/r", "recycling (hot)", [answer(1, "qa", two)])
    (found,) = reader.collect(configurations(read_runs(tmp_path)), Decoder())["answers"]
    assert [turn["lengths"] for turn in found["turns"]] == [[1, 2], [1]]
    assert [turn["paths"] for turn in found["turns"]] == [["", "0"], [""]]


def test_a_tokenizer_that_is_not_the_runs_any_more_is_found_out(checkpoint, tmp_path):
    row = answer(1, "qa", [{"ids": [5, 6], "steps": plain([5, 6]), "text": "something else"}])
    write_run(tmp_path / "runs/v", "vanilla", [row], model={"path": str(checkpoint)})
    data = reader.collect(configurations(read_runs(tmp_path)), Decoder())
    assert data["texts"] == [{"text": "something else"}] and "1 turn(s) decode to another text" in data["notes"][0]


def test_other_peoples_answers_are_shown_without_steps(tmp_path):
    row = answer(1, "qa", [{"ids": [5, 6], "steps": plain([5, 6])}])
    choice = row["choices"][0]
    for key in ("decoding_steps", "output_ids", "step_nodes", "step_paths"):
        del choice[key]
    write_run(tmp_path / "runs/v", "vanilla", [row])
    assert report(tmp_path).exists()
    (found,) = reader.collect(configurations(read_runs(tmp_path)), Decoder())["answers"]
    assert found["turns"] == [{"text": 0, "lengths": []}]


def test_the_reader_keeps_questions_of_one_id_and_shards_apart(tmp_path):
    """By id alone one question's answer had stood below another's text; of shards only the first was shown."""

    def said(i, digest):
        return answer(i, "qa", [{"ids": [1], "steps": plain([1]), "text": f"{i}{digest}"}]) | {
            "question_sha256": digest
        }

    for name, rows, file in (("v", [said(1, "a"), said(2, "b")], "f"), ("p", [said(1, "c")], "g")):
        label = "vanilla" if name == "v" else "pld"
        for i, row in enumerate(rows):  # a shard each
            more = {"question_hashes": [f"{row['question_id']}:{row['question_sha256']}"], "bench": {"sha256": file}}
            write_run(tmp_path / f"runs/{name}{i}", label, [row], **more)
    found = reader.collect(configurations(read_runs(tmp_path)), Decoder())
    told = {
        (
            found["runs"][a["run"]],
            found["questions"][a["question"]]["id"],
            found["texts"][a["turns"][0]["text"]]["text"],
        )
        for a in found["answers"]
    }
    assert told == {("vanilla", "1", "1a"), ("vanilla", "2", "2b"), ("pld", "1", "1c")}
    assert len(found["questions"]) == 3


def test_each_turn_shows_its_own_steps():
    choice = {"turns": ["a", "b"], "decoding_steps": [2, 1], "accept_lengths": [1, 2, 3]}
    texts = SimpleNamespace(add=lambda *_: 0)
    assert [turn["lengths"] for turn in reader._turns(None, {"choices": [choice]}, texts)] == [[1, 2], [3]]
