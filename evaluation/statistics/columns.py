"""Every column of the tables, one row each: terminal, Markdown, LaTeX, the page and docs/concepts.md read them here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

# Where a column is shown; main.csv and the page's "all columns" hold every one.
TERMINAL, MARKDOWN, PAGE, SETUP = "terminal", "markdown", "page", "setup"  # SETUP: the page says it above its table
PAPER, FILES, EVERYWHERE = (TERMINAL, MARKDOWN), (MARKDOWN, PAGE), (TERMINAL, MARKDOWN, PAGE)


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        meaning: its definition, in Markdown.
        title: as it is printed; empty: the name.
        form: of its numbers; "g": a setting, whose number is no measure.
        shown: where, unless it says nothing there.
    """

    name: str
    meaning: str = ""
    unit: str = ""
    title: str = ""
    form: str = ".2f"
    shown: tuple[str, ...] = ()

    @property
    def setting(self) -> bool:
        return self.form == "g"

    @property
    def heading(self) -> str:
        return self.title or self.name

    @property
    def definition(self) -> str:
        """The meaning with its unit, as plain text."""
        return self.meaning.replace("`", "") + (f" ({self.unit})" if self.unit else "")


PER_STEP, SPEED, MS = "tokens a step", "tokens/s", "ms"
PERCENTILES = (50, 95, 99)
INTER_TOKEN = (
    "percentiles over all steps but the first of each turn: from the end of the step before, when its tokens came, to "
    "this one's. A step is one interval, whether it adds one token or five, as between the chunks of a stream in "
    "`vllm bench serve`. Empty for `hf` and where step times (`step_us`) were not recorded"
)
SPEEDUP = (
    "`tokens_per_second` over that of the named baseline on the questions that both answered: same model, settings, "
    "bench file, device and experiment"
)
EXECUTION = (
    "how the steps of the row, and of the baseline of its speedup, were taken: `eager`, `graph`; "
    "`transformers generate` for `hf`. `speedup_vanilla` is over a run of the same execution or is not printed, and "
    "the table says so"
)
SELECTION = "how many questions a row's runs are to answer, over all shards, and a hash of which they are"
INTERVAL = (
    "95 % bootstrap interval from 2,000 seeded draws: of MAT over questions, of speeds over questions and repeats "
    "(section Intervals of docs/concepts.md)"
)

# In the order in which Markdown and terminal print them.
COLUMNS = (
    Column("method", shown=EVERYWHERE),
    Column("variant", shown=EVERYWHERE),
    Column("execution", EXECUTION, shown=(*EVERYWHERE, SETUP)),
    Column("execution_hf", EXECUTION, shown=(SETUP,)),
    Column("execution_vanilla", EXECUTION, shown=(SETUP,)),
    Column("category", shown=FILES),
    Column("questions", shown=EVERYWHERE),
    Column(
        "repeats",
        "runs of the same configuration, each from a fresh state. Counts but for `questions` are sums over them",
        shown=PAPER,
    ),
    Column(
        "new_tokens",
        "generated tokens, the end-of-sequence token included, never past the limit",
        "tokens",
        "new tokens",
        shown=FILES,
    ),
    Column("mat", "micro mean of accepted lengths: all accepted tokens / all steps", PER_STEP, "MAT", shown=EVERYWHERE),
    Column("mat_macro", "mean over questions of the question's own mean", PER_STEP, "MAT macro", shown=FILES),
    Column(
        "tokens_per_second",
        "mean over questions of (new tokens / wall time): Spec-Bench's figure",
        SPEED,
        "tokens/s",
        ",.1f",
        EVERYWHERE,
    ),
    Column("tokens_per_second_total", "all new tokens / all wall time", SPEED, "tokens/s, total", ",.1f"),
    Column(
        "tokens_per_second_decode",
        "new tokens after the first step of each turn / decoding time, prefill excluded",
        SPEED,
        "tokens/s, decode",
        ",.1f",
    ),
    Column(
        "X_std",
        "sample standard deviation (n - 1) over the repeats' own figures, each over all shards of its repeat. A "
        "speedup pairs repeat i with the baseline's repeat i",
        "of X",
    ),
    Column("tokens_per_second_std", title="tokens/s, std", form=",.1f", shown=PAPER),
    Column("X_low", INTERVAL, "of X"),
    Column("X_high", INTERVAL, "of X"),
    Column("speedup_hf", SPEEDUP, shown=EVERYWHERE),
    Column("speedup_vanilla", SPEEDUP, shown=EVERYWHERE),
    Column("published_mat", shown=EVERYWHERE),
    Column("published_speedup_hf", shown=EVERYWHERE),
    Column(
        "note",
        "only where a sweep left a method out: `not available: why` (no heads, draft model or datastore for that "
        "model). Such a row has no measures",
        shown=EVERYWHERE,
    ),
    Column(
        "prefill_ms",
        "mean over turns: from the prompt's token ids to the first new token's. A draft that is a chain goes with the "
        "prompt in one forward; a tree has a forward of its own",
        MS,
    ),
    Column(
        "time_to_first_token_ms",
        "mean over turns: from the question's text to the first new token: template, tokenising, prefill",
        MS,
    ),
    *(
        Column(f"time_to_first_token_ms_p{p}", "percentiles over turns of `time_to_first_token_ms`", MS)
        for p in PERCENTILES
    ),
    *(Column(f"inter_token_latency_ms_p{p}", INTER_TOKEN, MS) for p in PERCENTILES),
    Column(
        "decode_ms",
        "mean over turns: from the first step's end to the last one's, device synchronised at the end",
        MS,
    ),
    Column("step_ms", "all decoding time / all steps but the first of each turn", MS),
    Column(
        "peak_memory_mib",
        "the largest over questions. CUDA: tensors on all devices; the pool of captured graphs is not counted. CPU: "
        "the resident set of the process. Both include the other methods of an interleaved sweep",
        "MiB",
    ),
    Column(
        "state_bytes",
        "saved tensors of the method. Text kept between prompts (`history_tokens`) counts as its token ids; the "
        "automaton over it takes some 440 bytes a token more in memory",
        "bytes",
    ),
    *(Column(n, shown=(SETUP,)) for n in ("model", "bench", "dtype", "device", "complete", "timed", "temperature")),
    Column("block", title="on", shown=(PAGE,)),  # where there are several
    *(Column(name, form="g", shown=(SETUP,)) for name in ("seed", "max_new_tokens")),
    *(Column(name, form="g") for name in ("tree_nodes", "tree_depth", "tree_breadth", "k")),
    Column("bench_questions", SELECTION, form="g", shown=(SETUP,)),
    Column("questions_sha256", SELECTION, shown=(SETUP,)),
    Column("joint_acceptance", "of the steps that drafted, the share whose accepted path reaches this depth"),
    Column(
        "conditional_acceptance",
        "of the steps that reach the depth above, the share that reach this one. A path cut by the answer's end counts "
        "as what was kept",
    ),
)
# Table 1: the paper's columns, speedups by subtask, then Spec-Bench as a whole and MBPP.
TABLE1 = tuple(
    Column(name, title=title)
    for name, title in (
        *(("mt", "MT"), ("translation", "Trans."), ("summarization", "Sum."), ("qa", "QA")),
        *(("math_reasoning", "Math"), ("rag", "RAG")),
        *((f"{part}_{name}", title) for part in ("specbench", "mbpp") for name, title in
          (("mat", "MAT"), ("tokens_per_second", "Tokens/s"), ("speedup", "Speed"))),
    )
)  # fmt: skip
_BY_NAME = {column.name: column for column in COLUMNS}


def column(name: str) -> Column:
    """Return the column of this name; the deviation of a measure is one, and so is any setting of a method."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    base, _, end = name.rpartition("_")
    if end == "std":
        measure = column(base)
        return replace(_BY_NAME["X_std"], name=name, title=f"{measure.title or base} std", form=measure.form)
    return Column(name)


def defined() -> list[tuple[str, str, str]]:
    """Return names, unit and meaning of what is defined: columns of one meaning together, for docs/concepts.md."""
    groups = itertools.groupby((c for c in COLUMNS if c.meaning), key=lambda c: (c.unit, c.meaning))
    return [(", ".join(f"`{c.name}`" for c in same), unit, meaning) for (unit, meaning), same in groups]
