"""What is compared with what: only identical questions, shards together, overlapping selections apart."""

import math

import pytest

from evaluation.figures import draw_all
from evaluation.page.facts import facts
from evaluation.records.questions import Question
from evaluation.records.runs import natural, read_runs
from evaluation.statistics.agreement import audits
from evaluation.statistics.experiment import Experiment
from evaluation.statistics.pools import distinguish, pools
from evaluation.tree_search import pick
from tests.evaluation.conftest import answers_in
from tests.evaluation.made_runs import asked, in_terminal, made, shard, write


def rows(ids, seconds=1.0, prompt="why?"):
    """One answer of four tokens to each of the questions, odd ones half as fast."""
    return [asked(i, "qa", [([2, 2], seconds * (1 + i % 2))], prompt) for i in ids]


def overall(runs, label):
    table = Experiment(runs).table
    return table[(table["method"] == label) & (table["category"] == "overall")]


def test_a_question_is_known_by_its_hash_which_runs_record(evaluate, tmp_path):
    one = Question(1, "qa", ("why?",))
    others = [
        Question(1, "qa", ("how?",)),
        Question(1, "rag", ("why?",)),
        Question(1, "qa", ("why?", "how?")),
    ]
    assert len({one.sha256, *(o.sha256 for o in others)}) == 4 and len(one.sha256) == 16
    assert one.key == f"1:{one.sha256}" != Question(2, "qa", ("why?",)).key

    assert (
        evaluate(
            "method=vanilla", "bench.end=2", f"run_dir={tmp_path / 'experiment/runs/one'}"
        ).code
        == 0
    )
    (run,) = read_runs(tmp_path / "experiment")
    first, second = answers_in(tmp_path / "experiment")
    turns = ("what is the answer to question 0?", "and why?")
    assert (
        first["question_sha256"]
        == Question(10, "writing", turns).sha256
        != second["question_sha256"]
    )
    assert run.question_keys == tuple(run.by_question.index)
    assert run.question_keys[0] == f"10:{first['question_sha256']}"


def test_two_files_of_one_name_and_edited_questions_of_one_file_are_never_paired(drawn, tmp_path):
    """They had been: a speedup over other prompts, in one block of the table."""
    runs = [
        shard("vanilla", rows(range(4), prompt="a")),
        shard("pld", rows(range(4), 0.5, prompt="b"), bench={"sha256": "g"}),
    ]
    table = Experiment(runs).table
    assert table["questions_sha256"].nunique() == 2 and table["bench_questions"].eq(4).all()
    assert math.isnan(overall(runs, "pld")["speedup_vanilla"].item()) and audits(pools(runs)) == []
    assert in_terminal(runs).count("toy, file, questions #") == 2, "a block each"
    assert {p.stem.rsplit("-", 1)[-1] for p in draw_all(Experiment(runs), tmp_path)} >= set(
        table["questions_sha256"]
    )
    edited = [
        made("vanilla", rows([0, 1, 2])),
        made("pld", rows([0, 1], 0.5) + rows([2], 0.1, prompt="edited")),
    ]
    assert overall(edited, "pld")["speedup_vanilla"].item() == pytest.approx(2.0), (
        "by the hash alone"
    )


def test_shards_join_and_are_paired_with_the_whole():
    """Two halves of a bench had been compared with one another, as both have so many questions."""
    whole = [shard("vanilla", rows(range(6)), repeat=r) for r in (0, 1)]
    halves = [
        shard("pld", rows(part, 0.5 * (1 + r)), repeat=r) for r in (0, 1) for part in (range(3), range(3, 6))
    ]  # fmt: skip
    runs = [*whole, *halves]
    _, pool = pools(runs)
    assert (
        len(pool.runs) == 4
        and len(pool.repeats) == 2
        and pool.questions == 6
        and pool.variant == ""
    )
    row = overall(runs, "pld").iloc[0]
    assert (row["questions"], row["repeats"], row["bench_questions"], row["new_tokens"]) == (
        6,
        2,
        6,
        48,
    )
    # repeat 0 twice as fast as vanilla, repeat 1 just as fast; 8 and 4, 4 and 2 tokens/s by turns
    assert row["speedup_vanilla"] == pytest.approx(1.5)
    assert row["speedup_vanilla_std"] == pytest.approx(math.sqrt(0.5))
    assert row["tokens_per_second"] == pytest.approx(4.5)
    assert row["tokens_per_second_std"] == pytest.approx(math.sqrt(4.5))
    assert Experiment(runs).table["questions_sha256"].nunique() == 1
    assert facts(Experiment(runs).named)["bench"][0][0].startswith("file, 6 questions")


def test_dev_and_held_out_are_rows_of_their_own_and_slices_of_either_are_shards():
    """They had been one row of all questions, without a word."""

    def run(ids, **bench):
        return shard("pld", rows(ids), config={"bench": {"begin": None, "end": None} | bench})

    apart = [shard("vanilla", rows([0, 1])), shard("pld", rows([2, 3]))]
    assert math.isnan(overall(apart, "pld")["speedup_vanilla"].item()), "no question in common"
    halves = [run([0, 1], split="dev"), run([2, 3], split="held_out")]
    assert [pool.questions for pool in pools(halves)] == [2, 2]
    for other in ({"categories": ["qa"]}, {"per_category": 2}):
        assert len(pools([run([0, 1]), run([2, 3], **other)])) == 2
    assert [pool.questions for pool in pools([halves[0], run([4], split="dev", begin=4)])] == [3]


def test_a_part_beside_the_whole_stays_apart_and_finds_its_own_baseline():
    runs = [
        shard("vanilla", rows(range(2), 2.0)),
        shard("vanilla", rows(range(6))),
        shard("pld", rows(range(2), 1.0)),
        shard("pld", rows(range(6), 0.25)),
        shard("rest", rows(range(3), 0.5)),
    ]
    pooled = pools(runs)
    assert [(p.label, p.questions) for p in pooled] == [
        ("vanilla", 6), ("pld", 6), ("rest", 3), ("vanilla", 2), ("pld", 2),
    ]  # fmt: skip
    assert overall(runs, "pld")["speedup_vanilla"].tolist() == pytest.approx([4.0, 2.0])
    rest = next(p for p in pooled if p.label == "rest")
    assert rest.baselines["vanilla"].questions == 6, "the one with most questions in common"
    assert overall(runs, "rest")["speedup_vanilla"].item() == pytest.approx(2.0)
    text = in_terminal(runs)
    assert "toy, file, 6 questions, overall" in text and "toy, file, 2 questions, overall" in text
    parts = [
        shard("recycling (hot)", rows(part), bench={"ids_sha256": str(part)})
        for part in ((0, 1), (2, 3))
    ]
    assert [pool.questions for pool in pools(parts)] == [2, 2], (
        "each part began with an empty matrix"
    )
    trees = [
        shard("recycling (hot)", rows(range(n)), method={"tree": "x"}, draft_tree=[[0]])
        for n in (2, 4)
    ]
    assert pick(trees, None).runs == (trees[1],), (
        "a search takes the run of most questions, not both"
    )


def test_a_shard_of_a_repeat_that_is_missing_is_no_guess():
    runs = [shard("vanilla", rows(range(8)), repeat=r) for r in (0, 1)]
    runs += [
        shard("pld", rows(part, 0.5), repeat=r)
        for part, r in ((range(4), 0), (range(4, 8), 0), (range(4), 1))
    ]
    row = overall(runs, "pld").iloc[0]
    assert (row["questions"], row["repeats"]) == (8, 2)
    assert row["speedup_vanilla"] == pytest.approx(2.0) and row[
        "speedup_vanilla_low"
    ] == pytest.approx(2.0)


def test_numbers_sort_as_numbers(tmp_path):
    """Runs had sorted as strings, 480 before 60."""
    assert (
        natural("k=8 of 16") < natural("k=16 of 8")
        and natural("60") < natural("480")
        and natural("") < natural("a")
    )
    for capacity in (16, 8, 128):
        write(made("ngram_cache", rows([1]), method={"capacity": capacity}), tmp_path / "sizes")
    assert [run.facets["capacity"] for run in read_runs(tmp_path / "sizes")] == [
        8,
        16,
        128,
    ]


def test_only_settings_that_are_not_usual_are_named_where_many_differ():
    usual = {"nodes": 24, "k": 8, "pairs": 65536, "copy": True, "siblings": True}
    changes = [
        {},
        {"nodes": 8},
        {"nodes": 80},
        {"k": 4},
        {"pairs": 0},
        {"copy": False},
        {"siblings": False},
    ]
    assert distinguish(
        [made("dynamic (hot)", [], method=usual | change) for change in changes]
    ) == [
        *("nodes=24", "nodes=8", "nodes=80"),
        *("nodes=24, k=4", "nodes=24, pairs=0", "nodes=24, no copy", "nodes=24, no siblings"),
    ]
    # where nothing is usual, and where few settings differ, all are named
    few = [made("x", [], method=usual | change) for change in ({"k": 4}, {"pairs": 0})]
    assert distinguish(few) == ["k=4, pairs=65536", "k=8, pairs=0"]
    runs = [made("pld", rows([1]), model={"attention": kind}) for kind in ("sdpa", "eager")]
    assert [pool.name for pool in pools(runs)] == ["pld, attention=sdpa", "pld, attention=eager"], (
        "the model alone"
    )
    runs = [
        made(
            "recycling (hot)",
            rows([1]),
            method={"k": 8, "tree": "best", "tree_nodes": n},
            bench={"order": order},
        )
        for n, order in ((8, "file"), (24, "file"), (24, "shuffled-1"))
    ]
    runs += [made("vanilla", rows([1]), repeat=repeat) for repeat in (0, 1)]
    variants = ["8 nodes, file order", "24 nodes, file order", "24 nodes, shuffled-1 order", ""]
    assert [pool.variant for pool in pools(runs)] == variants


def test_servers_are_told_apart_by_their_address_only_where_nothing_else_does():
    def served(**more):
        method = {"drafter": "server", "engine": "vllm", "speculation": "none", "model": "m"} | more
        return made("vllm", rows([1]), method=method)

    assert distinguish([served(url="a"), served(url="b")]) == ["url=a", "url=b"]
    assert distinguish([served(url="a"), served(url="b", model="n")]) == ["model=m", "model=n"]
