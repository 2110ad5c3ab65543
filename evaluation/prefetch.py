"""python -m evaluation.prefetch experiment=NAME [k=v ...]: fetch and check what an experiment needs, before it runs.

Models, heads, draft models, datastores and benches of exactly the jobs that `evaluation.run` would start with the same
arguments: for nodes without a network, run it where there is one. A line for each: `known` was here and
complete, `fetched` was not, `missing` says why. A null in configs/companions is reported without an error: its jobs are
left out. Exit code 2 if something else is missing.
"""

from __future__ import annotations

import argparse
import sys

from .configuration.jobs import compose_jobs
from .configuration.needs import needs, prefetch
from .errors import user_errors


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.prefetch", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="as for evaluation.run: experiment=NAME, model=..., ...")
    parser.add_argument("-m", "--multirun", action="store_true", help="a sweep without an experiment, as there")
    parser.add_argument("--config-dir", help="a further folder of configs, as there")
    given = parser.parse_intermixed_args()
    with user_errors():
        jobs = compose_jobs(given.overrides, multirun=given.multirun, config_dir=given.config_dir)
        if not prefetch(needs(job.config for job in jobs)):
            sys.exit(2)


if __name__ == "__main__":
    main()
