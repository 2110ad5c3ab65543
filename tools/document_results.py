"""python -m tools.document_results [--check]: write tables, numbers and figures of README.md and docs/ from records.

In a page, with `E` an experiment's folder in results/reference/ (the words: evaluation/statistics/lookup.py):

    <!-- results: E                   a table; its rows and columns as YAML, the comment's other lines
    rows: {TITLE: WORDS, ...}         or a list of words without titles; none: every configuration, by its name
    columns: {TITLE: WORDS, ...} -->  words of a cell: its row's and its column's
    ... <!-- end -->

    <!-- results: E -->               without columns: what was measured on what, a paragraph
    <!-- = E WORDS -->2.05<!-- -->    one number

Behind E in a results mark, the command writes @ and a digest of the records, which one step more of an answer changes.
Words with commas (nodes=8,24) are a row or column each, and {nodes} in a title is their value. `E?`: while there are no
records of E, the page keeps what it says. `<!-- source: ... --> ... <!-- end -->` says where other numbers are from. A
number's mark begins no line: Markdown reads such a line as HTML.
"""

from __future__ import annotations

import argparse
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from evaluation.errors import user_errors
from evaluation.figures import draw_one, style
from evaluation.report import REFERENCE
from evaluation.statistics.lookup import Experiment, NotMeasured, joined
from evaluation.statistics.rendering import markdown
from model.errors import UserError
from model.files import ROOT, write_text

CONFIGS = ROOT / "configs" / "experiment"
COMMAND = "python -m tools.document_results"
# Pages in which every number has a source; in README.md every table.
RESULTS_PAGES = ("README.md", "docs/quickstart.md", "docs/smollm2.md", "docs/dynamic.md", "docs/rivals.md")
# File below docs/figures: the experiment and the name of its figure. `-embedded`: with the shipped model.
FIGURES = {
    "quickstart_speedup.png": ("quickstart", "speedup_over_vanilla"),
    **{f"smollm2/{name}.png": ("curves", name) for name in ("tree_size", "topk", "start", "update", "budget")},
    "smollm2/dynamic_budget.png": ("dynamic_tree", "budget"),
    **{
        f"{name}.png": (f"{name}-embedded", name)
        for name in ("start", "topk", "tree_size", "update", "novelty", "budget")
    },
    "dynamic_budget.png": ("dynamic_tree-embedded", "budget"),
    "smollm2/temperature.png": ("temperature", "temperature"),
    "smollm2/order.png": ("order", "order"),
}
BLOCK = re.compile(r"^<!-- results: (?P<spec>[^<]*?)-->\n(?:(?!<!-- ).*\n)*?<!-- end -->$", flags=re.M)
NUMBER = re.compile(r"<!-- = (?P<experiment>\S+) (?P<words>[^<]*?) -->[^<]*?<!-- -->")
SOURCE = re.compile(r"^<!-- source: [^<]*?-->\n(?:(?!<!-- (?:results|source)).*\n)*?<!-- end -->$", flags=re.M)
UNREAD = re.compile(r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->|95 % (?=interval)", flags=re.M | re.S)
MEASURED = re.compile(r"\d\.\d|\d ?%")  # what a sentence of a results page says only with a source
TABLED = re.compile(rf"{MEASURED.pattern}|\|\W*\d")  # and a table: its cells that are numbers, too
FIRST = re.compile(r"^ *(?:[-*] |\d+\. )?<!-- = ", flags=re.M)
LEFT = re.compile(r"<!-- (?:results:|source:|end|=)|<!-- -->")


class Records:
    """The experiments of a folder, each read once."""

    def __init__(self, folder: Path = REFERENCE) -> None:
        self.folder = folder
        self.missing: set[str] = set()  # experiments that pages wait for
        self.read: Callable[[str], Experiment] = cache(lambda name: Experiment(folder / name))

    def experiment(self, name: str) -> Experiment | None:
        """Return an experiment; None where a page waits for it. Raises UserError if another is not there."""
        if name.endswith("?") and not (self.folder / name[:-1]).is_dir():
            if not (CONFIGS / f"{name[:-1].partition('-')[0]}.yaml").is_file():
                raise UserError(f"{name[:-1]}: no experiment is called so (configs/experiment/)")
            self.missing.add(name[:-1])
            return None
        return self.read(name.removesuffix("?"))


def written(text: str, records: Records, page: str = "") -> str:
    """Return a page's text with its tables and numbers as the records say. Raises UserError with page and line."""

    def table(found: re.Match[str]) -> str:
        spec = read_spec(found["spec"])
        name = spec["results"].partition("@")[0]
        experiment = records.experiment(name)
        if experiment is None:
            return found[0]
        head = f"{name.removesuffix('?')}@{experiment.digest}{found['spec'].removeprefix(spec['results'])}"
        return f"<!-- results: {head}-->\n{rendered(spec, experiment)}\n<!-- end -->"

    def number(found: re.Match[str]) -> str:
        experiment = records.experiment(found["experiment"])
        if experiment is None:
            return found[0]
        name = found["experiment"].removesuffix("?")
        return f"<!-- = {name} {found['words']} -->{experiment.cell(found['words']).printed}<!-- -->"

    def located(replacing: Callable[[re.Match[str]], str]) -> Callable[[re.Match[str]], str]:
        def replaced(found: re.Match[str]) -> str:
            try:
                return replacing(found)
            except UserError as error:
                raise UserError(f"{page}:{line_of(found.string, found.start())}: {error}") from None

        return replaced

    return NUMBER.sub(located(number), BLOCK.sub(located(table), text))


def line_of(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def read_spec(text: str) -> dict[str, Any]:
    """Read what a marked table says of itself."""
    keys = {"results", "rows", "columns", "first", "gaps", "published"}
    try:
        spec = yaml.safe_load(f"results: {text}")
    except yaml.YAMLError as error:
        raise UserError(f"this table's comment is no YAML: {' '.join(str(error).split())}") from None
    unknown = set(spec) - keys
    if unknown or not isinstance(spec.get("columns", {}), dict):
        wrong = f"'{unknown.pop()}' is unknown" if unknown else "'columns' is not {TITLE: WORDS, ...}"
        raise UserError(f"of this table {wrong}: it takes {', '.join(sorted(keys))}")
    return {**spec, "results": str(spec["results"])}


def rendered(spec: dict[str, Any], experiment: Experiment) -> str:
    """Return the table: the rows' titles below `first`, a column each, and behind them those that were published."""
    if "columns" not in spec:
        return textwrap.fill(experiment.conditions, 118, break_long_words=False, break_on_hyphens=False)
    columns = list(expanded(spec["columns"]))
    rows: dict[Any, str] | list[str] | None = spec.get("rows")
    chosen = list(expanded(dict(enumerate(rows)) if isinstance(rows, list) else rows or {}))
    chosen = chosen or [(pool.name, f"name={joined(pool.name)}") for pool in experiment.pools]
    titled = not isinstance(rows, list)
    published: dict[str, dict[str, Any]] = spec.get("published", {})
    lines = []
    for title, words in chosen:
        cells = [cell(experiment, words, column, gaps=bool(spec.get("gaps"))) for _, column in columns]
        cells += [str(figures.get(title, "")) for figures in published.values()]
        lines.append([title.strip(), *cells] if titled else cells)  # titles of one text differ in spaces
    first = [str(spec.get("first", "method"))] if titled else []
    return markdown([*first, *(title for title, _ in columns), *published], lines)


def cell(experiment: Experiment, *words: str, gaps: bool) -> str:
    """Return a cell's text; empty for a configuration that was not measured, if the table has gaps."""
    try:
        return experiment.cell(*words).printed
    except NotMeasured:
        if gaps:
            return ""
        raise


def expanded(entries: dict[Any, str]) -> Iterator[tuple[str, str]]:
    """Write out words with commas: an entry each, what they are in its title."""
    for title, words in entries.items():
        for choice in itertools.product(*(alternatives(word) for word in str(words).split())):
            known = {key: value for key, equals, value in (word.partition("=") for word in choice) if equals}
            known["method"] = next((word for word in choice if "=" not in word), "")
            known["category"] = known.get("category", "").replace("_", " ")
            try:
                yield str(title).format(**known), " ".join(choice)
            except (KeyError, IndexError, ValueError):
                raise UserError(f"the title '{title}' names more than its words say: {words}") from None


def alternatives(word: str) -> list[str]:
    """Split a word with commas: `nodes=8,24` into `nodes=8` and `nodes=24`."""
    key, equals, value = word.rpartition("=")
    return [f"{key}{equals}{one}" for one in value.split(",")]


def blank(found: re.Match[str]) -> str:
    """Return nothing but the lines' ends, so that what follows keeps its line."""
    return "\n" * found[0].count("\n")


def misplaced(text: str) -> list[str]:
    """Return the lines with a mark that is not closed, or that begins a line, which then is HTML and no Markdown."""
    plain = BLOCK.sub(blank, SOURCE.sub(blank, text))
    first = [f"{line_of(plain, mark.start())}: a number's mark begins the line" for mark in FIRST.finditer(plain)]
    plain = NUMBER.sub(blank, plain)
    left = [f"{line_of(plain, mark.start())}: '{mark[0]}' closes nothing or is open" for mark in LEFT.finditer(plain)]
    return first + left


def unsourced(text: str, *, prose: bool = True) -> list[str]:
    """Return the lines with a number of unknown origin, in tables and, with `prose`, in sentences."""
    for known in (SOURCE, BLOCK, NUMBER, UNREAD):
        text = known.sub(blank, text)
    lines = [(i, line, line.startswith("|")) for i, line in enumerate(text.splitlines(), 1)]
    wrong = [(i, line) for i, line, table in lines if (table or prose) and (TABLED if table else MEASURED).search(line)]
    return [f"{i}: a number without a source: {line.strip()[:60]}" for i, line in wrong]


def figure_stale(file: Path, experiment: Experiment, name: str, *, draw: bool = False) -> bool:
    """Return whether a figure shows something else than the records say; `draw` it then."""
    figure = draw_one(experiment.runs, experiment.table, name)
    shown = style.contents(figure)
    stale = not file.exists() or f"Contents\0{shown}".encode() not in file.read_bytes()  # as PNG keeps a text
    if draw and stale:
        style.save_png(figure, file, Contents=shown)
    return stale


def document(records: Records, root: Path = ROOT, *, check: bool = False) -> tuple[list[str], list[str]]:
    """Write all pages and figures, or only look.

    Returns:
        What was stale, and what no records can mend: marks that are not closed, numbers without a source. A line each.
    """
    stale, wrong = [], []
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        name, text = str(page.relative_to(root)), page.read_text(encoding="utf-8")
        new = written(text, records, name)
        if text != new:
            lines = enumerate(zip(text.splitlines(), new.splitlines(), strict=False), 1)
            stale.append(f"{name}:{next((i for i, (old, now) in lines if old != now), 1)}")
        if text != new and not check:
            write_text(page, new)
        lost = misplaced(new)
        if name in RESULTS_PAGES:
            lost += unsourced(new, prose=name != "README.md")
        wrong += [f"{name}:{line}" for line in lost]
    for file, (experiment_name, figure) in FIGURES.items():
        experiment = records.experiment(f"{experiment_name}?")
        path = root / "docs" / "figures" / file
        if experiment is not None and figure_stale(path, experiment, figure, draw=not check):
            stale.append(str(path.relative_to(root)))
    return stale, wrong


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Write the documents' results from records.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a document is stale")
    check = parser.parse_args().check
    with user_errors():
        records = Records()
        stale, wrong = document(records, check=check)
        for line in stale:
            print(f"{line}: not what the records say" if check else f"written: {line.split(':')[0]}")
        print(*wrong, sep="\n", end="\n" if wrong else "")
        if records.missing:
            print(f"kept as they are, as there are no records yet: {', '.join(sorted(records.missing))}")
        if wrong or (check and stale):
            raise UserError(f"{len(wrong) + len(stale)} places to fix (above)" + (f"; {COMMAND}" if stale else ""))


if __name__ == "__main__":
    main()
