"""python -m evaluation.prefetch experiment=NAME [k=v ...]: fetch and check what an experiment
needs, before it runs.

It fetches the models, heads, draft models, datastores and benches of exactly the jobs that
`evaluation.run` would start with the same arguments. For nodes without a network, run it where
there is one. Each has a line: `here` if it is complete, or `missing` and why. A null in
configs/companions is no error, as its jobs are left out. Exit code 2 if something else is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from model.errors import Parser, UserError, one_line
from model.narrow_weights import needed_bytes

from .configuration.config import check_groups
from .configuration.jobs import compose
from .errors import user_errors
from .loading.bench import load_bench
from .loading.hub import KINDS, fetch_companions, missing_companion
from .loading.models import ModelSettings, locate


def needs(configurations: Iterable[DictConfig]) -> dict[str, Callable[[], object] | None]:
    """Return by name the functions that fetch and check what the jobs need.

    A function is None if nobody published its data.
    """
    fetchers: dict[str, Callable[[], object] | None] = {}
    for cfg in configurations:
        config: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        check_groups(config)
        model = config["model"]
        method = config["method"]
        bench = config["bench"]
        fetchers.setdefault(f"model {model['path']}", partial(locate, ModelSettings(**model)))

        for key in KINDS.keys() & method.keys():
            companion = {"name": method["name"], key: method[key]}
            if method[key] is None:
                fetchers[missing_companion(companion, model["name"])] = None
            else:
                name = f"{KINDS[key].words} {method[key]}"
                fetchers.setdefault(name, partial(fetch_companions, companion, model["name"]))

        fetchers.setdefault(f"bench {bench['name']}", partial(load_bench, **bench))

    return fetchers


def prefetch(fetchers: dict[str, Callable[[], object] | None]) -> bool:
    """Fetch what is missing and print a line for each.

    Return False if something published is still missing.
    """
    complete = True
    for name, fetch in fetchers.items():
        here = fetch is not None
        more = ""
        try:
            where = fetch() if fetch is not None else None
            if isinstance(where, Path):  # a model
                more = "" if name.endswith(where.name) else f" in {where}"
                more += f" (on a CPU it takes {needed_bytes(where) / 1e9:.1f} GB of memory)"
        except UserError as error:
            here = False
            more = f": {one_line(error)}"
            complete = False
        print(f"{'here' if here else 'missing':8} {name}{more}", flush=True)

    return complete


def main() -> None:
    """The command line."""
    parser = Parser(prog="python -m evaluation.prefetch", description=__doc__)
    parser.add_argument(
        "overrides",
        nargs="*",
        help="as for evaluation.run: experiment=NAME, model=..., ...",
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="as there")
    parser.add_argument("--config-dir", help="a further folder of configs, as there")

    with user_errors():
        given = parser.parse_intermixed_args()
        composed = compose(given.overrides, given.config_dir)
        if not prefetch(needs(job.config for job in composed.jobs)):
            sys.exit(2)


if __name__ == "__main__":
    main()
