"""python -m tools.document_results [--check]: write the tables and figures of README.md and docs/ from shipped records.

    <!-- results: E                 E: a folder of results/reference/; below it YAML, without columns: the conditions
    columns: {TITLE: WORDS, ...}    a cell is asked for by its row's words and its column's
    rows: {TITLE: WORDS, ...}       WORDS may be a list, then each column's
    first, more, gaps: ...          the first column's title; columns by hand; whether cells may be empty -->
    ... <!-- end -->

Words: a method; a column of tables/main.csv (else MAT) or a setting, to print it; setting=value; category=qa;
interval=no; repeated=10-30: answers with 10 to 30 % of repeated 3-grams; in=E: another experiment; over WORDS: MAT over
another configuration's, which shares the settings not named again. Other settings are the method's defaults if it ran
with these. A comma makes a row or column of each value, {nodes} in a title is its own.
"""

import argparse
import itertools
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import yaml

from evaluation.errors import user_errors
from evaluation.figures import draw_one, style
from evaluation.records.rows import accept_lengths
from evaluation.records.runs import read_runs
from evaluation.report import REFERENCE
from evaluation.statistics.caveats import heading
from evaluation.statistics.intervals import ratio_interval
from evaluation.statistics.metrics import OVERALL, repetition
from evaluation.statistics.pools import Pool, mat_ratio, pools
from evaluation.statistics.published import default_settings
from evaluation.statistics.tables import main_table
from evaluation.statistics.view import interval_text, markdown, paper_cell
from model.errors import UserError
from model.files import ROOT, write_text

FIGURES = {  # file below docs/figures: the experiment and the name of its figure
    "quickstart_speedup.png": ("quickstart", "speedup_over_vanilla"),
    **{f"{n}.png": (f"{n}-embedded", n) for n in ("start", "topk", "tree_size", "update", "novelty", "budget")},
    **{f"smollm2/{n}.png": ("curves", n) for n in ("start", "topk", "tree_size", "update", "budget")},
    **{f"smollm2/{n}.png": (n, n) for n in ("temperature", "order")},
    "dynamic_budget.png": ("dynamic_tree-embedded", "budget"),
    "smollm2/dynamic_budget.png": ("dynamic_tree", "budget"),
}
BLOCK = re.compile(r"^<!-- results: ([^<]*?)-->\n(?:(?!<!-- ).*\n)*?<!-- end -->$", flags=re.M)
Configuration = tuple[Pool, dict[str, str]]  # with its settings by name


class Experiment:
    """The configurations of an experiment and its main table."""

    def __init__(self, name: str) -> None:
        self.name, self.runs = name, read_runs(REFERENCE / name)
        self.table = main_table(self.runs)
        self.configurations: list[Configuration] = [(pool, settings(pool)) for pool in pools(self.runs)]

    def conditions(self) -> str:
        """Say what was measured on what."""
        benches: dict[str, str] = {}
        for pool, _ in self.configurations:
            rows = pool.first_answers
            turns = sum(len(choice["turns"]) for row in rows for choice in row["choices"])
            counts = f"({turns:,} turns, {sum(sum(accept_lengths(row)) for row in rows):,} tokens)"
            benches.setdefault(pool.group["bench"], f"{len(rows)} questions of {pool.group['bench']} {counts}")
        repeats = max(len(pool.repeats) for pool, _ in self.configurations)
        circumstances = dict.fromkeys(part for line in heading(self.runs) for part in line.split("; "))
        words = "; ".join([*benches.values(), f"{repeats} repeat{'s' * (repeats > 1)}", *circumstances])
        return textwrap.fill(f"{words}.", 118, break_long_words=False, break_on_hyphens=False)

    def find(self, wanted: dict[str, str]) -> Configuration | None:
        """Return the configuration with these settings, by preference its method's defaults otherwise."""
        found = [c for c in self.configurations if wanted.items() <= c[1].items()]
        usual = {k: text(v) for k, v in default_settings(wanted.get("method", "")).items()} | wanted
        found = [c for c in found if all(c[1].get(k, v) == v for k, v in usual.items())] or found
        known = set().union(*(known for _, known in self.configurations))
        if wanted.keys() - known or len(found) > 1:
            raise UserError(f"{self.name}: {wanted} fits {[pool.name for pool, _ in found]}, settings: {sorted(known)}")
        return found[0] if found else None

    def cell(self, words: str) -> str | None:
        """Return what these words ask for, as printed; None if it was not measured."""
        methods = {known["method"] for _, known in self.configurations}
        asked, over = (
            dict(tuple(w.split("=")) if "=" in w else ("method" if w in methods else "column", w) for w in part.split())
            for part in f" {words} ".partition(" over ")[::2]
        )
        column, category = asked.pop("column", "mat"), asked.pop("category", OVERALL)
        interval, repeated = asked.pop("interval", "yes") == "yes", asked.pop("repeated", None)
        if not (found := self.find(asked)):
            return None
        (pool, known), cells = found, found[0].cells.of(category)
        if over:
            peers = [other for _, other in self.configurations if other["method"] == over.get("method", pool.method)]
            shared = {k: v for k, v in asked.items() if any(other.get(k, "null") != "null" for other in peers)}
            base = self.find(shared | over)
            return base and printed(*mat_ratio(cells, base[0].cells.of(category)), interval)
        if repeated:
            low, high = (int(end) / 100 for end in repeated.split("-"))
            answers = pool.answers_to_compare(0)
            cells = cells.take(np.array([low <= repetition(answers[key]) < high for key in cells.questions]))
            tokens, steps = cells.mean_counts()
            counts = {"questions": f"{len(tokens)}", "new_tokens": f"{tokens.sum():,.0f}"}
            return counts.get(column) or printed(tokens.sum() / steps.sum(), *ratio_interval(tokens, steps), interval)
        named = {**pool.group, "method": pool.label, "variant": pool.variant, "category": category}
        (row,) = self.table[(self.table[list(named)] == list(named.values())).all(axis=1)].to_dict("records")
        if column.startswith("tokens_per_second"):
            return f"{row[column]:.0f}"
        return known.get(column) or paper_cell(row, column, with_interval=interval).printed


def settings(pool: Pool) -> dict[str, str]:
    """Return by name what words may ask for of a configuration."""
    found = {"order": "file", **pool.group, **pool.first.facets, "method": pool.method, "nodes": pool.budget}
    return {key: text(value) for key, value in found.items()}


def text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def printed(value: float, low: float, high: float, interval: bool) -> str:
    return f"{value:.2f} {interval_text(low, high)}" if low < high and interval else f"{value:.2f}"


def expanded(entries: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield titles and words, those with commas written out."""
    for title, words in entries.items():
        if isinstance(words, list):
            yield title, words
            continue
        parts = [(key + equals, value.split(",")) for key, equals, value in (w.rpartition("=") for w in words.split())]
        for choice in itertools.product(*([key + value for value in values] for key, values in parts)):
            known = dict(word.split("=") if "=" in word else ("method", word) for word in choice)
            known |= {key: value.replace("_", " ") for key, value in known.items() if key == "category"}
            yield title.format(**known), [" ".join(choice)]


experiment = cache(Experiment)


def rendered(spec: dict[str, Any]) -> str:
    """Return a block's table, or its conditions."""
    if "columns" not in spec:
        return experiment(spec["results"]).conditions()
    columns, more, lines = list(expanded(spec["columns"])), spec.get("more", {}), []
    for title, of_row in expanded(spec["rows"]):
        lines.append([title.strip()])
        for own, (_, (of_column,)) in zip(itertools.cycle(of_row), columns):
            words = " ".join(sorted((own, of_column), key=lambda part: "over" in part.split()))
            name = "".join(re.findall(r"\bin=(\S+)", words)) or spec["results"]
            cell = experiment(name).cell(re.sub(r"\bin=\S+", "", words))
            if cell is None and not spec.get("gaps"):
                raise UserError(f"{name}: no configuration is '{words}'")
            lines[-1].append(cell or "")
        lines[-1] += [str(texts.get(title, "")) for texts in more.values()]
    return markdown([spec.get("first", "method"), *(title for title, _ in columns), *more], lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.document_results", description="Write documents' results.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a document is stale")
    check, stale = parser.parse_args().check, []
    with user_errors():
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
            old = page.read_text(encoding="utf-8")
            try:
                new = written(old)
            except UserError as error:
                raise UserError(f"{page.name}: {error}") from None
            if new != old:
                stale.append(page)
            if new != old and not check:
                write_text(page, new)
        for name, (of, kind) in FIGURES.items():
            file, figure = ROOT / "docs/figures" / name, draw_one(experiment(of).runs, experiment(of).table, kind)
            shown = style.contents(figure)  # kept as text in a PNG
            if not file.exists() or f"Contents\0{shown}".encode() not in file.read_bytes():
                stale.append(file)
                if not check:
                    style.save_png(figure, file, Contents=shown)
        print(*(f"{file.name}: {'not what the records say' if check else 'written'}" for file in stale), sep="\n")
        if stale and check:
            raise UserError("python -m tools.document_results writes them anew")


def written(page: str) -> str:
    """Return a page's text with its blocks as the records say."""
    if len(BLOCK.findall(page)) != page.count("<!-- results:"):
        raise UserError("a block is not closed by <!-- end -->")
    return BLOCK.sub(
        lambda b: f"<!-- results: {b[1]}-->\n{rendered(yaml.safe_load(f'results: {b[1]}'))}\n<!-- end -->", page
    )


if __name__ == "__main__":
    main()
