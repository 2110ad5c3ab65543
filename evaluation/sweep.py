"""The harness as a function: run a sweep as the command line does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from model.errors import UserError

from .configuration.config import checked_config
from .configuration.jobs import compose, named, quoted
from .records.runs import runs_at
from .records.store import available
from .running.scheduling import Job, run_jobs
from .tables.experiment import Experiment


def evaluate(
    model: str = "embedded",
    bench: str = "sample",
    method: str | Sequence[str] = "recycling",
    *,
    name: str = "evaluate",
    results_dir: str | Path = "results",
    **settings: Any,
) -> pd.DataFrame:
    """Measure methods on a bench, interleaved, and return the rows of `tables/main.csv`.

        frame = evaluate("smollm2-135m", method=["vanilla", "recycling"], start=["cold", "hot"])
        frame[frame.category == "overall"][["method", "mat", "speedup_vanilla"]]

    Args:
        model: a name of configs/model, or a folder or hub name.
        bench: a name of configs/bench, or a file of questions.
        name: of the experiment; its results go to results_dir/name, where runs are resumed.
        settings: any setting of configs/config.yaml. A group's setting has two underscores for the
            dot (method__k=4) or comes in a dictionary (**{"method.k": 4}, sampling={"temperature":
            1.0}). A list is swept. A value that is itself a list is given inside a list
            (bench__categories=[["qa", "rag"]]). `experiment` and `run_dir` are for the command line
            only.

    Raises:
        UserError: an error that the user can fix; finished runs are kept.
    """
    for key in ("experiment", "run_dir"):
        if settings.get(key) is not None:
            raise UserError(
                f"{key}: is for the command line, bash eval.sh {key}=...; see what evaluate() takes"
            )

    given = {**named("model", model), **named("bench", bench), "method": method, "interleave": True}
    # method.k for {"method": {"k": ...}}
    nested = pd.json_normalize([settings]).to_dict("records")[0]
    given |= {str(key).replace("__", "."): value for key, value in nested.items()}
    given |= {"name": str(name), "results_dir": str(results_dir)}
    words = []

    for key, value in given.items():
        values = value if isinstance(value, list | tuple) else [value]
        if not values:
            raise UserError(f"{key}: an empty list; name at least one")
        words.append(f"{key}={','.join(map(quoted, values))}")

    jobs = [Job(checked_config(job.config)) for job in available(compose(words).jobs)]
    return Experiment(runs_at(set(run_jobs(jobs, given=given)))).table.reset_index(drop=True)
