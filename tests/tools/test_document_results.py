"""The documents say what the records say: stale ones, numbers without a source and wrong words are found."""

import copy
import re
import shutil
from pathlib import Path

import pytest

from evaluation.statistics.lookup import Experiment
from model.errors import UserError
from tests.evaluation.made_runs import asked, made
from tools import document_results
from tools.document_results import FIGURES, REFERENCE, ROOT, Records, document, expanded, misplaced, unsourced, written

TABLE = "<!-- results: e\n{} -->\nold\n<!-- end -->"


@pytest.fixture(scope="module")
def reference() -> Records:
    """The records that ship, read once; a test may put another experiment in a copy's place."""
    return Records()


@pytest.fixture
def pages(tmp_path) -> Path:
    """A copy of the documents."""
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


@pytest.fixture
def records(tmp_path) -> Records:
    """Records of one experiment, `e`: two sizes of spine and recycling, each with a cold twin of the first."""

    def run(name, nodes, steps, start="hot"):
        lengths = [[steps[0]] * 2, [steps[1]] * 2]
        answers = [
            asked(i, ("qa", "rag")[i], [(turn, 1.0)], repeated_3grams=[0.5 * i]) for i, turn in enumerate(lengths)
        ]
        key = "tree_nodes" if name == "recycling" else "nodes"
        return made(f"{name} ({start})", answers, method={key: nodes, "depth": 3}, folder=f"{name}-{nodes}-{start}")

    experiment = Experiment(tmp_path / "e")
    (tmp_path / "e").mkdir()
    experiment.runs = [
        run("recycling", 8, (1, 2)), run("recycling", 24, (2, 2)), run("recycling", 8, (1, 1), "cold"),
        run("spine", 8, (2, 4)), run("spine", 24, (3, 4)),
    ]  # fmt: skip
    found = Records(tmp_path)
    found.read = {"e": experiment}.__getitem__
    return found


def test_the_documents_say_what_the_records_say(reference):
    assert document(reference, check=True) == ([], []), f"run {document_results.COMMAND}"


def test_one_step_more_makes_documents_stale(reference, pages):
    changed = Records()
    experiment = Experiment(REFERENCE / "quickstart")
    experiment.runs = copy.deepcopy(reference.read("quickstart").runs)
    (run,) = (run for run in experiment.runs if run.label == "spine (hot)")
    lengths = run.answers[3]["choices"][0]["accept_lengths"]
    longest = lengths.index(max(lengths))
    lengths[longest : longest + 1] = [1, lengths[longest] - 1]  # the same tokens in one step more
    changed.read = lambda name: experiment if name == "quickstart" else reference.read(name)
    stale, _ = document(changed, pages, check=True)
    assert any(line.startswith("docs/quickstart.md:") for line in stale)


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_a_changed_number_is_found_and_mended(reference, pages, page):
    file = pages / page
    right = file.read_text()
    pattern = r"(<!-- = quickstart [^>]*-->)[^<]+" if page == "README.md" else r"(\| spine \(hot\) \| )\d\.\d\d"
    file.write_text(re.sub(pattern, r"\g<1>9.99", right, count=1))
    assert file.read_text() != right
    place = right[: re.search(pattern, right).start()].count("\n") + 1
    assert document(reference, pages, check=True)[0] == [f"{page}:{place}"]
    document(reference, pages)
    assert file.read_text() == right


def test_a_figure_of_other_records_is_found_and_drawn_again(reference, pages):
    file = pages / "docs/figures/quickstart_speedup.png"
    file.write_bytes((pages / "docs/figures/topk.png").read_bytes())
    assert document(reference, pages, check=True)[0] == ["docs/figures/quickstart_speedup.png"]
    document(reference, pages)
    assert document(reference, pages, check=True)[0] == []


def test_every_figure_has_records():
    drawn = {str(path.relative_to(ROOT / "docs/figures")) for path in (ROOT / "docs/figures").rglob("*.png")}
    assert drawn == set(FIGURES)


def test_a_table_has_its_rows_and_columns(records):
    columns = '{"{nodes}": "nodes=8,24", ratio: nodes=24 over recycling nodes=8}'
    spec = f'rows: {{"{{method}}": "spine,recycling start=hot"}}\ncolumns: {columns}'
    table = written(TABLE.format(spec), records)
    assert "| method | 8 | 24 | ratio |\n|---|---|---|---|\n" in table
    assert "| spine | 3.00 [2.00, 4.00] | 3.50 [3.00, 4.00] | 2.33 [2.00, 3.00] |" in table
    assert records.read("e").cell("spine nodes=8 over recycling interval=no", "start=hot").printed == "2.00"
    assert re.match(r"<!-- results: e@[0-9a-f]{8}\nrows", table) and written(table, records) == table


def test_rows_without_titles_gaps_and_published_figures(records):
    spec = "gaps: true\nrows: {'a {nodes}': 'recycling nodes=8,24'}\ncolumns: {cold: start=cold}\n"
    table = written(TABLE.format(spec + "published: {P: {a 24: 2.5}}"), records)
    assert "| a 8 | 1.00 |  |\n| a 24 |  | 2.5 |" in table
    listed = written(TABLE.format('rows: ["spine nodes=8,24"]\ncolumns: {m: method, n: nodes, q: questions}'), records)
    assert "| m | n | q |\n|---|---|---|\n| spine | 8 | 2 |\n| spine | 24 | 2 |" in listed
    everything = written(TABLE.format("columns: {MAT: mat interval=no}"), records)
    assert everything.count("\n| ") == 6 and "| spine (hot), nodes=24 | 3.50 |" in everything


def test_without_columns_a_table_says_what_was_measured(records):
    text = written("<!-- results: e -->\n<!-- end -->", records)
    assert "2 questions of file (2 turns, 6 tokens); 1 repeat; toy (float32) on a machine;" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- = f spine -->1<!-- -->", "p.md:2: .*f: no runs here"),
        ("<!-- = e spine nodes=9 -->1<!-- -->", "no configuration is 'spine nodes=9'; spine has nodes=24,8"),
        ("<!-- = e recycling -->1<!-- -->", "'recycling' fits several, name more of: recycling .hot., 8 nodes;"),
        ("<!-- = e spin nodes=8 -->1<!-- -->", "'spin' is no method .recycling, spine., no setting"),
        ("<!-- = e spine width=8 -->1<!-- -->", "'width=8' is no method"),
        ("<!-- = e spine nodes=8 category=math -->1<!-- -->", "no answer in category math"),
        ("<!-- = e spine nodes=8 repeated=60-70 -->1<!-- -->", "no mat for repeated=60-70"),
        ("<!-- = e spine nodes=8 interval=none -->1<!-- -->", "'interval=none' is no method"),
        ("<!-- = e spine nodes=8 nodes=24 -->1<!-- -->", "'nodes=24' in .*: nodes is 'nodes=8' already"),
        ("<!-- = e spine nodes=8 over recycling fast -->1<!-- -->", "'fast' is no method"),
        ("<!-- = e spine nodes=8 over recycling questions -->1<!-- -->", "'questions' has no place in 'spine"),
        ("<!-- = e spine nodes=8 steps over recycling -->1<!-- -->", "'steps' has no place"),
        ("<!-- = e spine nodes=8 over recycling repeated=0-9 -->1<!-- -->", "'repeated=0-9' has no place"),
        ("<!-- = e spine nodes=8 repeated=0-9 over recycling -->1<!-- -->", "'repeated=0-9' has no place"),
        ("<!-- = e spine nodes=8 over recycling category=qa -->1<!-- -->", "'category=qa' has no place"),
        ("<!-- = e spine nodes=8 over recycling spine -->1<!-- -->", "the method is 'recycling' already"),
        ("<!-- = e spine nodes=8 over -->1<!-- -->", "name behind 'over' what"),
        ("<!-- = e spine nodes=8 category=math over spine -->1<!-- -->", "share no answer in math"),
        (TABLE.format("columns: {MAT: [}"), "is no YAML"),
        (TABLE.format("column: {MAT: mat}"), "'column' is unknown: it takes columns, first, gaps"),
        (TABLE.format("columns: mat"), "'columns' is not {TITLE: WORDS"),
        (TABLE.format("columns: {'{k}': mat}"), "the title '{k}' names more than its words say: mat"),
    ],
)
def test_what_cannot_be_written_is_named_in_one_line(records, text, said, tmp_path):
    records.read = lambda name, read=records.read: read(name) if name == "e" else Experiment(tmp_path / name)
    with pytest.raises(UserError, match=said) as caught:
        written(f"\n{text}", records, "p.md")
    assert str(caught.value).startswith("p.md:2: ") and "\n" not in str(caught.value)


def test_where_records_are_awaited_the_page_stays(records):
    waiting = "a <!-- = curves-mbpp? spine -->7<!-- -->\n" + TABLE.replace(
        "results: e", "results: curves-mbpp?"
    ).format("columns: {MAT: mat}")
    assert written(waiting, records) == waiting and records.missing == {"curves-mbpp"}
    with pytest.raises(UserError, match="curve: no experiment is called so"):
        written(waiting.replace("curves-mbpp?", "curve?"), records)
    there = written("a <!-- = e? spine nodes=8 interval=no -->7<!-- -->", records)
    assert there == "a <!-- = e spine nodes=8 interval=no -->3.00<!-- -->"


def test_answers_by_how_much_they_repeat(records):
    cells = [records.read("e").cell(f"spine nodes=8 repeated={share}", "interval=no") for share in ("0-10", "40-60")]
    assert [cell.text for cell in cells] == ["2.00", "4.00"]


def test_answers_of_unfinished_repeats_are_found_and_weigh_the_same(records):
    experiment = records.read("e")
    (spine,) = (run for run in experiment.runs if run.folder.name == "spine-8-hot")
    again = copy.deepcopy(spine)
    again.metadata["settings"]["repeat"] = 1
    del spine.answers[1:]  # the first repeat has fewer
    experiment.runs.append(again)
    words = "spine nodes=8 repeated=0-60"
    assert experiment.cell(words, "interval=no").text == "3.00"
    assert [experiment.cell(words, count).text for count in ("questions", "new_tokens")] == ["2", "12"]


def test_one_question_has_no_interval(records):
    """[nan, nan] had been one."""
    words = ("spine nodes=8", "spine nodes=8 repeated=0-10", "spine nodes=8 over recycling start=hot")
    cells = [records.read("e").cell("category=qa", asked) for asked in words]
    assert [cell.printed for cell in cells] == ["2.00", "2.00", "2.00"]


def test_of_several_the_one_with_the_methods_defaults_is_meant(records):
    """configs/method/spine.yaml has 24 nodes; of recycling none is known to be usual but what that file says."""
    experiment = records.read("e")
    (hot,) = (run for run in experiment.runs if run.folder.name == "recycling-24-hot")
    prompt = made("recycling (hot)", hot.answers[:1], method=hot.settings["method"] | {"recycle_prompt": True})
    plain = made("recycling (hot)", hot.answers, method=hot.settings["method"] | {"recycle_prompt": False})
    experiment.runs[1:2] = [prompt, plain]
    assert experiment.cell("spine").text == "3.50" and experiment.cell("spine nodes=8").text == "3.00"
    assert experiment.cell("recycling nodes=24 questions").text == "2"
    assert experiment.cell("recycling nodes=24 recycle_prompt=true questions").text == "1"


def test_numbers_without_a_source_are_found():
    page = (
        "MAT is 2.05.\n`1.5` and [x](y2.5) and 95 % intervals\n| a | 3 nodes |\n| a | top 8 |\n- it gains 20 %\n"
        "<!-- source: a person -->\nand 3.5\n\n| 1 | 2 |\n<!-- end -->\nso <!-- = e spine -->2.05<!-- --> it is\n"
        "```bash\nx 1.5\n```\n"
    )
    assert [line.split(":")[0] for line in unsourced(page)] == ["1", "3", "5"]
    assert [line.split(":")[0] for line in unsourced(page, prose=False)] == ["3"]
    assert misplaced(page) == []


def test_marks_that_markdown_or_the_command_would_not_see_are_found():
    wrong = "<!-- = e spine -->2<!-- --> begins\n- <!-- = e spine -->2<!-- -->\na <!-- = e spine -->2\n"
    wrong += "<!-- source: x -->\n1.5\n\n<!-- results: e -->\n2.5\n<!-- end -->\n<!-- end -->\n"
    assert [line.split(":")[0] for line in misplaced(wrong)] == ["1", "2", "3", "4", "10"]


def test_words_with_commas_are_rows_each():
    assert list(expanded({"{method} {nodes}": "a,b nodes=1,2"})) == [
        ("a 1", "a nodes=1"), ("a 2", "a nodes=2"), ("b 1", "b nodes=1"), ("b 2", "b nodes=2"),
    ]  # fmt: skip
    assert list(expanded({"{category}": "category=mt_bench"})) == [("mt bench", "category=mt_bench")]


def test_the_command_fails_where_documents_are_stale(monkeypatch, capsys, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("a <!-- = gone spine -->2<!-- -->\n")
    monkeypatch.setattr(document_results, "document", lambda records, **how: document(records, tmp_path, **how))
    monkeypatch.setattr("sys.argv", ["prog", "--check"])
    with pytest.raises(SystemExit) as leaving:
        document_results.main()
    assert leaving.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "README.md:1: " in line and "gone: no runs here" in line
