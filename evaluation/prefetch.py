"""python -m evaluation.prefetch experiment=NAME [k=v ...]: fetch and check what an experiment
needs, before it runs.

That is the models, heads, draft models, datastores and benches of the jobs that `evaluation.run`
would start with the same arguments. Each has a line: `here` if it is complete, or `missing` and
why. A null in configs/companions is no error, as its jobs are left out. Exit code 2 if something
else is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from model.errors import Parser, UserError, one_line
from model.weights.narrow_weights import needed_bytes

from .configuration.config import check_groups
from .configuration.jobs import compose
from .errors import user_errors
from .loading.bench import load_bench
from .loading.hub import KINDS, fetch_companions
from .loading.models import ModelSettings, locate


def needs(configurations: Iterable[DictConfig]) -> dict[str, Callable[[], object]]:
    fetchers: dict[str, Callable[[], object]] = {}
    for cfg in configurations:
        config: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        check_groups(config)
        model = config["model"]
        method = config["method"]
        fetchers[f"model {model['path']}"] = partial(_model, model)
        for key in KINDS.keys() & method.keys():
            one = {"name": method["name"], key: method[key]}
            name = f"{KINDS[key].words} {method[key] or ''}".rstrip()
            fetchers[name] = partial(fetch_companions, one, model["name"])
        fetchers[f"bench {config['bench']['name']}"] = partial(load_bench, **config["bench"])
    return fetchers


def _model(settings: dict[str, Any]) -> str:
    folder = locate(ModelSettings(**settings))
    return f" in {folder} (on a CPU it takes {needed_bytes(folder) / 1e9:.1f} GB of memory)"


def prefetch(fetchers: dict[str, Callable[[], object]]) -> bool:
    """Fetch what is missing and print a line for each; False if something published still is."""
    complete = True
    for name, fetch in fetchers.items():
        try:
            result = fetch()
            line = f"here     {name}{result if isinstance(result, str) else ''}"
        except UserError as error:
            line = f"missing  {name}: {one_line(error)}"
            complete &= name in {kind.words for kind in KINDS.values()}  # nobody published it
        print(line, flush=True)
    return complete


def main() -> None:
    parser = Parser(prog="python -m evaluation.prefetch", description=__doc__)
    parser.add_argument(
        "overrides", nargs="*", help="as for evaluation.run: experiment=NAME, model=..., ..."
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="as there")
    parser.add_argument("--config-dir", help="a further folder of configs, as there")

    with user_errors():
        options = parser.parse_intermixed_args()
        composed = compose(options.overrides, options.config_dir)
        if not prefetch(needs(job.config for job in composed.jobs)):
            sys.exit(2)


if __name__ == "__main__":
    main()
