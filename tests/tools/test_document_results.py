"""The documents say what the shipped records say, and cells of a table what its words ask for."""

import hashlib
import json
import re
import shlex
import shutil

import pytest
from omegaconf import OmegaConf

import evaluation.configuration.config  # noqa: F401  (configs/ resolve names by it)
from evaluation.configuration.config import changed_sampling
from evaluation.configuration.jobs import compose, drafts_from_tree
from evaluation.loading.settings import ModelSettings
from evaluation.report import REFERENCE, against_shipped
from evaluation.running.runner import recorded_method
from evaluation.statistics.experiment import Experiment
from model.errors import UserError
from model.recycling import build_template
from tests.evaluation.made_runs import asked, made
from tools import document_results
from tools.document_results import BLOCK, FIGURES, ROOT, Shipped, expanded, rendered


@pytest.mark.slow
def test_the_documents_say_what_the_records_say(monkeypatch):
    assert {path.name for path in (ROOT / "docs/figures").iterdir()} == {*FIGURES, "answer.svg"}
    monkeypatch.setattr("sys.argv", ["prog", "--check"])
    document_results.main()


def test_a_changed_cell_and_figure_are_found_and_mended(monkeypatch, tmp_path, capsys):
    (tmp_path / "docs/figures").mkdir(parents=True)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    page = tmp_path / "README.md"
    right = (ROOT / "README.md").read_text()
    page.write_text(re.sub(r"(\| goose[^|]*\| )\d\.\d\d", r"\g<1>9.99", right))
    shutil.copy(ROOT / "docs/figures/tree_size.png", tmp_path / "docs/figures/topk.png")
    monkeypatch.setattr(document_results, "ROOT", tmp_path)
    monkeypatch.setattr(document_results, "FIGURES", {"topk.png": FIGURES["topk.png"]})
    monkeypatch.setattr("sys.argv", ["prog", "--check"])
    with pytest.raises(SystemExit) as leaving:
        document_results.main()
    assert leaving.value.code == 2 and page.read_text() != right
    assert capsys.readouterr().out.count("not what the records say") == 2
    monkeypatch.setattr("sys.argv", ["prog"])
    document_results.main()
    assert page.read_text() == right and "topk.png: written" in capsys.readouterr().out
    page.write_text("<!-- results: order -->\n")
    with pytest.raises(SystemExit):
        document_results.main()
    assert "README.md: a block is not closed" in capsys.readouterr().err


# settings that methods have lost since; each was at its default
GONE = (
    "version",
    "table_path",
    "pool_from_prompt",
)


def wanted(model, bench, method, tree, start, rest):
    """The settings of a run, as its record and its job name them; a method without state has no start and no order."""
    order = bench["order"] if start not in (None, "cold") else None
    bench = {
        key: bench.get(key)
        for key in ("name", "begin", "end", "per_category", "categories", "spread", "split")
    }
    method = {key: value for key, value in method.items() if key not in ("drafter", "start")}
    model = {key: model.get(key) for key in ModelSettings.__annotations__}
    rest = {
        key: rest[key]
        for key in ("max_new_tokens", "num_choices", "seed", "phases", "timed", "sampling")
    }
    return json.dumps([model, bench, order, method, tree, start, rest], sort_keys=True)


def of_record(run):
    """Without what is GONE, and the nodes of tree=auto, which were recorded under another name."""
    method, config = run.settings["method"], run.identity.asked
    kept = {k: v for k, v in method.items() if not k.endswith("sha256") and k not in GONE}
    kept |= (
        {"nodes": kept.pop("tree_nodes")}
        if kept.get("tree") == "auto" and "tree_nodes" in kept
        else {}
    )
    tree = method.get("tree_sha256") if kept.get("tree") != "auto" else None
    start = config["start"] if "start" in method else None
    return wanted(config["model"], config["bench"], kept, tree, start, run.settings)


def of_job(job, stateful):
    config = OmegaConf.to_container(job.config, resolve=True)
    sampling, tree, k, digest = (
        changed_sampling(config),
        config["tree"],
        config["method"].get("k", 32),
        None,
    )
    method = recorded_method(config["method"], config)
    if drafts_from_tree(job.config.method, job.config.tree):
        method |= {"tree": tree["name"]} | (
            {"nodes": tree["nodes"]} if tree["name"] == "auto" else {}
        )
        if tree["name"] != "auto":
            nodes = [list(path) for path in build_template(**tree, k=k).rank_paths[1:]]
            method["tree_nodes"], digest = (
                len(nodes),
                hashlib.sha256(repr(nodes).encode()).hexdigest(),
            )
    start = config["start"] if method["name"] in stateful else None
    return wanted(
        config["model"], config["bench"], method, digest, start, config | {"sampling": sampling}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(path.parent.name for path in REFERENCE.glob("*/runs.jsonl.xz"))
)
def test_the_printed_command_gives_the_settings_of_the_record(name, monkeypatch):
    """Repeats are not compared: `speed` is one of the three of its command."""
    # as where the record was made
    monkeypatch.setattr("torch.cuda.is_available", lambda: name.endswith("200"))
    shipped = Shipped(name)
    stateful = {
        run.settings["method"]["name"]
        for run in shipped.experiment.runs
        if "start" in run.settings["method"]
    }
    jobs = compose(shlex.split(shipped.command)[2:]).jobs
    assert {of_job(job, stateful) for job in jobs} == {
        of_record(run) for run in shipped.experiment.runs
    }
    assert {job.folder.name for job in jobs} == {name}
    line = against_shipped(
        shipped.experiment, ROOT / "results" / f"{name.partition('-')[0]}-of-mine"
    )
    assert (
        f"/{name}: " in line
        and "equal in {0} of {0} conf".format(len(shipped.configurations)) in line
    )


@pytest.fixture
def experiment(monkeypatch):
    """Two sizes of spine and recycling, and a cold twin of the smaller recycling."""
    command = ["experiment=budget", "tree.nodes=choice(8)", "name=x"]

    def run(name, nodes, steps, start="hot"):
        kinds = (("qa", steps[0], 0.0), ("rag", steps[1], 0.5)) * 8
        answers = [
            asked(i, c, [([n] * 2, 1.0)], repeated_3grams=[share], output_ids=[[7] * 2 * n])
            for i, (c, n, share) in enumerate(kinds)
        ]
        key = "tree_nodes" if name == "recycling" else "nodes"
        more = {
            "started": f"2026-{nodes}",
            "command": ["python", "-m", "evaluation.run", *command, "results_dir=x"],
        }
        method = {key: nodes, "depth": 3}
        return made(
            f"{name} ({start})", answers, method=method, folder=f"{name}-{nodes}-{start}", **more
        )

    runs = [
        run("recycling", 8, (1, 2)), run("recycling", 24, (2, 2)), run("recycling", 8, (1, 1), "cold"),
        run("spine", 8, (2, 4)), run("spine", 24, (3, 4)),
    ]  # fmt: skip
    monkeypatch.setattr(Experiment, "read", lambda folder: Experiment(runs))
    made_of_runs = Shipped.__wrapped__("e")
    monkeypatch.setattr(document_results, "Shipped", lambda name: made_of_runs)
    return made_of_runs


def block(spec):
    return rendered(BLOCK.fullmatch(f"<!-- results: e\n{spec} -->\nold\n<!-- end -->"))


def test_a_table_has_its_rows_and_columns(experiment):
    columns = '{"{nodes}": "nodes=8,24", ratio: nodes=24 over recycling nodes=8, by hand: interval=no nodes=8}'
    table = block(
        f'rows: {{"{{method}}": "spine,recycling start=hot"}}\ncolumns: {columns}\nmore: {{m: {{spine: x}}}}'
    )
    assert "| method | 8 | 24 | ratio | by hand | m |\n|---|---|---|---|---|---|\n" in table
    cells = r"3\.00 \[2\.\d+,\xa03\.\d+\] \| 3\.50 \[3\.\d+,\xa03\.\d+\] \| 2\.33 \[[12]\.\d+,\xa02\.\d+\] \| 3\.00"
    assert re.search(rf"\| spine \| {cells} \| x \|", table), "no line ends inside an interval"
    command = "bash eval.sh experiment=budget 'tree.nodes=choice(8)' method=recycling,spine name=e"
    assert table.endswith(f"\n\n`{command}`\n<!-- end -->")
    listed = block(
        "rows: {a: [spine nodes=8, in=e recycling nodes=24]}\ncolumns: {n: nodes, questions: questions}"
    )
    assert "| a | 8 | 16 |" in listed


def test_what_was_not_measured_is_a_gap_only_where_gaps_are_meant_and_commas_make_rows(experiment):
    rows = [(f"{method} {n}", [f"{method} nodes={n}"]) for method in "ab" for n in (1, 2)]
    assert list(expanded({"{method} {nodes}": "a,b nodes=1,2"})) == rows
    assert list(expanded({"{category}": "category=mt_bench"})) == [
        ("mt bench", ["category=mt_bench"])
    ]
    spec = "rows: {'a {nodes}': 'recycling nodes=8,24'}\ncolumns: {cold: start=cold}"
    assert "| a 8 | 1.00 |\n| a 24 |  |" in block(f"gaps: true\n{spec}")
    with pytest.raises(UserError, match="no configuration is 'recycling nodes=24 start=cold'"):
        block(spec)


def test_cells_and_without_columns_what_was_measured(experiment, monkeypatch):
    assert (
        "16 questions of file (16 turns, 48 tokens); 1 repeat; toy (float32) on a machine;"
        in block("")
    )
    assert experiment.cell("spine nodes=8 category=qa") == "2.00", "all the same: no interval"
    assert experiment.cell("spine nodes=8 category=qa over recycling start=hot") == "2.00"
    assert [
        experiment.cell(f"spine nodes=8 repeated={r} interval=no") for r in ("0-10", "40-60")
    ] == ["2.00", "4.00"]
    assert experiment.cell("spine nodes=8 tokens_per_second over recycling start=hot") == "2.00", (
        "6 tokens/s over 3"
    )
    assert experiment.cell("spine nodes=8 repeated=0-60 new_tokens") == "96"
    assert experiment.cell("spine nodes=8 tokens=1-3 new_tokens") == "16", (
        "the second step of qa; rag's begins at 4"
    )
    dev = document_results.halved(
        experiment.find({"method": "spine", "nodes": "8"}), "dev"
    ).questions
    assert sorted(int(key.partition(":")[0]) for key in dev) == [0, 1, 4, 5, 8, 9, 12, 13], (
        "every other of qa, of rag"
    )
    assert experiment.cell("spine nodes=8 half=dev new_tokens") == "48"
    monkeypatch.setattr(document_results.metrics, "loop_start", lambda ids: 1)
    assert experiment.cell("spine nodes=8 loops=no new_tokens") == "48", "first steps"
    assert experiment.cell("spine") == experiment.cell("spine nodes=24"), (
        "as configs/method/spine.yaml"
    )
    # of several, of none
    for words in (
        "recycling",
        "spine width=8",
        "spine nodes=8 over recycling fast=1",
    ):
        with pytest.raises(UserError, match="e: .* fits"):
            experiment.cell(words)
