"""The documents say what the shipped records say, and cells of a table what their queries ask for."""

import re
import shlex

import pytest

import evaluation.configuration.config  # noqa: F401  (configs/ resolve names by it)
from evaluation.configuration.jobs import compose
from evaluation.records.compact import FILE
from evaluation.report import REFERENCE
from evaluation.tables.experiment import Experiment
from model.errors import UserError
from tests.evaluation.made_runs import asked, made
from tools import document_results
from tools.document_results import BLOCK, FIGURES, ROOT, rendered

COMMANDS = dict(
    re.findall(
        r"^- ([\w-]+): `bash eval\.sh (.*)`$", (ROOT / "results/README.md").read_text(), flags=re.M
    )
)


@pytest.mark.slow
def test_the_documents_say_what_the_records_say(monkeypatch):
    assert {path.name for path in (ROOT / "docs/figures").iterdir()} == {
        *FIGURES,
        "answer.svg",
        "code.svg",
    }
    monkeypatch.setattr("sys.argv", ["prog", "--check"])
    document_results.main()


@pytest.mark.slow
def test_a_changed_cell_is_found_and_mended(monkeypatch, tmp_path, capsys):
    (tmp_path / "docs/figures").mkdir(parents=True)
    (tmp_path / "results").mkdir()
    (tmp_path / "results/README.md").write_text("no block")
    page = tmp_path / "README.md"
    right = (ROOT / "README.md").read_text()
    page.write_text(re.sub(r"(\| goose[^|]*\| )\d\.\d\d", r"\g<1>9.99", right))
    monkeypatch.setattr(document_results, "ROOT", tmp_path)
    monkeypatch.setattr(document_results, "FIGURES", {"topk.png": FIGURES["topk.png"]})
    monkeypatch.setattr("sys.argv", ["prog", "--check"])
    with pytest.raises(SystemExit):
        document_results.main()
    assert page.read_text() != right and "README.md: python -m tools" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["prog"])
    document_results.main()
    assert page.read_text() == right
    assert (tmp_path / "docs/figures/topk.png").stat().st_size > 1000
    page.write_text("<!-- results: order -->\n")
    with pytest.raises(SystemExit):
        document_results.main()
    assert "README.md: a block is not closed" in capsys.readouterr().err


def test_every_record_has_its_command():
    assert COMMANDS.keys() == {path.parent.name for path in REFERENCE.glob(f"*/{FILE}")}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_printed_command_runs_the_configurations_of_the_record(name, monkeypatch):
    # as where the record was made
    monkeypatch.setattr("torch.cuda.is_available", lambda: name.endswith("00"))
    pools = Experiment.read(REFERENCE / name).pools
    recorded = {(pool.method, pool.first.settings["max_new_tokens"]) for pool in pools}
    jobs = compose(shlex.split(COMMANDS[name])).jobs
    assert {(job.config.method.name, job.config.max_new_tokens) for job in jobs} == recorded
    assert len(jobs) >= len(pools)
    assert {job.folder.name for job in jobs} == {name}


@pytest.fixture
def experiment(monkeypatch):
    """Two sizes of dynamic and recycling, and a cold twin of the smaller recycling."""

    def run(name, nodes, steps, start="hot"):
        kinds = (("qa", steps[0]), ("rag", steps[1])) * 8
        answers = []
        for i, (category, n) in enumerate(kinds):
            answers.append(asked(i, category, [([n] * 2, 1.0)], output_ids=[[7] * 2 * n]))
        key = "tree_nodes" if name == "recycling" else "nodes"
        return made(f"{name} ({start})", answers, method={key: nodes, "depth": 3}, folder=name)

    runs = [
        run("recycling", 8, (1, 2)),
        run("recycling", 24, (2, 2)),
        run("recycling", 8, (1, 1), "cold"),
        run("dynamic", 8, (2, 4)),
        run("dynamic", 24, (3, 4)),
    ]
    monkeypatch.setattr(Experiment, "read", lambda folder: Experiment(runs))
    for cached in (document_results.shipped, document_results.table_of):
        cached.cache_clear()
    yield
    for cached in (document_results.shipped, document_results.table_of):
        cached.cache_clear()


def block(spec):
    return rendered(BLOCK.fullmatch(f"<!-- results: e\n{spec} -->\nold\n<!-- end -->"))


def test_a_table_has_its_rows_and_columns(experiment):
    table = block("""rows:
  dynamic: {where: drafter == 'dynamic' and start == 'hot', interval: false}
columns:
  8: budget == 8
  24: budget == 24
  ratio: {where: budget == 24, over: method == 'recycling (hot)' and budget == 8}
  equal nodes: {where: budget == 24, over: method == 'recycling (hot)' and budget == @row.budget}
  cold: start == 'cold'
""")
    assert "| method | 8 | 24 | ratio | equal nodes | cold |\n|---|---|---|---|---|---|\n" in table
    assert "| dynamic | 3.00 | 3.50 | 2.33 | 1.75 |  |" in table, "dynamic did not run cold"
    table = block("rows:\n  a: name == 'dynamic (hot), nodes=8'\ncolumns: {b: {in: e}}")
    assert re.search(r"\| a \| 3\.00 \[2\.\d+,\xa03\.\d+\] \|", table), (
        "no line ends in an interval"
    )


@pytest.mark.parametrize(
    ("column", "printed"),
    [
        ("{where: category == 'qa'}", "2.00"),  # all the same: no interval
        ("{where: category == 'qa', over: method == 'recycling (hot)' and budget == 8}", "2.00"),
        ("{show: tokens_per_second, over: method == 'recycling (hot)' and budget == 8}", "2.00"),
        ("{begin: 1, end: 3, show: new_tokens}", "16"),  # the second step of qa; rag's begins at 4
        ("{loops: false, show: new_tokens}", "48"),  # first steps
    ],
)
def test_cells(column, printed, experiment, monkeypatch):
    monkeypatch.setattr(document_results.metrics, "loop_start", lambda ids: 1)
    row = "drafter == 'dynamic' and budget == 8"
    assert f"| a | {printed} |" in block(f"rows: {{a: {row}}}\ncolumns: {{b: {column}}}")


def test_a_query_of_several_rows_is_refused(experiment):
    with pytest.raises(UserError, match="fits 2 rows: dynamic"):
        block("rows: {a: drafter == 'dynamic'}\ncolumns: {b: start == 'hot'}")
