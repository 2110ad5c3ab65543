"""Sentences of README and results.md: each measured number is computed from a shipped record, and so is each order."""

import re
from functools import partial

import pandas as pd
import pytest

from evaluation.records.rows import tokens_and_steps
from evaluation.statistics.metrics import loop_start
from model.files import ROOT
from tools.document_results import ratio, row_of, shipped, table_of

NEW = [0.8203, 2]  # the last quarter of turns by their share of novel tokens
HOT = "start in ('hot', 'stateless') and budget == {} and drafter == '{}'"
COLD = "start in ('cold', 'stateless') and budget == {} and drafter == '{}'"
PLAIN = "name == 'vanilla'"


def row(record, query):
    found = row_of(table_of(record), f"{query} and category == 'overall'")
    assert found, (record, query)
    return found


def mat(record, query, **part):
    found = row(record, query)
    return (found["pool"].of_part(**part) if part else found)["mat"]


def over(record, query, base, column="mat"):
    """The paired ratio of two rows, and its interval."""
    values, name = ratio(row(record, query), row(record, base), column)
    return values[name], values[f"{name}_low"], values[f"{name}_high"]


def percent(number):
    return f"{100 * abs(number):.0f} %"


whole = partial(mat, "whole")
TREES = "drafter == 'suffix_decoding' and budget == 24 and start == 'hot' and branches == {}"
ALONE = "name == 'dynamic (hot), nodes=24, pairs=0, no copy, no siblings, no recycle_prompt'"
EQUAL = "drafter == 'recycling' and budget == 24"
PUBLISHED = HOT.format(80, "recycling")
DYNAMIC = "drafter == 'dynamic' and recycle_prompt == True and start == 'hot'"
RECYCLING = "drafter == 'recycling' and recycle_prompt == {} and start == 'hot'"


def looping():
    """How many answers of `long` fall into a loop, and how many there are."""
    (plain,) = (run for run in shipped("long").runs if run.label == "vanilla")
    texts = [
        ids for row in plain.answers for choice in row["choices"] for ids in choice["output_ids"]
    ]
    return sum(loop_start(ids) < len(ids) for ids in texts), len(texts)


def before_loops():
    """By how much MAT is lower before loops, from the least to the most of the page's rows."""
    table = table_of("whole").query("start in ('hot', 'stateless') and category == 'overall'")
    lower = []
    for found in table[table["drafter"] != "vanilla"].to_dict("records"):
        lower.append(1 - found["pool"].of_part(loops=False)["mat"] / found["mat"])
    return f"{100 * min(lower):.0f} to {percent(max(lower))}"


def of_k(k):
    """By how much MAT with k candidates is lower than with 8, in each order of all questions."""
    shape = "tree == 'shape' and budget == 24 and k == {}"
    records = ("topk-whole", "topk-order-0", "topk-order-1")
    return [1 - over(record, shape.format(k), shape.format(8))[0] for record in records]


def gpu_break_even():
    """Of 24 nodes, on an H100: a column of performance.md, which says that it is unrecorded."""
    lines = re.findall(r"^\| H100, .*", (ROOT / "docs/performance.md").read_text(), re.MULTILINE)
    column = [line.split("|")[4].strip() for line in lines]
    return f"{min(column)} to {max(column)}"


def kept(drafter, budget, record="whole"):
    """What state kept between prompts gains."""
    return percent(over(record, HOT.format(budget, drafter), COLD.format(budget, drafter))[0] - 1)


def on_half(odd):
    """MAT of `dynamic` over recycling's, 24 nodes, on the questions of odd or even ids."""
    mats = []
    for drafter in ("dynamic", "recycling"):
        answers = row("whole", HOT.format(24, drafter))["pool"].first.answers
        counts = [tokens_and_steps(each) for each in answers if each["question_id"] % 2 == odd]
        tokens, steps = map(sum, zip(*counts, strict=True))
        mats.append(tokens / steps)
    return mats[0] / mats[1]


def next_to_llama_cpp():
    """Tokens/s of this engine without and with drafts, and of llama.cpp without, over both rounds."""
    answers = pd.read_csv(ROOT / "results/reference/llama-cpp.csv")
    answers["speed"] = answers["tokens"] / answers["seconds"]
    mean = answers.groupby(["engine", "drafts"])["speed"].mean()
    rival = "llama.cpp (llama-cpp-python 0.3.36)"
    return mean["this engine", "none"], mean["this engine", "used"], mean[rival, "none"]


def breaks_even(record, digits):
    """On an H100, from `pld` to `dynamic`; of 80 nodes on CPUs, from Intel's to AMD's."""
    if record == "headline-h100":
        names = ("pld", "dynamic (auto)")
        found = [row(record, f"name == '{name}' and dtype == 'float16'") for name in names]
    else:
        found = [row(name, "name == 'recycling (hot)'") for name in ("headline-intel", record)]
    low, high = (each["break_even_mat"] for each in found)
    return f"{low:.{digits}f} to {high:.{digits}f}"


def lost_at_1():
    """The least and the most of a method's gain that is lost at temperature 1."""
    lost = []
    for drafter in ("recycling", "pld", "suffix_recycling", "dynamic"):
        at = "drafter == '{}' and temperature == {}"
        gains = [mat("temperature", at.format(drafter, value)) - 1 for value in (0, 1)]
        lost.append(1 - gains[1] / gains[0])
    return f"{100 * min(lost):.0f} to {percent(max(lost))}"


def lost_where_novel(query):
    """The share of a method's gain that is lost from the least to the most novel quarter."""
    gains = [mat("whole", query, novel=part) - 1 for part in ([0, 0.4376], NEW)]
    return 1 - gains[1] / gains[0]


def sentences():
    """Each page with a sentence of it, whose numbers are computed here."""
    headline = over("headline", "name == 'recycling (hot)'", PLAIN, "tokens_per_second")[0]
    plain, drafted, rival = next_to_llama_cpp()
    copied = whole("drafter == 'pld'", novel=NEW)
    recycled = whole(HOT.format(24, "recycling"), novel=NEW)
    dynamic = whole(HOT.format(24, "dynamic"), novel=NEW)
    alone = over("start", DYNAMIC, RECYCLING.format(False))[0]
    both = over("start", DYNAMIC, RECYCLING.format(True))[0]
    goose = whole(HOT.format(24, "goose"))
    cold = whole(COLD.format(80, "recycling"))
    tokens = row("whole", PLAIN)["new_tokens"]
    looped = 1 - row("whole", PLAIN)["pool"].of_part(loops=False)["new_tokens"] / tokens
    loops, answers = looping()
    mbpp = partial(kept, record="whole-mbpp")
    return [
        ("README.md", f"Recycling with 80 nodes on a CPU: {headline:.2f} of plain speed."),
        (
            "README.md",
            f"drafts gained nothing ({drafted / plain:.2f}); the engine alone was {plain / rival:.2f} times",
        ),
        (
            "README.md",
            f"copying accepts {copied:.2f}, recycling {recycled:.2f}, `dynamic` {dynamic:.2f} (24 nodes).",
        ),
        (
            "README.md",
            f"{over('whole', HOT.format(24, 'dynamic'), HOT.format(24, 'goose'))[0]:.2f} of `goose`",
        ),
        ("README.md", f"from {alone:.2f} to {both:.2f}."),
        (
            "docs/results.md",
            f"published with 80 ({goose:.2f} to {whole(PUBLISHED):.2f})",
        ),
        ("docs/results.md", f"Cold, recycling with 80 nodes ({cold:.2f}) accepts less"),
        (
            "docs/results.md",
            f"questions ({on_half(True):.2f} over recycling); on the even half it has {on_half(False):.2f}.",
        ),
        (
            "docs/results.md",
            f"accepts {over('rivals', TREES.format(True), TREES.format(False))[0]:.2f} times as much with trees",
        ),
        (
            "docs/results.md",
            f"fills {row('dynamic_tree', ALONE)['rows_per_forward'] - 1:.0f} of 24 nodes and gains"
            f" {percent(over('dynamic_tree', ALONE, EQUAL)[0] - 1)}.",
        ),
        ("docs/results.md", f"recorded run of this model at {breaks_even('headline-h100', 1)}"),
        ("docs/results.md", f"80 nodes cost [{breaks_even('headline', 0)} plain steps]."),
        ("docs/results.md", f"At T = 1, {lost_at_1()} of the gain is lost."),
        ("docs/results.md", f"{percent(looped)} of the tokens are in loops"),
        ("docs/results.md", f"before them, MAT is {before_loops()} lower"),
        ("docs/results.md", f"break even] at {gpu_break_even()},"),
        ("docs/results.md", f"is within {percent(max(map(abs, of_k(4))))} of"),
        (
            "docs/results.md",
            f"loses {100 * min(of_k(16)):.0f} to {percent(max(of_k(16)))} on all questions",
        ),
        (
            "docs/results.md",
            f"recycling gains {kept('recycling', 24)} (24 nodes) or {kept('recycling', 80)} (80) from kept"
            f" state, and `dynamic` {kept('dynamic', 24)};",
        ),
        (
            "docs/results.md",
            f"on MBPP {mbpp('recycling', 24)[:2]}, {mbpp('recycling', 80)[:2]} and {mbpp('dynamic', 24)}.",
        ),
        ("docs/results.md", f"{loops} of the {answers} answers fall into a loop."),
    ]


pytestmark = pytest.mark.slow  # whole records are read

# Orders that sentences state: the first row's figure over the second's is above 1, or not distinguishable from 1.
MORE, LEVEL = "more", "level"
ORDERS = [
    ("whole", HOT.format(24, "goose"), PUBLISHED, MORE),
    ("whole", HOT.format(24, "suffix_recycling"), PUBLISHED, LEVEL),
    ("whole", HOT.format(24, "racer"), PUBLISHED, LEVEL),
    ("whole", HOT.format(24, "dynamic"), PUBLISHED, MORE),
    *[
        ("whole", PUBLISHED, f"drafter == '{name}'", MORE)
        for name in ("suffix", "pld", "lookahead")
    ],
    ("whole", PUBLISHED, HOT.format(24, "ngram_cache"), MORE),
    ("whole", HOT.format(24, "ngram_cache"), HOT.format(24, "recycling"), MORE),
    *[
        ("whole-mbpp", PUBLISHED, HOT.format(24, name), MORE)
        for name in ("goose", "racer", "suffix_recycling")
    ],
    ("whole", PUBLISHED, "drafter == 'suffix_decoding' and start == 'hot'", MORE),
    *[
        ("whole", COLD.format(24, name), COLD.format(80, "recycling"), MORE)
        for name in ("goose", "suffix_recycling", "racer", "logitspec", "ngram_cache", "dynamic")
    ],
    ("whole", "drafter == 'suffix'", COLD.format(80, "recycling"), MORE),
    ("whole", "drafter == 'pld'", COLD.format(80, "recycling"), LEVEL),
]
# Numbers that are settings, sizes, names or definitions. The counts of equal turns have a test of their own.
SETTINGS = re.compile(
    r"""\d[\d,]*[ ](?:new[ ])?(?:tokens|nodes|questions|turns|others|held-out|model|core)
    | \d+[ ]%[ ]intervals | \d+-(?:bit|node) | batch[ ](?:of[ ])?\d | (?:k|T)[ ]=[ ]\d+
    | arXiv[ ]2408[.]08696 | ACL[ ]2025 | Temperature[ ]1 | factor=4[ ]offset=8 | MAT[ ]-[ ]1
    | up[ ]to[ ]2[ ]%[ ]other[ ]MAT[ ][(]no[ ]record[)]
    | up[ ]to[ ]10 | 40[ ][(] | [(]Zen[ ]3[)] | at[ ]most[ ](?:64|4[ ]times) | of[ ]4[ ]or[ ]more
    | 21[ ]A100[ ]hours[ ]for[ ]7B  # an estimate, made in extending.md
    | its[ ]80[ ]nodes;[ ]with[ ]24 | beyond[ ]80 | with[ ]80 | from[ ]1\. | takes?[ ]16
    """,
    re.VERBOSE,
)


def prose(page):
    """A page's sentences on one line, without tables, code, links' targets and headings."""
    text = re.sub(r"<!--.*?-->|```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    lines = [line for line in text.split("\n") if not re.match(r"[|#<!]|  <img", line)]
    text = re.sub(r"\]\([^)]*\)", "]", " ".join(lines))
    return re.sub(r"\s+", " ", text)


def test_measured_numbers_in_sentences_are_those_of_the_records():
    for page, sentence in sentences():
        assert sentence in prose(page), (page, sentence)


@pytest.mark.parametrize(("record", "query", "base", "order"), ORDERS)
def test_orders_in_sentences_are_those_of_paired_intervals(record, query, base, order):
    _, low, high = over(record, query, base)
    assert low > 1 if order == MORE else low <= 1 <= high


def test_where_little_is_repeated_the_gain_that_is_lost_is_as_stated():
    """A third; seven to eight tenths; nine tenths."""
    assert 0.29 <= lost_where_novel(PUBLISHED) <= 0.38
    assert all(
        0.7 <= lost_where_novel(HOT.format(24, name)) <= 0.8 for name in ("dynamic", "goose")
    )
    assert all(
        0.87 <= lost_where_novel(f"drafter == '{name}'") <= 0.95 for name in ("pld", "suffix")
    )


def test_drafts_on_this_cpu_pay_for_one_sequence_and_are_level_at_two():
    """With four, plain decoding is faster."""
    for size, verdict in ((1, 1), (2, 0), (4, -1)):
        found = row("batch", f"drafter == 'dynamic' and batch == {size}")
        low, high = found["speedup_vanilla_low"], found["speedup_vanilla_high"]
        assert (low > 1) - (high < 1) == verdict, size


def test_no_other_number_is_in_a_sentence():
    stated = [sentence for _, sentence in sentences()]
    for page in ("README.md", "docs/results.md"):
        text = prose(page)
        for sentence in stated:
            text = text.replace(sentence, "")
        assert re.findall(r".{30}(?<![\w.`-])\d[\d.]*.{20}", SETTINGS.sub("", text)) == [], page
