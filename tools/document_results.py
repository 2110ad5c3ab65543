"""python -m tools.document_results [--check]: write the tables and figures of README.md and docs/
from shipped records.

    <!-- results: E                 E: a folder of results/reference/; YAML follows
    columns: {TITLE: WORDS, ...}    a cell is found by the WORDS of its row and of its column
    rows: {TITLE: WORDS, ...}
    first: ...                      the first column's title -->
    ... <!-- end -->

E may be `definitions`: what the columns of the tables mean; or `commands`: those of all records. A
cell whose configuration was not measured is empty.

WORDS, separated by spaces:

- a method; a column of tables/main.csv to print (by default MAT)
- setting=value; category=qa; interval=no
- tokens=0-256: only steps that begin in the first 256 tokens; loops=no: only those before 64 tokens
  occur again
- in=E: another experiment
- over WORDS: the ratio of MATs, or of tokens_per_second, to another configuration's; it shares
  settings not named again

Settings that are not named are the method's defaults, if it ran with these. Settings that the
method lacks are ignored. Values between commas make a row or column each; {} in the title is
replaced by the value.
"""

import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import yaml

from evaluation import figures
from evaluation.errors import user_errors
from evaluation.figures import style
from evaluation.records.compact import FILE
from evaluation.report import REFERENCE
from evaluation.statistics import intervals, metrics, pools, published, rendering, tables
from evaluation.statistics.experiment import Experiment
from evaluation.statistics.tables import COLUMNS
from model.errors import Parser, UserError
from model.files import ROOT, replaced, write_text

# file in docs/figures: the experiment and the name of its figure
FIGURES = {
    "budget.png": ("dynamic_tree", "budget"),
    "tree_size.png": ("curves", "tree_size"),
    "topk.png": ("topk-whole", "topk"),
    "temperature.png": ("temperature", "temperature"),
    "batch.png": ("batch", "batch"),
    "speed.png": ("speed", "budget"),
    "speed-dark.png": ("speed", "budget"),
}
TOPK = (
    '"method=recycling tree=shape method.k=4 tree.branching=4","method=recycling tree=shape",'
    '"method=recycling tree=shape method.k=16 tree.branching=16"'
)
# a method of some records that is no more; commands leave it out
GONE = "spine"
# words that recorded commands need now, as their experiments' files have changed since
CHANGED = {
    "quickstart": ("quickstart.also=[]",),
    "headline-h100": (
        'hydra.sweeper.also=["method=hf,pld,dynamic,recycling",'
        '"method=dynamic method.nodes=auto:64",'
        '"method=vanilla,dynamic,recycling model.dtype=float32"]',
        "hydra.sweeper.also_on_cuda=[]",
    ),
    "headline-h200": (
        'hydra.sweeper.also=["method=dynamic method.nodes=auto:64","method=pld"]',
        "hydra.sweeper.also_on_cuda=[]",
    ),
    "topk-whole": (f'hydra.sweeper.also=["method=recycling",{TOPK}]',),
    "topk-order-0": (f"hydra.sweeper.also=[{TOPK}]",),
    "topk-order-1": (f"hydra.sweeper.also=[{TOPK}]",),
}
BLOCK = re.compile(r"^<!-- results: ([^<]*?)-->\n(?:(?!<!-- ).*\n)*?<!-- end -->$", flags=re.M)
# words that choose a part of the answers and steps
PARTS = ("tokens", "loops")


@cache
class Shipped:
    """A shipped experiment.

    Attributes:
        configurations: the pooled runs of each configuration, and its settings.
        methods: the names of all methods.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.experiment = Experiment.read(REFERENCE / name)
        self.configurations = [(pool, settings(pool)) for pool in self.experiment.pools]
        self.methods = {values["method"] for _, values in self.configurations}

    @property
    def command(self) -> str:
        """The command of the run that began first, with results in a folder of the record's name.

        The words in CHANGED are added.
        """
        first = min(self.experiment.runs, key=lambda run: str(run.metadata["started"]))
        left_out = ("name=", "results_dir=", "-m", "--multirun")
        words = [
            word.replace(f"{GONE},", "")
            for word in first.metadata["command"][3:]
            if not word.startswith(left_out)
        ]
        words += CHANGED.get(self.name, ())
        return shlex.join(["bash", "eval.sh", *words, f"name={self.name}"])

    def parsed(self, words: str) -> dict[str, Any]:
        """Return the values of WORDS by setting; the method and the column by these names."""
        values: dict[str, Any] = {}
        for word in words.split():
            key, is_setting, value = word.partition("=")
            if is_setting:
                values[key] = yaml.safe_load(value)
            else:
                values["method" if key in self.methods else "column"] = key
        return values

    def find(self, wanted: dict[str, Any]) -> pools.Pool | None:
        """Return the configuration with these settings, of those that its method has.

        The method's defaults are preferred for the others.
        """
        method = wanted["method"]
        of_method = [pair for pair in self.configurations if pair[1]["method"] == method]
        has = set[str]()
        for _, values in of_method:
            has |= {key for key, value in values.items() if value is not None}
        wanted = {key: value for key, value in wanted.items() if key in has}

        usual = published.default_settings(method) | wanted
        fitting = [pair for pair in of_method if wanted.items() <= pair[1].items()]
        by_default = [pair for pair in fitting if usual.items() <= (usual | pair[1]).items()]
        fitting = by_default or fitting
        if len(fitting) > 1:
            names = ", ".join(pool.name for pool, _ in fitting)
            raise UserError(f"{self.name}: several configurations fit {wanted}: {names}")
        return fitting[0][0] if fitting else None

    def cell(self, words: str) -> str:
        """Return what these words ask for, as printed; empty if it was not measured."""
        wanted, over = map(self.parsed, f" {words} ".partition(" over ")[::2])
        column = wanted.pop("column", "mat")
        category = wanted.pop("category", metrics.OVERALL)
        with_interval = wanted.pop("interval", True)
        part = {key: wanted.pop(key) for key in PARTS if key in wanted}

        pool = self.find(wanted)
        base = self.find(wanted | over) if over else pool
        if pool is None or base is None:
            return ""

        cells = pool.cells.of(category)
        row: dict[Any, Any]
        if over and column == "tokens_per_second":
            column = "speedup_vanilla"
            row = tables.speedups("vanilla", pool.speeds.of(category), base)
        elif over:
            ratio = pools.mat_ratio(cells, base.cells.of(category))
            row = dict(zip(("mat", "mat_low", "mat_high"), ratio, strict=True))
        elif part:
            row = measured(pool, cells, part)
        else:
            names = {"method": pool.label, "variant": pool.variant, "category": category}
            named = pool.block | names
            table = self.experiment.table
            is_named = (table[list(named)] == list(named.values())).all(axis=1)
            (row,) = table[is_named].to_dict("records")
        return rendering.cell(row, column, with_interval=with_interval).printed


def settings(pool: pools.Pool) -> dict[str, Any]:
    """Return a configuration's settings that WORDS may name."""
    named = {"method": pool.method, "nodes": pool.budget}
    return {"order": "file", **pool.block, **pool.first.facets, **named}


def measured(pool: pools.Pool, cells: pools.Cells, part: dict[str, Any]) -> dict[Any, Any]:
    """Return MAT and counts of a part of the answers, by the columns of the main table."""
    asked = [pool.answers_to_compare(0)[key] for key in cells.questions]

    # tokens and steps of each question: (questions, 2)
    begin, end = map(int, part.get("tokens", f"0-{sys.maxsize}").split("-"))
    loops = part.get("loops", True)
    counts = [metrics.counts_between(answer, begin, end, loops) for answer in asked]
    tokens, steps = np.array(counts, dtype=np.float64).T

    low, high = intervals.quotient_interval(tokens, steps)
    return {
        "mat": tokens.sum() / steps.sum(),
        "mat_low": low,
        "mat_high": high,
        "questions": len(asked),
        "new_tokens": f"{tokens.sum():,.0f}",
    }


def expanded(entries: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield titles and words, with one entry for each of the values between commas."""
    for title, words in entries.items():
        values = re.search(r"[^\s=]+,[^\s=]+", words)
        if values is None:
            yield title, words
            continue
        for value in values[0].split(","):
            yield title.replace("{}", value), words.replace(values[0], value)


def rendered(block: re.Match[str]) -> str:
    """Return a block with its table."""
    spec = yaml.safe_load(f"results: {block[1]}")
    if spec["results"] == "definitions":
        body = rendering.markdown(("name", "unit", "definition"), defined())
    elif spec["results"] == "commands":
        records = sorted(path.parent.name for path in REFERENCE.glob(f"*/{FILE}"))
        body = "\n".join(f"- {name}: `{Shipped(name).command}`" for name in records)
    else:
        body = table_of(spec)
    return f"<!-- results: {block[1]}-->\n{body}\n<!-- end -->"


def table_of(spec: dict[str, Any]) -> str:
    """Return a block's table in Markdown."""
    columns = list(expanded(spec["columns"]))
    rows = []

    for title, of_row in expanded(spec["rows"]):
        cells = []
        for _, of_column in columns:
            # "over" comes last: what follows it is of the other configuration
            parts = sorted((of_row, of_column), key=lambda part: "over" in part.split())
            words = " ".join(parts)
            name = "".join(re.findall(r"\bin=(\S+)", words)) or spec["results"]
            cells.append(Shipped(name).cell(re.sub(r"\bin=\S+", "", words)))

        rows.append([title.strip(), *cells])

    heading = [spec.get("first", "method"), *(title for title, _ in columns)]
    table = rendering.markdown(heading, rows)
    # keeps an interval on one line
    table = re.sub(r"(?<=\d), (?=[\d.]+\])", ",\N{NO-BREAK SPACE}", table)
    return table


def defined() -> list[tuple[str, str, str]]:
    """Return names, unit and meaning of what is defined, for docs/concepts.md.

    Columns of one meaning come together.
    """
    with_meaning = [column for column in COLUMNS if column.meaning]
    rows = []
    for of, same in itertools.groupby(with_meaning, key=lambda c: (c.unit, c.meaning)):
        rows.append((", ".join(f"`{column.name}`" for column in same), *of))
    return rows


def save_figure(name: str) -> None:
    """Draw a document's figure; no version of the software is in the file."""
    record, kind = FIGURES[name]
    runs = Shipped(record).experiment.runs
    shown = Experiment(run for run in runs if run.settings["method"]["name"] != GONE)
    (data,) = figures.split(shown).values()
    path = ROOT / "docs/figures" / name
    with style.styled(dark=name.endswith("-dark.png")), replaced(path) as partial:
        figure = getattr(figures, kind)(data)
        figure.savefig(partial, format="png", metadata={"Software": None})


def main() -> None:
    """The command line."""
    parser = Parser(
        prog="python -m tools.document_results", description="Write documents' results."
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail where a document's table is stale",
    )

    with user_errors():
        check = parser.parse_args().check
        stale = False
        pages = [ROOT / "README.md", REFERENCE.parent / "README.md"]
        for page in [*pages, *sorted((ROOT / "docs").glob("*.md"))]:
            old = page.read_text(encoding="utf-8")
            new, blocks = BLOCK.subn(rendered, old)
            if blocks != old.count("<!-- results:"):
                raise UserError(f"{page.name}: a block is not closed by <!-- end -->")

            if new != old:
                stale = True
                print(f"{page.name}: {'not what the records say' if check else 'written'}")
                if not check:
                    write_text(page, new)

        if stale and check:
            raise UserError("python -m tools.document_results writes them anew")
        if not check:
            for name in FIGURES:
                save_figure(name)


if __name__ == "__main__":
    main()
