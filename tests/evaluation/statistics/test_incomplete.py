"""Pools that lack repeats, questions and batches: pooled columns against a slow reference of docs/concepts.md."""

import math
import random
from statistics import fmean, stdev

import numpy as np
import pytest

from evaluation.records.rows import subtask
from evaluation.records.runs import row_key
from evaluation.statistics.intervals import quotient_interval, speed_interval
from evaluation.tables.experiment import Experiment
from tests.evaluation.made_runs import asked, made

COUNT = 13  # questions
ENDS = ("", "_std", "_low", "_high")


def made_row(rng, number, label):
    """An answer in one or two turns."""
    turns = []
    decode_time = []
    for _ in range(rng.choice([1, 1, 2])):
        steps = rng.randint(1, 9)
        plain = label in ("hf", "vanilla")
        lengths = [1 if plain else rng.randint(1, 4) for _ in range(steps)]
        turns.append((lengths, rng.uniform(0.2, 2)))
        decode_time.append(rng.uniform(0.05, 0.4) * (steps - 1))
    times = {} if label == "hf" else {"decode_time": decode_time}
    category = ["writing", "qa", "rag"][number * 3 // COUNT]
    return asked(number, category, turns, prompt=f"{number}?", **times)


def made_runs(rng, size):
    """Runs of three methods in up to three repeats, each with some of the questions, or the first batches."""
    runs = []
    for label in ("hf", "vanilla", "pld"):
        for repeat in sorted(rng.sample(range(3), rng.randint(1, 3))):
            rows = [made_row(rng, number, label) for number in range(COUNT)]
            if rng.random() > 0.3:
                count = size * rng.randint(1, -(-COUNT // size))
                some = (
                    sorted(rng.sample(range(COUNT), count)) if size == 1 else range(COUNT)[:count]
                )
                rows = [rows[number] for number in some]
            run = made(label, rows, repeat=repeat, questions=COUNT)
            run.metadata["settings"]["batch"] = size
            runs.append(run)
    return runs


def rows_of(runs, label, category="overall"):
    """The rows of a method's category by question and repeat, in the order in which questions are first met."""
    found = {}
    for run in runs:
        for row in run.answers if run.label == label else []:
            if category in ("overall", subtask(row["category"])):
                found.setdefault(row_key(row), {})[run.repeat] = row
    return found


def speeds_of(runs, label, size, category="overall"):
    """What a speed is made of, by question or whole batch of the category, and repeat: its columns."""
    found = rows_of(runs, label, category)
    speeds = {}
    for run in runs:
        for start in range(0, len(run.answers) if run.label == label else 0, size):
            together = run.answers[start : start + size]
            keys = tuple(map(row_key, together))
            if all(run.repeat in found.get(key, {}) for key in keys):
                choices = [row["choices"][0] for row in together]
                tokens = sum(sum(choice["new_tokens"]) for choice in choices)
                seconds = sum(sum(choice["wall_time"]) for choice in choices)
                values = (tokens / seconds, 1.0) if size == 1 else (tokens, seconds)
                speeds.setdefault(keys, {})[run.repeat] = values
    return speeds


def columns_of(*sides, repeats):
    """Matrices (question, repeat) of the sides' values, NaN where a side has none."""
    keys = [key for key in sides[0] if all(key in side for side in sides)]
    rows = []
    for key in keys:
        row = []
        for repeat in repeats:
            known = all(repeat in side[key] for side in sides)
            values = [side[key][repeat] if known else (math.nan,) * 2 for side in sides]
            row.append(np.concatenate(values))
        rows.append(row)
    shape = (len(keys), len(repeats), 2 * len(sides))
    return list(np.moveaxis(np.array(rows, dtype=float).reshape(shape), 2, 0))


def means(side):
    """A side's values, as means over its repeats, in one repeat."""
    return {key: {0: np.mean(list(of.values()), axis=0)} for key, of in side.items()}


def repeats_of(runs, label):
    return [run.repeat for run in runs if run.label == label]


def pairs(runs, label, base, sides):
    """The columns of both sides, of the same repeat if they have at least two in common."""
    both = [r for r in repeats_of(runs, label) if r in repeats_of(runs, base)]
    if len(both) > 1:
        return columns_of(*sides, repeats=both)
    return columns_of(*map(means, sides), repeats=[0])


def figure(columns, alike):
    """The ratio of the columns' sums, of questions alike if all of them weigh the same."""
    sums = []
    for column in columns:
        known = [row[np.isfinite(row)] for row in column]
        sums.append(sum((fmean if alike else sum)(row) for row in known if len(row)))
    if not all(sums):
        return math.nan
    ratio = sums[0] / sums[1]
    return ratio if len(sums) == 2 else ratio / (sums[2] / sums[3])


def rate(columns, alike):
    """A figure with its deviation over repeats and its interval."""
    by_repeat = [figure([c[:, [r]] for c in columns], alike) for r in range(columns[0].shape[1])]
    known = [value for value in by_repeat if math.isfinite(value)]
    spread = stdev(known) if len(known) > 1 else math.nan
    return figure(columns, alike), spread, *speed_interval(*columns, alike=alike)


def later(row):
    """Seconds and number of the steps after each turn's first."""
    choice = row["choices"][0]
    steps = sum(count - 1 for count in choice["decoding_steps"])
    return (sum(choice["decode_time"]), steps) if "decode_time" in choice else (math.nan,) * 2


def values(found, of):
    return {key: {repeat: of(row) for repeat, row in rows.items()} for key, rows in found.items()}


def reference(runs, label, category, size):
    """The pooled columns of a row of main.csv."""
    alike = size == 1
    repeats = repeats_of(runs, label)
    found = rows_of(runs, label, category)

    def tokens_and_steps(row):
        lengths = row["choices"][0]["accept_lengths"]
        return sum(lengths), len(lengths)

    counts = columns_of(values(found, tokens_and_steps), repeats=repeats)
    tokens, steps = (np.nansum(count, axis=1) for count in counts)
    mat = rate(counts, alike=False)[:2] + quotient_interval(tokens, steps)
    expected = {
        "questions": len(found),
        "repeats": len(repeats),
        "mat_macro": fmean(tokens / steps),
    }
    expected |= dict(zip((f"mat{end}" for end in ENDS), mat, strict=True))

    speeds = speeds_of(runs, label, size, category)
    speed = rate(columns_of(speeds, repeats=repeats), alike)
    expected |= dict(zip((f"tokens_per_second{end}" for end in ENDS), speed, strict=True))

    for base in ("hf", "vanilla"):
        common = rows_of(runs, label).keys() & rows_of(runs, base)
        speedup = (math.nan,) * 4
        if common:
            sides = (speeds, speeds_of(runs, base, size))
            speedup = rate(pairs(runs, label, base, sides), alike)
        expected |= dict(zip((f"speedup_{base}{end}" for end in ENDS), speedup, strict=True))

    sides = (values(found, later), values(rows_of(runs, "vanilla"), later))
    expected["break_even_mat"] = figure(pairs(runs, label, "vanilla", sides), alike=False)
    return expected


@pytest.mark.parametrize("size", [1, 2, 4])
def test_pooled_columns_of_incomplete_pools_are_what_their_definitions_say(size):
    rng = random.Random(size)
    compared = 0
    for _ in range(5):
        runs = made_runs(rng, size)
        for row in Experiment(runs).table.to_dict("records"):
            expected = reference(runs, row["method"], row["category"], size)
            measured = {name: row[name] for name in expected}
            assert measured == pytest.approx(expected, rel=1e-9, nan_ok=True), row["category"]
            compared += math.isfinite(row["speedup_hf"]) and row["speedup_hf"] != 1
    assert compared > 8
