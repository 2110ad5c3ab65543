"""From lists of settings to jobs, by hand."""

from evaluation.configuration.jobs import expand, further, in_rounds

CONFIGS = {
    "method/plain": {"name": "plain", "drafter": None},
    "method/tree": {"name": "tree", "drafter": "model.recycling.TokenRecycling", "k": 8},
    "method/sized": {"name": "sized", "drafter": "model.copying.spine.Spine", "nodes": 24},
    "tree/best": {"name": "best", "nodes": 24, "depth": None},
}
DEFAULTS = {"method": "tree", "tree": "best"}


def product(*lists):
    jobs = [()]
    for values in lists:
        jobs = [(*job, value) for job in jobs for value in values]
    return jobs


METHODS = ["method=plain", "method=tree", "method=sized"]
BUDGETS = [[f"tree.nodes={n}" for n in (8, 16)], [f"method.nodes={n}" for n in (8, 16)]]


def test_a_job_has_the_settings_of_its_method_alone_and_none_comes_twice():
    jobs, used = expand(product(METHODS, *BUDGETS), DEFAULTS, CONFIGS.get)
    assert jobs == [
        ["method=plain"],
        ["method=tree", "tree.nodes=8"],
        ["method=tree", "tree.nodes=16"],
        ["method=sized", "method.nodes=8"],
        ["method=sized", "method.nodes=16"],
    ]
    assert used == {"method", "tree.nodes", "method.nodes"}


def test_equal_keys_have_one_value_in_each_job():
    CONFIGS["method/both"] = {"name": "both", "drafter": "model.recycling.TokenRecycling", "nodes": 1}
    jobs, _ = expand(product(["method=both"], *BUDGETS), DEFAULTS, CONFIGS.get)
    assert len(jobs) == 4, "every combination"
    jobs, _ = expand(product(["method=both"], *BUDGETS), DEFAULTS, CONFIGS.get, {"tree.nodes", "method.nodes"})
    assert jobs == [["method=both", f"tree.nodes={n}", f"method.nodes={n}"] for n in (8, 16)]


def test_a_further_job_counts_while_the_product_goes_through_its_values():
    jobs = [["method=tree", "tree.nodes=8"], ["method=sized", "tree.nodes=8"]]
    assert further(jobs, [["method=tree", "k=4"]]) == [["tree.nodes=8", "method=tree", "k=4"]] * 2
    assert further(jobs, [["method=plain"]]) == [], "which a narrower command line left out"
    assert further(jobs, [["method=tree", "tree.nodes=63"]]) == []
    sized = further(jobs, [["method=tree", "tree.nodes=63"]], {"tree.nodes"})
    assert sized == [["method=tree", "tree.nodes=63"]] * 2, "a published size next to swept budgets"


def test_the_jobs_of_a_repeat_are_together():
    jobs = [["method=a", "repeat=0"], ["method=a", "repeat=1"], ["method=b", "repeat=0"], ["method=b", "repeat=1"]]
    assert in_rounds(jobs) == [jobs[0], jobs[2], jobs[1], jobs[3]]
