"""The harness as a function: what a sweep's command line does, and its table as a frame.

from evaluation.sweep import evaluate

frame = evaluate("smollm2-135m", "spec_bench", ["vanilla", "recycling"], start=["cold", "hot"], max_new_tokens=128)
frame[frame.category == "overall"][["method", "mat", "tokens_per_second", "speedup_vanilla"]]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from model.errors import UserError

from .configuration.config import checked_config
from .configuration.jobs import compose, named, quoted
from .records.runs import runs_at
from .records.sweeps import available
from .running.scheduling import Job, run_jobs
from .statistics.experiment import Experiment


def evaluate(
    model: str = "embedded",
    bench: str = "sample",
    method: str | Sequence[str] = "recycling",
    *,
    name: str = "evaluate",
    results_dir: str | Path = "results",
    **settings: Any,
) -> pd.DataFrame:
    """Measure methods on a bench, in turn, and return the rows of these runs as `tables/main.csv` has them.

    Runs are kept as a command's are: what was answered before is read and not run again, what was interrupted goes on.

    Args:
        model: a name of configs/model, or a folder or hub name.
        bench: a name of configs/bench, or a file of questions.
        method: names of configs/method, one or several.
        name: of the experiment; its results go to results_dir/name.
        settings: any of configs/config.yaml; those of a group with two underscores for the dot (method__k=4) or in a
            dictionary ({"method.k": 4}, by **; sampling={"temperature": 1.0}). A list is swept: every combination runs,
            without what a method has not; what cannot run is named and left out, as on the command line. What is itself
            a list stands in one (bench__categories=[["qa", "rag"]]).
            An experiment's file and run_dir are for the command line.

    Raises:
        UserError: whatever a user can mend; the runs before it are kept.
    """
    for key in ("experiment", "run_dir"):
        if settings.get(key) is not None:
            raise UserError(f"{key}: is for the command line, bash eval.sh {key}=...; see what evaluate() takes")
    given = {**named("model", model), **named("bench", bench), "method": method, "interleave": True}
    nested = pd.json_normalize([settings]).to_dict("records")[0]  # method.k for {"method": {"k": ...}}
    given |= {str(key).replace("__", "."): value for key, value in nested.items()}
    given |= {"name": str(name), "results_dir": str(results_dir)}
    words = []
    for key, value in given.items():
        values = value if isinstance(value, list | tuple) else [value]
        if not values:
            raise UserError(f"{key}: an empty list; name at least one")
        words.append(f"{key}={','.join(map(quoted, values))}")
    jobs = [Job(checked_config(job.config)) for job in available(compose(words, multirun=True).jobs)]
    return Experiment(runs_at(set(run_jobs(jobs)))).table
