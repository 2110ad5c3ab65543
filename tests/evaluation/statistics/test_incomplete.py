"""Pools that lack repeats, questions and batches: every column against a slow reference of docs/concepts.md."""

import itertools
import math
import random
from statistics import fmean, stdev

import numpy as np
import pytest

from evaluation.records.questions import subtask
from evaluation.records.runs import GENERATE, row_key
from evaluation.statistics.experiment import Experiment
from evaluation.statistics.intervals import FEWEST, quotient_interval, speed_interval
from tests.evaluation.made_runs import asked, made

COUNT = 13  # questions
NOT_MEASURED = {
    *(
        "model",
        "dtype",
        "bench",
        "bench_questions",
        "questions_sha256",
        "max_new_tokens",
        "device",
        "variant",
        "complete",
    ),
    *(
        "seed",
        "batch",
        "temperature",
        "phases",
        "num_choices",
        "quantize",
        "start",
        "tree",
        "tree_nodes",
    ),
}


def made_row(rng, number, label, size):
    """An answer in one or two turns, with every time that a row can have."""
    turns = []
    for _ in range(rng.choice([1, 1, 2])):
        steps = rng.randint(1, 9)
        turns.append(
            [1] * steps if label in ("hf", "vanilla") else [rng.randint(1, 4) for _ in range(steps)]
        )
    prefill = [rng.uniform(0.1, 0.9) for _ in turns]
    decode = [rng.uniform(0.05, 0.4) * (len(turn) - 1) for turn in turns]
    nodes = [[rng.randint(1, 5) for _ in turn] for turn in turns]
    times = {"prompt_time": [0.01] * len(turns), "step_nodes": nodes}
    if label != "hf":
        times |= {"prefill_time": prefill, "decode_time": decode}
        times |= {"step_us": [[1000, *(rng.randint(1, 99) for _ in turn[1:])] for turn in turns]}
    if size > 1:
        times["step_batch"] = [[rng.randint(1, size) for _ in turn] for turn in turns]
    walls = [a + b for a, b in zip(prefill, decode, strict=True)]
    category = ["writing", "qa", "rag"][number * 3 // COUNT]
    row = asked(
        number, category, list(zip(turns, walls, strict=True)), prompt=f"{number}?", **times
    )
    return row | {"peak_memory": rng.randint(1, 9) * 2**20}


def made_runs(rng, size):
    """Runs of four methods in up to three repeats, each with some of the questions, or the first batches."""
    runs = []
    for label in ("hf", "vanilla", "pld", "suffix"):
        for repeat in sorted(rng.sample(range(3), rng.randint(1, 3))):
            rows = [made_row(rng, number, label, size) for number in range(COUNT)]
            count = size * rng.randint(1, -(-COUNT // size))
            some = sorted(rng.sample(range(COUNT), count)) if size == 1 else range(COUNT)[:count]
            kept = rows if rng.random() < 0.3 else [rows[number] for number in some]
            run = made(label, kept, repeat=repeat, questions=COUNT, summary={"state_bytes": 7})
            run.metadata["settings"] |= {"batch": size}
            runs.append(run)
    return runs


def cells_of(runs, label, category):
    """The rows of a method's category by question and repeat, in the order in which questions are first met."""
    found = {}
    for run in sorted((run for run in runs if run.label == label), key=lambda run: run.repeat):
        for row in run.answers:
            if category in ("overall", subtask(row["category"])):
                found.setdefault(row_key(row), {})[run.repeat] = row
    return found


def repeats_of(runs, label):
    return sorted(run.repeat for run in runs if run.label == label)


def batches_of(runs, label, found, size):
    """The batches of a method whose questions are all found: new tokens and seconds by batch and repeat."""
    sums = {}
    for run in (run for run in runs if run.label == label):
        for start in range(0, len(run.answers), size):
            together = run.answers[start : start + size]
            keys = tuple(map(row_key, together))
            if all(run.repeat in found.get(key, {}) for key in keys):
                new = sum(sum(row["choices"][0]["new_tokens"]) for row in together)
                seconds = sum(sum(row["choices"][0]["wall_time"]) for row in together)
                sums.setdefault(keys, {})[run.repeat] = new, seconds
    return sums


def speed(row):
    return sum(row["choices"][0]["new_tokens"]) / sum(row["choices"][0]["wall_time"])


def later(row):
    """Seconds and number of the steps after each turn's first."""
    choice = row["choices"][0]
    return sum(choice.get("decode_time", [math.nan])), sum(n - 1 for n in choice["decoding_steps"])


def pairs(own, other, repeats, others, value):
    """Lists, one for each repeat or one of means over repeats, of a question's two values."""
    both = [r for r in repeats if r in others]
    questions = [key for key in own if key in other]
    if len(both) < 2:

        def means(values):
            return tuple(map(fmean, zip(*values, strict=True)))

        sides = (
            (means([value(v) for v in side[key].values()]) for side in (own, other))
            for key in questions
        )
        return [[(*a, *b) for a, b in sides]]
    shared = [[key for key in questions if r in own[key] and r in other[key]] for r in both]
    return [
        [(*value(own[k][r]), *value(other[k][r])) for k in keys]
        for r, keys in zip(both, shared, strict=True)
    ]


def ratio(lists):
    """(sum a / sum b) / (sum c / sum d), of all repeats together."""
    sums = [sum(column) for column in zip(*itertools.chain(*lists), strict=True)]
    if not sums or not all(sums):
        return math.nan
    return sums[0] / sums[1] / (sums[2] / sums[3])


def spread(values):
    values = [value for value in values if math.isfinite(value)]
    return stdev(values) if len(values) > 1 else math.nan


def grid(found, repeats, value):
    """The values by question and repeat, a matrix for each part of a value; NaN where there is none."""
    parts = len(value(next(iter(next(iter(found.values())).values()))))
    lacking = (math.nan,) * parts
    table = [[value(of[r]) if r in of else lacking for r in repeats] for of in found.values()]
    return np.moveaxis(np.array(table, dtype=float), 2, 0)


def mean_of_means(matrix):
    rows = [fmean(row[np.isfinite(row)]) for row in matrix if np.isfinite(row).any()]
    return fmean(rows) if rows else math.nan


def rate_columns(runs, label, category, size):
    """tokens/s with deviation and interval."""
    found, repeats = cells_of(runs, label, category), repeats_of(runs, label)
    if size == 1:
        (speeds,) = grid(found, repeats, lambda row: (speed(row),))
        by_repeat = [mean_of_means(speeds[:, [i]]) for i in range(len(repeats))]
        return (
            mean_of_means(speeds),
            spread(by_repeat),
            speed_interval(speeds, np.ones_like(speeds)),
        )
    sums = batches_of(runs, label, found, size)
    if not sums:
        return math.nan, math.nan, (math.nan, math.nan)
    new, seconds = grid(sums, repeats, lambda pair: pair)
    by_repeat = [np.nansum(new[:, i]) / np.nansum(seconds[:, i]) if np.nansum(seconds[:, i]) else math.nan
                 for i in range(len(repeats))]  # fmt: skip
    return (
        np.nansum(new) / np.nansum(seconds),
        spread(by_repeat),
        speed_interval(new, seconds, alike=False),
    )


def speedup_columns(runs, label, base, category, size):
    own, other = cells_of(runs, label, category), cells_of(runs, base, "overall")
    repeats, others = repeats_of(runs, label), repeats_of(runs, base)
    if size > 1:
        own, other = batches_of(runs, label, own, size), batches_of(runs, base, other, size)
        lists = pairs(own, other, repeats, others, lambda pair: pair)
        interval = interval_of(lists, alike=False)
        return (
            ratio(lists),
            spread([ratio([one]) for one in lists]) if len(lists) > 1 else math.nan,
            interval,
        )
    both, questions = [r for r in repeats if r in others], [key for key in own if key in other]
    if len(both) < 2:
        values = [
            tuple(fmean(speed(row) for row in side[key].values()) for side in (own, other))
            for key in questions
        ]
        columns = [np.array(column).reshape(-1, 1) for column in zip(*values, strict=True)] or [
            np.zeros((0, 1))
        ] * 2
    else:
        lack = math.nan, math.nan
        rows = [[(speed(own[k][r]), speed(other[k][r])) if r in own[k] and r in other[k] else lack for r in both]
                for k in questions]  # fmt: skip
        columns = list(np.moveaxis(np.array(rows).reshape(len(rows), len(both), 2), 2, 0))
    by_repeat = [
        mean_of_means(columns[0][:, [i]]) / mean_of_means(columns[1][:, [i]])
        for i in range(len(both))
    ]
    value = mean_of_means(columns[0]) / mean_of_means(columns[1])
    return value, spread(by_repeat) if len(both) > 1 else math.nan, speed_interval(*columns)


def interval_of(lists, alike):
    """Of pairs by repeat: those of the same place in all lists belong together only if no list lacks one."""
    if len(lists) == 1:
        return quotient_interval(*np.array(lists[0], dtype=float).reshape(-1, 4).T)
    most = max(map(len, lists))  # the first batches of each repeat
    padded = [one + [(math.nan,) * 4] * (most - len(one)) for one in lists]
    return speed_interval(
        *np.array(padded, dtype=float).reshape(len(lists), most, 4).transpose(2, 1, 0), alike=alike
    )


def reference(runs, label, category, size):
    """Every measured column of a row of main.csv."""
    found, repeats = cells_of(runs, label, category), repeats_of(runs, label)
    rows = [row for of in found.values() for row in of.values()]
    choices = [row["choices"][0] for row in rows]
    turns = [(c, i) for c in choices for i in range(len(c["turns"]))]
    tokens, steps = (
        sum(sum(c["new_tokens"]) for c in choices),
        sum(len(c["accept_lengths"]) for c in choices),
    )
    lengths = {
        key: [n for row in of.values() for n in row["choices"][0]["accept_lengths"]]
        for key, of in found.items()
    }
    by_repeat = [
        [n for of in found.values() if r in of for n in of[r]["choices"][0]["accept_lengths"]]
        for r in repeats
    ]
    sums = np.array([(sum(of), len(of)) for of in lengths.values()], dtype=float).T
    mat_ends = quotient_interval(*sums)
    rate, rate_std, rate_ends = rate_columns(runs, label, category, size)
    total = tokens / sum(sum(c["wall_time"]) for c in choices) if size == 1 else rate
    streams = label != "hf"
    prefill = [c["prefill_time"][i] for c, i in turns] if streams else []
    decode = [c["decode_time"][i] for c, i in turns] if streams else []
    first = [p + 0.01 for p in prefill] if size == 1 else []
    between = (
        [us / 1e3 for c in choices for turn in c["step_us"] for us in turn[1:]] if streams else []
    )
    later_steps = sum(n - 1 for c in choices for n in c["decoding_steps"])
    firsts = sum(turn_lengths(c, i)[0] for c, i in turns)
    nodes = sum(n for c in choices for turn in c["step_nodes"] for n in turn)
    forwards = (
        sum(1 / n for c in choices for turn in c["step_batch"] for n in turn) if size > 1 else steps
    )
    expected = {
        "method": label, "category": category, "repeats": len(repeats), "questions": len(found), "turns": len(turns),
        "steps": steps, "new_tokens": tokens, "mat": tokens / steps,
        "mat_std": spread([fmean(n) for n in by_repeat if n]), "mat_low": mat_ends[0], "mat_high": mat_ends[1],
        "mat_macro": fmean(map(fmean, lengths.values())),
        "tokens_per_second": rate, "tokens_per_second_std": rate_std, "tokens_per_second_low": rate_ends[0],
        "tokens_per_second_high": rate_ends[1], "tokens_per_second_total": total,
        "tokens_per_second_decode": (tokens - firsts) / sum(decode) if sum(decode) else math.nan,
        "prefill_ms": 1e3 * fmean(prefill) if prefill else math.nan,
        "decode_ms": 1e3 * fmean(decode) if decode else math.nan,
        "step_ms": 1e3 * sum(decode) / later_steps if decode and later_steps else math.nan,
        "time_to_first_token_ms": 1e3 * fmean(first) if first else math.nan,
        "rows_per_forward": nodes / forwards,
        "peak_memory_mib": max(row["peak_memory"] for row in rows) / 2**20, "state_bytes": 7,
    }  # fmt: skip
    for percent in (50, 95, 99):
        expected[f"time_to_first_token_ms_p{percent}"] = (
            1e3 * np.percentile(first, percent) if first else math.nan
        )
        expected[f"inter_token_latency_ms_p{percent}"] = (
            np.percentile(between, percent) if between else math.nan
        )
    for base in ("hf", "vanilla"):
        known = {row_key(row) for run in runs if run.label == label for row in run.answers}
        common = known & set(cells_of(runs, base, "overall"))
        ends = "", "_std", "_low", "_high"
        value, std, interval = math.nan, math.nan, (math.nan, math.nan)
        if common:
            value, std, interval = speedup_columns(runs, label, base, category, size)
        expected |= dict(
            zip((f"speedup_{base}{end}" for end in ends), (value, std, *interval), strict=True)
        )
        expected[f"execution_{base}"] = (
            {"hf": GENERATE, "vanilla": "eager"}[base] if common else None
        )
    other = cells_of(runs, "vanilla", "overall")
    timed = pairs(found, other, repeats, repeats_of(runs, "vanilla"), later)
    expected["break_even_mat"] = ratio(timed)
    expected["execution"] = GENERATE if label == "hf" else "eager"
    return expected


def turn_lengths(choice, turn):
    start = sum(choice["decoding_steps"][:turn])
    return choice["accept_lengths"][start : start + choice["decoding_steps"][turn]]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_column_of_incomplete_pools_is_what_its_definition_says(size, seed):
    rng, compared, ends = random.Random(10 * seed + size), 0, 0
    for _ in range(12):
        runs = made_runs(rng, size)
        table = Experiment(runs).table
        for row in table.to_dict("records"):
            expected = reference(runs, row["method"], row["category"], size)
            assert set(row) - NOT_MEASURED == set(expected)
            for name, value in expected.items():
                where = size, seed, row["method"], row["category"], name
                if value is None or isinstance(value, str):
                    assert row[name] == value or (
                        value is None and not isinstance(row[name], str)
                    ), where
                else:
                    assert row[name] == pytest.approx(value, rel=1e-9, nan_ok=True), where
            compared += int(math.isfinite(row["speedup_hf"]) and row["speedup_hf"] != 1)
            ends += int(row["speedup_hf_low"] < row["speedup_hf_high"])
    assert compared > 40 and (ends > 5 or size * FEWEST > COUNT)
