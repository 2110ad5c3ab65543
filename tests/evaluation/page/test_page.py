"""The page as a file: escaped, self-contained, complete; what it says against known records."""

import base64
import hashlib
import html
import re

import pytest

from evaluation.page.facts import commands, facts
from evaluation.records.runs import read_runs
from evaluation.tables.experiment import Experiment
from evaluation.tables.notes import headlines, verdict
from evaluation.tables.rendering import page_view
from tests.evaluation.made_runs import answer as timed
from tests.evaluation.made_runs import made
from tests.evaluation.page.conftest import answer, write_run

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
    (style, script) = RAW.findall(text)
    for kind, content in (style, script):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in html.unescape(policy)


def test_what_a_model_or_a_user_wrote_stays_text(text):
    assert "<b>device" not in text and "<i>" not in text and "<img src=x" not in text


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
    ran = {pool.title: pool for pool in Experiment(read_runs(tmp_path)).pools}
    recycling = ["recycling (hot), k=4", "recycling (hot), k=8"]
    assert sorted(ran) == [*recycling, "vanilla, toy, b", "vanilla, toy, sample"]
    assert len(ran["recycling (hot), k=4"].runs) == 2
    lines = facts(list(ran.values()))
    assert list(lines["started"]) == ["2026-02-03"]
    assert list(lines["repeats"]["2"]) == ["recycling (hot), k=4"]
    assert list(lines["device"]) == ["a <b>device</b>"]
    assert {"vanilla, toy, b": None} in lines["bench"].values()
    assert list(map(list, commands(list(ran.values())).values())) == [list(ran)]


def test_the_table_keeps_numbers_and_hides_what_says_nothing():
    seconds = [1.0, 2.0, 4.0, 8.0, 1.0, 2.0, 4.0, 8.0]
    others = [*seconds[4:], *seconds[:3], 9.0]
    base = [timed(i, "qa", [([1] * 1000, s)]) for i, s in enumerate(seconds)]
    fast = [timed(i, "qa", [([4] * 250, s)]) for i, s in enumerate(others)]
    runs = [made("vanilla", base), made("x", fast, method={"k": 8})]
    (block,) = page_view(Experiment(runs)).blocks
    names = [column.name for column in block.columns]
    leading = ["method", "mat", "tokens_per_second", "speedup_vanilla", "questions"]
    assert names[: len(leading)] == leading
    assert not {"prefill_ms", "speedup_hf", "block"} & set(names)
    assert {"steps", "k"} <= block.extra and {"mat", "k", "steps"} <= block.numbers
    assert (
        "category" in block.extra
        and "mat" not in block.extra
        and not {"method", "category"} & block.numbers
    )

    rows = [row for row in block.rows if row["category"] == "overall"]
    vanilla, x = (dict(zip(names, block.cells(row), strict=True)) for row in rows)
    assert (x["mat"].text, x["mat"].value, x["mat"].interval) == ("4.00", "4.0", "")
    assert (x["new_tokens"].text, vanilla["k"].text, x["k"].text) == ("8,000", "-", "8")
    assert re.fullmatch(r"\[0\.\d\d, [12]\.\d\d\]", x["speedup_vanilla"].interval)


def test_the_verdict_says_whose_text_differs_and_in_how_many_turns():
    base = made("vanilla", [answer(i, "qa", {"ids": [1, 2]}) for i in (1, 2)])
    equal = made("pld", base.answers)
    other = [base.answers[0], answer(2, "qa", {"ids": [1, 3]})]
    assert verdict(Experiment([base, equal]).audits).startswith("Lossless: all 2 turns")
    words = verdict(Experiment([base, equal, made("rest", other)]).audits)
    assert words == "Not identical: 1 of 4 turns differ from vanilla's (rest)."
    assert "not checked" in verdict(Experiment([base]).audits)


def test_the_verdict_and_the_table_come_first_and_the_setup_last(text):
    verdict_at = text.index("Lossless: all 4 turns")
    sections = re.findall(r'<section id="(\w+)"', text)
    assert verdict_at < text.index('<section id="table">')
    assert sections == ["table", "figures", "trees", "audit", "ran", "commands"]


TWO = "2.00 tokens per step (MAT)"


@pytest.mark.parametrize(
    ("questions", "lengths", "seconds", "words"),
    [
        (8, [2], [2.0], f"pld accepts most, {TWO}. vanilla is fastest, 2 tokens/s."),
        (8, [2], [0.5], f"pld accepts most, {TWO}. It is fastest, 4 tokens/s (2.00 × vanilla)."),
        (8, [1], [0.5], "pld is fastest, 2 tokens/s (2.00 × vanilla)."),
        (
            8,
            [2],
            [0.5, 1.9],
            f"pld accepts most, {TWO}. It has the highest speed, 3 tokens/s (1.26 × vanilla), not"
            " distinguishable from vanilla.",
        ),
        (
            7,
            [2],
            [0.5],
            f"pld has the highest MAT, {TWO}; too few questions for an interval. It has the highest"
            " speed, 4 tokens/s (2.00 × vanilla); too few questions for an interval.",
        ),
    ],
)
def test_a_line_a_block_claims_what_paired_intervals_say(questions, lengths, seconds, words):
    plain = []
    drafted = []
    for i in range(questions):
        plain.append(timed(i, "qa", [([1] * sum(lengths), 1.0)]))
        drafted.append(timed(i, "qa", [(lengths, seconds[i % len(seconds)])]))
    experiment = Experiment([made("vanilla", plain), made("pld", drafted)])
    assert headlines(experiment.table, experiment.pools) == [f"toy on file: {words}"]
