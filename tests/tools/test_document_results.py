"""The documents say what the shipped records say, and cells of a table what its words ask for."""

import re
import shlex

import pytest

import evaluation.configuration.config  # noqa: F401  (configs/ resolve names by it)
from evaluation.configuration.jobs import compose
from evaluation.report import REFERENCE
from evaluation.statistics.experiment import Experiment
from model.errors import UserError
from tests.evaluation.made_runs import asked, made
from tools import document_results
from tools.document_results import BLOCK, FIGURES, ROOT, Shipped, expanded, rendered


@pytest.mark.slow
def test_the_documents_say_what_the_records_say(monkeypatch):
    assert {path.name for path in (ROOT / "docs/figures").iterdir()} == {*FIGURES, "answer.svg"}
    monkeypatch.setattr("sys.argv", ["prog", "--check"])
    document_results.main()


def test_a_changed_cell_is_found_and_mended(monkeypatch, tmp_path, capsys):
    (tmp_path / "docs/figures").mkdir(parents=True)
    page = tmp_path / "README.md"
    right = (ROOT / "README.md").read_text()
    page.write_text(re.sub(r"(\| goose[^|]*\| )\d\.\d\d", r"\g<1>9.99", right))
    monkeypatch.setattr(document_results, "ROOT", tmp_path)
    monkeypatch.setattr(document_results, "FIGURES", {"topk.png": FIGURES["topk.png"]})
    monkeypatch.setattr("sys.argv", ["prog", "--check"])
    with pytest.raises(SystemExit):
        document_results.main()
    assert page.read_text() != right
    assert capsys.readouterr().out.count("not what the records say") == 1
    monkeypatch.setattr("sys.argv", ["prog"])
    document_results.main()
    assert page.read_text() == right
    assert (tmp_path / "docs/figures/topk.png").stat().st_size > 1000
    page.write_text("<!-- results: order -->\n")
    with pytest.raises(SystemExit):
        document_results.main()
    assert "README.md: a block is not closed" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(path.parent.name for path in REFERENCE.glob("*/runs.jsonl.xz"))
)
def test_the_printed_command_runs_the_configurations_of_the_record(name, monkeypatch):
    # as where the record was made
    monkeypatch.setattr("torch.cuda.is_available", lambda: name.endswith("00"))
    shipped = Shipped(name)
    recorded = set()
    pools = set()
    for pool in shipped.experiment.pools:
        for run in pool.runs:
            method = run.settings["method"]
            learnt = (method["name"], method.get("tree")) == ("recycling", "auto")
            if method["name"] != document_results.GONE and not learnt:
                recorded.add((method["name"], run.settings["max_new_tokens"]))
                pools.add(id(pool))
    jobs = compose(shlex.split(shipped.command)[2:]).jobs
    assert {(job.config.method.name, job.config.max_new_tokens) for job in jobs} == recorded
    assert len(jobs) >= len(pools)
    assert {job.folder.name for job in jobs} == {name}


@pytest.fixture
def experiment(monkeypatch):
    """Two sizes of dynamic and recycling, and a cold twin of the smaller recycling."""
    command = ["experiment=budget", "tree.nodes=choice(8)", "name=x", "results_dir=x"]

    def run(name, nodes, steps, start="hot"):
        kinds = (("qa", steps[0]), ("rag", steps[1])) * 8
        answers = []
        for i, (category, n) in enumerate(kinds):
            answers.append(asked(i, category, [([n] * 2, 1.0)], output_ids=[[7] * 2 * n]))
        key = "tree_nodes" if name == "recycling" else "nodes"
        about = {"started": f"2026-{nodes}", "command": ["python", "-m", "run", *command]}
        method = {key: nodes, "depth": 3}
        return made(f"{name} ({start})", answers, method=method, folder=name, **about)

    runs = [
        run("recycling", 8, (1, 2)),
        run("recycling", 24, (2, 2)),
        run("recycling", 8, (1, 1), "cold"),
        run("dynamic", 8, (2, 4)),
        run("dynamic", 24, (3, 4)),
    ]
    monkeypatch.setattr(Experiment, "read", lambda folder: Experiment(runs))
    shipped = Shipped.__wrapped__("e")
    monkeypatch.setattr(document_results, "Shipped", lambda name: shipped)
    return shipped


def block(spec):
    return rendered(BLOCK.fullmatch(f"<!-- results: e\n{spec} -->\nold\n<!-- end -->"))


def test_a_table_has_its_rows_and_columns(experiment):
    columns = '{"{}": "nodes=8,24", ratio: nodes=24 over recycling nodes=8, cold: start=cold}'
    rows = '{"{}": "dynamic,recycling start=hot interval=no"}'
    table = block(f"rows: {rows}\ncolumns: {columns}")
    assert "| method | 8 | 24 | ratio | cold |\n|---|---|---|---|---|\n" in table
    assert "| dynamic | 3.00 | 3.50 | 2.33 |  |" in table, "dynamic did not run cold"
    assert Shipped("e").command == "bash eval.sh experiment=budget 'tree.nodes=choice(8)' name=e"
    table = block("rows: {a: dynamic nodes=8}\ncolumns: {b: in=e}")
    assert re.search(r"\| a \| 3\.00 \[2\.\d+,\xa03\.\d+\] \|", table), (
        "no line ends in an interval"
    )


def test_commas_make_rows():
    rows = list(expanded({"{} b": "a,c nodes=1", "d": "e"}))
    assert rows == [("a b", "a nodes=1"), ("c b", "c nodes=1"), ("d", "e")]


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ("category=qa", "2.00"),  # all the same: no interval
        ("category=qa over recycling start=hot", "2.00"),
        ("tokens_per_second over recycling start=hot", "2.00"),
        ("tokens=1-3 new_tokens", "16"),  # the second step of qa; rag's begins at 4
        ("loops=no new_tokens", "48"),  # first steps
    ],
)
def test_cells(words, printed, experiment, monkeypatch):
    monkeypatch.setattr(document_results.metrics, "loop_start", lambda ids: 1)
    assert experiment.cell(f"dynamic nodes=8 {words}") == printed


def test_settings_that_are_not_named_are_the_methods_own(experiment):
    assert experiment.cell("dynamic") == experiment.cell("dynamic nodes=24")
    with pytest.raises(UserError, match="e: several configurations fit"):
        experiment.cell("recycling")
