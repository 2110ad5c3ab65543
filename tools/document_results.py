"""python -m tools.document_results [--check]: write the tables and figures of README.md and docs/
from shipped records.

    <!-- results: E                 E: a folder of results/reference/; YAML follows; without rows:
    the conditions
    columns: {TITLE: WORDS, ...}    a cell is found by the WORDS of its row and of its column
    rows: {TITLE: WORDS, ...}       WORDS may be a list with an item for each column
    first, more, gaps: ...          the first column's title; columns written by hand; whether cells
    may be empty -->
    ... <!-- end -->

E may be `definitions`: what the columns of the tables mean. The commands of a table's records are
printed below it.

WORDS, separated by spaces:

- a method; a column of tables/main.csv (by default MAT), or a setting, to print
- setting=value; category=qa; interval=no
- repeated=10-30: only answers with 10 to 30 % of repeated 3-grams
- tokens=0-256: only steps that begin in the first 256 tokens; loops=no: only those before 64 tokens
  occur again
- half=held_out: only this half of the questions (bench.split), of a record of the whole bench
- in=E: another experiment
- over WORDS: the ratio of MATs, or of tokens_per_second, to another configuration's; it shares
  settings not named again

Settings that are not named are the method's defaults, if it ran with these. A comma makes a row or
column for each value; {nodes} in a title is replaced by the value of nodes.
"""

import argparse
import hashlib
import itertools
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from evaluation import figures
from evaluation.errors import user_errors
from evaluation.figures import style
from evaluation.loading.bench import SPLITS, numbers
from evaluation.records.rows import new_tokens
from evaluation.report import REFERENCE
from evaluation.statistics import intervals, metrics, notes, pools, published, rendering, tables
from evaluation.statistics.experiment import Experiment
from evaluation.statistics.tables import COLUMNS
from model.errors import UserError
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
# settings that the experiment's file has changed since, or that records leave out (values with
# quotes)
CHANGED = {
    "quickstart": ('quickstart.also=["method=recycling start=hot tree=auto"]',),
    "headline-h200": (
        (
            'hydra.sweeper.also=["method=recycling,spine,dynamic tree=auto'
            ' tree.nodes=64","method=pld"]'
        ),
        "hydra.sweeper.also_on_cuda=[]",
    ),
    "topk-whole": (f'hydra.sweeper.also=["method=recycling",{TOPK}]',),
    "topk-order-0": (f"hydra.sweeper.also=[{TOPK}]",),
    "topk-order-1": (f"hydra.sweeper.also=[{TOPK}]",),
}
BLOCK = re.compile(r"^<!-- results: ([^<]*?)-->\n(?:(?!<!-- ).*\n)*?<!-- end -->$", flags=re.M)


@cache
class Shipped:
    """A shipped experiment, each configuration with its settings as text.

    Attributes:
        configurations: the pooled runs of each configuration, and its settings.
        setting_names: of all configurations.
        methods: the names of all methods.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.experiment = Experiment.read(REFERENCE / name)
        self.configurations = [(pool, settings(pool)) for pool in self.experiment.pools]
        self.setting_names = set().union(*(values for _, values in self.configurations))
        self.methods = {values["method"] for _, values in self.configurations}

    @cached_property
    def command(self) -> str:
        """The command of the run that began first, with results in a folder of the record's name.

        If the experiment's file has further methods today, the recorded methods are named. CHANGED
        settings are added.
        """
        first = min(self.experiment.runs, key=lambda run: str(run.metadata["started"]))
        left_out = ("name=", "results_dir=", "-m", "--multirun")
        words = [word for word in first.metadata["command"][3:] if not word.startswith(left_out)]

        file = ROOT / f"configs/{words[0].replace('=', '/')}.yaml"
        experiment = yaml.safe_load(file.read_text())
        grid = {*experiment["hydra"]["sweeper"]["params"]["method"].split(",")}
        named = any(word.startswith(("method=", "hydra.sweeper.params.method=")) for word in words)
        if grid > self.methods and not named:
            words.append(f"method={','.join(sorted(self.methods))}")

        words += CHANGED.get(self.name, ())
        return shlex.join(["bash", "eval.sh", *words, f"name={self.name}"])

    def parsed(self, words: str) -> dict[str, str]:
        """Return WORDS by what they name: a setting, the method, or the column."""
        values = {}
        for word in words.split():
            key, is_setting, value = word.partition("=")
            if is_setting:
                values[key] = value or key
            else:
                values["method" if key in self.methods else "column"] = key
        return values

    def of_method(self, method: str) -> list[dict[str, str]]:
        """Return the settings of a method's configurations."""
        return [values for _, values in self.configurations if values["method"] == method]

    def find(self, wanted: dict[str, str]) -> pools.Pool | None:
        """Return the configuration with these settings.

        The method's defaults are preferred for the others.

        A method without state has one configuration, which fits every start.
        """
        # a method without state fits every start
        method = wanted.get("method", "")
        starts = {values.get("start", "null") for values in self.of_method(method)}
        if starts == {"null"}:
            wanted = {key: value for key, value in wanted.items() if key != "start"}

        fitting = [pair for pair in self.configurations if wanted.items() <= pair[1].items()]
        usual = (texts(published.default_settings(method)) | wanted).items()
        by_default = [pair for pair in fitting if usual <= (dict(usual) | pair[1]).items()]
        fitting = by_default or fitting

        if wanted.keys() - self.setting_names or len(fitting) > 1:
            names = [pool.name for pool, _ in fitting]
            raise UserError(f"{self.name}: {wanted} fits {names}, of settings {self.setting_names}")

        return fitting[0][0] if fitting else None

    def cell(self, words: str) -> str | None:
        """Return what these words ask for, as printed; None if it was not measured."""
        wanted, over = map(self.parsed, f" {words} ".partition(" over ")[::2])

        # what is printed
        column = wanted.pop("column", "mat")
        category = wanted.pop("category", metrics.OVERALL)
        interval = wanted.pop("interval", "yes") == "yes"

        # of which answers and steps
        repeated = wanted.pop("repeated", None)
        tokens_between = wanted.pop("tokens", None)
        loops = wanted.pop("loops", "yes") == "yes"
        half = wanted.pop("half", None)

        pool = self.find(wanted)
        if pool is None:
            return None

        cells = halved(pool, half).of(category)
        if column in self.setting_names:
            return settings(pool)[column]

        in_part = repeated or tokens_between or half or not loops
        if over:
            # the other configuration shares the settings that its method has
            names = set[str]()
            for values in self.of_method(over.get("method", pool.method)):
                names |= {key for key in values if values[key] != "null"}
            shared = {key: value for key, value in wanted.items() if key in names}
            base = self.find(shared | over)
            if base is None:
                return None

            row: dict[Any, Any] = {}

            if column == "tokens_per_second":
                speeds = pool.speeds.of(category)
                if half:
                    speeds = speeds.take(speeds.questions.isin(cells.questions))

                column = "speedup_vanilla"
                row = tables.speedups("vanilla", speeds, base)
            else:
                ratio = pools.mat_ratio(cells, halved(base, half).of(category))
                row = dict(zip(("mat", "mat_low", "mat_high"), ratio, strict=True))

        elif in_part:
            answers = pool.answers_to_compare(0)
            if repeated:
                low, high = (int(end) / 100 for end in repeated.split("-"))
                shares = [metrics.repetition(answers[key]) for key in cells.questions]
                cells = cells.take(np.array([low <= share < high for share in shares]))

            # tokens and steps of each question: (questions, 2)
            begin, end = map(int, (tokens_between or f"0-{sys.maxsize}").split("-"))
            asked = [answers[key] for key in cells.questions]
            counts = [metrics.counts_between(answer, begin, end, loops) for answer in asked]
            tokens, steps = np.array(counts, dtype=np.float64).T

            row = {
                "mat": tokens.sum() / steps.sum(),
                "questions": len(tokens),
                "new_tokens": f"{tokens.sum():,.0f}",
            }
            row["mat_low"], row["mat_high"] = intervals.quotient_interval(tokens, steps)

        else:
            named = {
                **pool.group,
                "method": pool.label,
                "variant": pool.variant,
                "category": category,
            }

            table = self.experiment.table
            is_named = (table[list(named)] == list(named.values())).all(axis=1)
            (row,) = table[is_named].to_dict("records")

        return rendering.cell(row, column, with_interval=interval).printed


def halved(pool: pools.Pool, half: str | None) -> pools.Cells:
    """Return the cells of the questions that bench.split=`half` chooses.

    It chooses from all questions. None: the cells of every question.
    """
    if half is None:
        return pool.cells

    # halves are counted in the order of the file
    rows = dict(sorted(pool.answers_to_compare(0).items(), key=lambda item: item[1]["question_id"]))
    number = dict(zip(rows, numbers(row["category"] for row in rows.values()), strict=True))

    halves = [SPLITS[number[key] % 2] for key in pool.cells.questions]
    return pool.cells.take(np.array(halves) == half)


def conditions(experiment: Experiment) -> str:
    """Return a paragraph with an experiment's questions, repeats, models and devices."""
    benches: dict[str, str] = {}
    for pool in experiment.pools:
        rows = pool.first_answers
        bench = pool.group["bench"]

        turns = 0
        for row in rows:
            turns += sum(len(choice["turns"]) for choice in row["choices"])

        counts = f"({turns:,} turns, {sum(map(new_tokens, rows)):,} tokens)"
        benches.setdefault(bench, f"{len(rows)} questions of {bench} {counts}")

    repeats = max(len(pool.repeats) for pool in experiment.pools)
    parts = [*benches.values(), f"{repeats} repeat{'s' * (repeats > 1)}"]
    parts += dict.fromkeys("; ".join(notes.heading(experiment.runs)).split("; "))

    text = "; ".join(parts) + "."
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def defined() -> list[tuple[str, str, str]]:
    """Return names, unit and meaning of what is defined.

    Columns of one meaning come together, for docs/concepts.md.
    """
    with_meaning = [column for column in COLUMNS if column.meaning]
    rows = []
    for of, same in itertools.groupby(with_meaning, key=lambda c: (c.unit, c.meaning)):
        rows.append((", ".join(f"`{column.name}`" for column in same), *of))
    return rows


def settings(pool: pools.Pool) -> dict[str, str]:
    """Return a configuration's settings that WORDS may name, as text."""
    return texts(
        {
            "order": "file",
            **pool.group,
            **pool.identity.facets,
            "method": pool.method,
            "nodes": pool.budget,
        }
    )


def texts(values: dict[str, Any]) -> dict[str, str]:
    """Return settings as text, as YAML has them."""
    words = {}
    for key, value in values.items():
        words[key] = f"{value:g}" if isinstance(value, float) else str(value).lower()
        if value is None:
            words[key] = "null"

    return words


def expanded(entries: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield titles and words, with one entry for each of the values between commas."""
    for title, words in entries.items():
        if isinstance(words, list):
            yield title.format(category=""), words
            continue

        choices = []
        for word in words.split():
            key, is_setting, values = word.rpartition("=")
            choices.append([key + is_setting + value for value in values.split(",")])

        for choice in itertools.product(*choices):
            named = {"category": ""}
            for word in choice:
                key, _, value = word.rpartition("=")
                named[key or "method"] = value
            named["category"] = named["category"].replace("_", " ")
            yield title.format(**named), [" ".join(choice)]


def rendered(block: re.Match[str]) -> str:
    """Return a block with its table, with the definitions, or with the experiment's conditions."""
    spec = yaml.safe_load(f"results: {block[1]}")
    columns = list(expanded(spec.get("columns", {})))
    more = spec.get("more", {})
    rows = []
    used = dict[str, None]()

    for title, of_row in expanded(spec.get("rows", {})):
        cells = []
        for words_of_row, (_, (of_column,)) in zip(itertools.cycle(of_row), columns, strict=False):
            # "over" comes last: what follows it is of the other configuration
            parts = sorted((words_of_row, of_column), key=lambda part: "over" in part.split())
            words = " ".join(parts)
            name = "".join(re.findall(r"\bin=(\S+)", words)) or spec["results"]
            used[name] = None

            cells.append(Shipped(name).cell(re.sub(r"\bin=\S+", "", words)))
            if cells[-1] is None and not spec.get("gaps"):
                raise UserError(f"{name}: no configuration is '{words}'")

        by_hand = [str(column.get(title, "")) for column in more.values()]
        rows.append([title.strip(), *(cell or "" for cell in cells), *by_hand])

    if rows:
        heading = [spec.get("first", "method"), *(title for title, _ in columns), *more]
        body = rendering.markdown(heading, rows)
        # keeps an interval on one line
        body = re.sub(r"(?<=\d), (?=[\d.]+\])", ",\N{NO-BREAK SPACE}", body)

        body += "\n\n" + ";\n".join(f"`{Shipped(name).command}`" for name in used)
    elif spec["results"] == "definitions":
        body = rendering.markdown(("name", "unit", "definition"), defined())
    else:
        body = conditions(Shipped(spec["results"]).experiment)

    return f"<!-- results: {block[1]}-->\n{body}\n<!-- end -->"


def contents(figure: Figure) -> str:
    """Return a digest of what a figure shows, whatever the fonts.

    That is data, names, labels and how lines look.
    """
    shown: list[object] = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        shown += [axes.get_xlabel(), axes.get_ylabel(), axes.get_title()]
        shown.append([text.get_text() for text in axes.texts])

        lines = axes.lines
        shown += [(line.get_label(), line.get_xydata()) for line in lines]
        shown += [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines]

        for patch in axes.patches:
            shown.append(patch.get_path().transformed(patch.get_patch_transform()).vertices)
        for shape in axes.collections:
            shown += [path.vertices for path in shape.get_paths()]
        shown += [np.ma.filled(np.ma.asarray(image.get_array()), np.nan) for image in axes.images]

        # labels of ticks that were set, not found by matplotlib
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_locator(), FixedLocator):
                shown.append([label.get_text() for label in axis.get_ticklabels()])

    rounded = json.dumps(shown, default=_rounded)
    return hashlib.sha256(rounded.encode()).hexdigest()


def _rounded(array: Any) -> list[str]:
    """Return the numbers of an array, rounded to five digits."""
    return [f"{value:.5g}" for value in np.ravel(array).tolist()]


def save_png(figure: Figure, path: Path, shown: str) -> None:
    """Write the figure with the digest of what it shows in its metadata.

    No version of the software is in there.
    """
    with style.styled(), replaced(path) as partial:
        figure.savefig(partial, format="png", metadata={"Software": None, "Contents": shown})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.document_results", description="Write documents' results."
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail where a document is stale",
    )

    with user_errors():
        check = parser.parse_args().check
        stale = []

        for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
            old = page.read_text(encoding="utf-8")
            new, blocks = BLOCK.subn(rendered, old)

            if blocks != old.count("<!-- results:"):
                raise UserError(f"{page.name}: a block is not closed by <!-- end -->")
            stale += [(page, partial(write_text, page, new))] if new != old else []

        for name, (of, kind) in FIGURES.items():
            (data,) = figures.split(Shipped(of).experiment).values()
            with style.styled(dark=name.endswith("-dark.png")):
                file = ROOT / "docs/figures" / name
                figure = getattr(figures, kind)(data)

            shown = contents(figure)  # kept as text in a PNG
            if not file.exists() or f"Contents\0{shown}".encode() not in file.read_bytes():
                stale.append((file, partial(save_png, figure, file, shown)))

        for file, write in stale:
            print(f"{file.name}: {'not what the records say' if check else 'written'}")
            if not check:
                write()

        if stale and check:
            raise UserError("python -m tools.document_results writes them anew")


if __name__ == "__main__":
    main()
