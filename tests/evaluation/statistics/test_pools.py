"""What is compared with what: only identical questions, shards together, overlapping selections apart."""

import math

import pytest

from evaluation.page.facts import facts
from evaluation.records.rows import Question
from evaluation.records.runs import read_runs
from evaluation.statistics.agreement import audits
from evaluation.statistics.pools import distinguish, pools
from evaluation.tables.experiment import Experiment
from evaluation.tables.notes import gains
from tests.evaluation.conftest import answers_in
from tests.evaluation.made_runs import asked, in_terminal, made, overall, shard


def rows(ids, seconds=1.0, prompt="why?"):
    """One answer of four tokens to each of the questions, odd ones half as fast."""
    return [asked(i, "qa", [([2, 2], seconds * (1 + i % 2))], prompt) for i in ids]


def test_a_question_is_known_by_its_hash_which_runs_record(evaluate, tmp_path):
    folder = tmp_path / "experiment"
    assert evaluate("method=vanilla", "bench.end=2", f"run_dir={folder / 'runs/one'}").code == 0
    (run,) = read_runs(folder)
    first, second = answers_in(folder)
    question = Question(10, "writing", ("what is the answer to question 0?", "and why?"))
    assert first["question_sha256"] == question.sha256 != second["question_sha256"]
    assert run.question_keys == tuple(run.by_question.index)
    assert run.question_keys[0] == question.key


def test_two_files_of_one_name_and_edited_questions_of_one_file_are_never_paired():
    """They had been: a speedup over other prompts, in one block of the table."""
    other = shard("pld", rows(range(4), 0.5, prompt="b"), bench={"sha256": "g"})
    runs = [shard("vanilla", rows(range(4), prompt="a")), other]
    assert math.isnan(overall(runs).loc["pld", "speedup_vanilla"]) and audits(pools(runs)) == []
    assert in_terminal(runs).count("toy, file, questions #") == 2, "a block each"
    edited = made("pld", rows([0, 1], 0.5) + rows([2], 0.1, prompt="edited"))
    speedup = overall([made("vanilla", rows([0, 1, 2])), edited]).loc["pld", "speedup_vanilla"]
    assert speedup == pytest.approx(2.0), "by the hash alone"


def test_shards_join_and_are_paired_with_the_whole():
    """Two halves of a bench had been compared with one another, as both have so many questions."""
    runs = []
    for repeat in (0, 1):
        runs.append(shard("vanilla", rows(range(6)), repeat=repeat))
        for part in (range(3), range(3, 6)):
            runs.append(shard("pld", rows(part, 0.5 * (1 + repeat)), repeat=repeat))
    _, pool = pools(runs)
    assert (len(pool.runs), len(pool.repeats), pool.questions, pool.variant) == (4, 2, 6, "")
    row = overall(runs).loc["pld"]
    counts = row[["questions", "repeats", "bench_questions", "new_tokens"]]
    assert counts.tolist() == [6, 2, 6, 48]
    # repeat 0 twice as fast as vanilla, repeat 1 just as fast; 8 and 4, 4 and 2 tokens/s by turns
    assert row["speedup_vanilla"] == pytest.approx(1.5)
    assert row["speedup_vanilla_std"] == pytest.approx(math.sqrt(0.5))
    assert row["tokens_per_second"] == pytest.approx(4.5)
    assert next(iter(facts(Experiment(runs).pools)["bench"])).startswith("file, 6 questions")


@pytest.mark.parametrize(
    ("one", "other", "questions"),
    [
        ({"split": "dev"}, {"split": "held_out"}, [2, 2]),
        ({}, {"categories": ["qa"]}, [2, 2]),
        ({"split": "dev"}, {"split": "dev", "begin": 4}, [4]),
    ],
)
def test_selections_are_rows_of_their_own_and_slices_of_one_are_shards(one, other, questions):
    """They had been one row of all questions, without a word."""
    runs = []
    for ids, part in (([0, 1], one), ([2, 3], other)):
        bench = {"begin": None, "end": None} | part
        runs.append(shard("pld", rows(ids), config={"bench": bench}))
    assert [pool.questions for pool in pools(runs)] == questions


def test_a_part_beside_the_whole_stays_apart_and_finds_its_own_baseline():
    runs = [
        shard("vanilla", rows(range(2), 2.0)),
        shard("vanilla", rows(range(6))),
        shard("pld", rows(range(2), 1.0)),
        shard("pld", rows(range(6), 0.25)),
        shard("rest", rows(range(3), 0.5)),
    ]
    pooled = [(pool.label, pool.questions) for pool in pools(runs)]
    assert pooled == [("vanilla", 6), ("pld", 6), ("rest", 3), ("vanilla", 2), ("pld", 2)]
    speedups = overall(runs)["speedup_vanilla"]
    assert speedups["pld"].tolist() == pytest.approx([4.0, 2.0])
    assert speedups["rest"] == pytest.approx(2.0), "over the one with most questions in common"
    assert "toy, file, 2 questions, overall" in in_terminal(runs)


def test_parts_of_a_method_with_state_are_no_shards():
    parts = []
    for ids in ((0, 1), (2, 3)):
        parts.append(shard("recycling (hot)", rows(ids), bench={"ids_sha256": str(ids)}))
    assert [pool.questions for pool in pools(parts)] == [2, 2], "each began with an empty matrix"


USUAL = {"nodes": 24, "k": 8, "pairs": 65536, "copy": True, "siblings": True}
TREE = {"tree": "best", "tree_nodes": 8}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        # of many settings that differ, only unusual values are named
        (
            [USUAL | change for change in ({}, {"nodes": 8}, {"k": 4}, {"copy": False}, {"pairs": 0})]
            + [USUAL | {"siblings": False}],
            ["nodes=24", "nodes=8", "nodes=24, k=4", "nodes=24, no copy", "nodes=24, pairs=0",
             "nodes=24, no siblings"],
        ),
        ([USUAL | {"k": 4}, USUAL | {"pairs": 0}], ["k=4, pairs=65536", "k=8, pairs=0"]),
        ([TREE, TREE | {"tree_nodes": 0}], ["8 nodes", "0 nodes"]),
        ([TREE, {"tree": "2.2.2", "tree_nodes": 80}], ["best (8)", "2.2.2 (80)"]),
        # a server's address only where nothing else differs
        ([{"url": "a"}, {"url": "b"}], ["url=a", "url=b"]),
        ([{"url": "a", "model": "m"}, {"url": "b", "model": "n"}], ["model=m", "model=n"]),
        ([TREE, TREE], ["#1", "#2"]),
    ],
)  # fmt: skip
def test_variants_are_named_by_the_settings_that_differ(settings, words):
    assert distinguish([made("x", [], method=method) for method in settings]) == words


def test_variants_by_the_model_and_the_order():
    runs = [made("pld", rows([1]), model={"attention": kind}) for kind in ("sdpa", "eager")]
    assert [pool.name for pool in pools(runs)] == ["pld, attention=sdpa", "pld, attention=eager"]
    runs = [made("pld", rows([1]), bench={"order": order}) for order in ("file", "shuffled-1")]
    assert [pool.variant for pool in pools(runs)] == ["file order", "shuffled-1 order"]


def test_a_method_is_named_next_to_recycling_of_equal_nodes_and_start():
    def run(label, lengths, nodes=None):
        answers = [asked(i, "qa", [(lengths, 1.0)], "why?") for i in range(8)]
        return shard(label, answers, method={"nodes": nodes} if nodes else {})

    recycling = [run("recycling (hot)", [2, 2], 4), run("recycling (hot)", [4], 8)]
    others = [run("racer (hot)", [3, 3], 4), run("racer (cold)", [1], 4), run("pld", [1, 1])]
    _, *lines, last = gains(pools([run("vanilla", [1, 1]), *recycling, *others]))
    ratios = sorted((line.split()[0], line.split(": ")[1]) for line in lines)
    once = [("pld", "0.25 [0.25, 0.25]"), ("pld", "0.50 [0.50, 0.50]")]
    assert ratios == [*once, ("racer", "1.50 [1.50, 1.50]")]
    why = "no recycling has their questions, start, nodes and batch"
    assert last == f"  left out, as {why}: racer (cold)"


def test_shards_stay_joined_next_to_a_trial_of_their_questions():
    parts = [shard("pld", rows(part)) for part in (range(2), range(3), range(3, 6))]
    assert sorted(pool.questions for pool in pools(parts)) == [2, 6]
