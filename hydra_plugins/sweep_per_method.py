"""The sweeper of `python -m evaluation.run -m`: Hydra's own, for methods that have settings of their own.

Hydra finds plugins in a package of this name and nowhere else. Seven things differ from its basic sweeper:

- `method.K=...` counts for those of the swept methods that have a setting K, `tree.K=...` for those templates that have
  a parameter K, and trees for the methods that draft from one (auto for those that follow the machine, too); the other
  jobs are made without it, once. So a baseline stands in the same sweep as the method.
- The same job is not made twice.
- `also`, among the swept parameters, lists further jobs that the product does not hold (a tree for one method, say),
  each as a command line would. One counts only while the product goes through the values that it names (those of
  `equal` aside), so that a narrower command line leaves it out.
- `equal`, among the swept parameters, lists keys that have one value in each job: a budget of 16 is 16 for whichever of
  these settings the method has.
- The jobs are written down (`sweep.json` in the experiment's folder, of which there are several if the jobs differ in
  `name`) before the first one starts, so that a report can name what is missing and the command that completes it.
  Those whose method lacks a companion for its model are named then, all together, and left out.
- Jobs with start=saved come in a batch of their own, when all others are done: they start from what a hot run left.
- Where Hydra's basic launcher runs the jobs in this process, those with `interleave` or without times are run together.
"""

from __future__ import annotations

import copy
import shlex
import sys
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import HydraContext
from omegaconf import DictConfig, OmegaConf

from evaluation.configuration.companions import missing_companion
from evaluation.configuration.config import register_names
from evaluation.configuration.fingerprint import SAVED
from evaluation.configuration.jobs import GROUPS, Find, expand, further, in_rounds, key_of, typed
from evaluation.loading.processes import rank
from evaluation.records.sweeps import Planned, available, write_down
from evaluation.running.callback import report_at_end
from evaluation.running.scheduling import run_deferred
from model.errors import UserError

BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"  # by name: Hydra imports its plugins anew

register_names()  # for whoever composes configs/: Hydra imports its plugins first


class PerMethodSweeper(BasicSweeper):
    """A Cartesian product whose jobs name only settings that their method and tree have."""

    launcher: Any

    def __init__(self, max_batch_size: int | None, params: Any = None) -> None:
        swept = dict(params or {})
        also = swept.pop("also", ())  # a text where it comes by interpolation, which Hydra allows for texts alone
        self.also = [shlex.split(job) for job in (also.split(";") if isinstance(also, str) else also)]
        self.equal = frozenset(swept.pop("equal", ()))
        self.jobs: list[Planned] = []
        self._cache: dict[tuple[str, ...], DictConfig] = {}
        super().__init__(max_batch_size, swept)

    def setup(self, *, config: DictConfig, hydra_context: HydraContext, **context: Any) -> None:
        here = config.hydra.launcher._target_ == BASIC
        if here:  # it composes each job again
            hydra_context = HydraContext(ComposedOnce(hydra_context.config_loader), hydra_context.callbacks)
        super().setup(config=config, hydra_context=hydra_context, **context)
        if here:
            self.launcher = Together(self.launcher)

    @cached_property
    def find(self) -> Find:
        """Looks a config up in the search path of this command."""
        return find_in([f"{s.schema}://{s.path}" for s in self.config.hydra.runtime.config_sources])

    def sweep(self, arguments: list[str]) -> Any:
        done = super().sweep(arguments)
        for folder in dict.fromkeys(job.folder for job in self.jobs):
            report_at_end(self.config, folder)
        return done

    def configurations(self, arguments: list[str]) -> list[DictConfig]:
        """What the jobs of a command line compose to, one for the repeats together. Nothing is written."""
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        for job in self._jobs(parser.parse_overrides([*self._parse_config(), *arguments])):
            self._composed(job)
        return list(self._cache.values())

    def split_arguments(self, overrides: list[Override], max_batch_size: int | None) -> list[list[list[str]]]:
        self.jobs = [planned(job, self._composed(job)) for job in self._jobs(overrides)]
        if self.config.run_dir is None and rank() == 0:
            write_down(self.jobs, command(typed(sys.argv[1:])))
        left, notes = available(self.jobs)
        if notes and rank() == 0:
            print("\n  ".join(notes), file=sys.stderr)
        parts = [
            [job.overrides for job in left if (f"start={SAVED}" in job.overrides) == last] for last in (False, True)
        ]
        return [
            batch for part in parts if part for batch in BasicSweeper.split_overrides_to_chunks(part, max_batch_size)
        ]

    def _jobs(self, overrides: list[Override]) -> list[list[str]]:
        """The overrides of each job, in the order in which they run."""
        batches = BasicSweeper.split_arguments(overrides, None)
        chosen = {group: self._default(group) for group in GROUPS}
        product: list[list[str]] = [job for batch in batches for job in batch]
        product += further(product, self.also, self.equal)
        jobs, used = expand(product, chosen, self.find, self.equal)
        for override in product[0] if product else []:
            named = key_of(override) not in (self.params or {})  # on the command line, not by the experiment's file
            if named and "." in key_of(override) and key_of(override) not in used:
                none = "none of the methods or trees of this sweep has this setting"
                raise UserError(f"{override}: {none}")
        rounds = in_rounds(jobs)
        if self.config.timed or not any("repeat=0" in job for job in rounds):
            return rounds
        return [job for job in rounds if "repeat=0" in job]  # the others would be the same

    def _composed(self, job: list[str]) -> DictConfig:
        """A job's configuration; repeats share one, as composing takes a tenth of a second."""
        key = tuple(override for override in job if key_of(override) != "repeat")
        if key not in self._cache:
            self._cache[key] = self.hydra_context.config_loader.load_sweep_config(self.config, job)
        return self._cache[key]

    def _default(self, group: str) -> str:
        """The choice of a group where the sweep names none."""
        return str(self.config.hydra.runtime.choices.get(group))


class ComposedOnce:
    """Hydra's config loader, which keeps what the jobs of a sweep compose to: each takes some tenths of a second."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._held: dict[tuple[str, ...], DictConfig] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> DictConfig:
        """A job's configuration, a copy of its own: Hydra writes the job's number into it."""
        key = tuple(sweep_overrides)
        if key not in self._held:
            self._held[key] = self._loader.load_sweep_config(master_config, list(sweep_overrides))
        return copy.deepcopy(self._held[key])


class Together:
    """Hydra's launcher for one process; jobs that wait for each other are run when it has seen all of them."""

    def __init__(self, launcher: Any) -> None:
        self.launcher = launcher

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Any:
        with run_deferred():
            return self.launcher.launch(job_overrides, initial_job_idx=initial_job_idx)


def planned(job: Sequence[str], cfg: DictConfig) -> Planned:
    """The job of these overrides, which compose to this configuration."""
    method: dict[str, Any] = OmegaConf.to_container(cfg.method, resolve=True)  # type: ignore[assignment]
    model, folder = str(cfg.model.name), Path(cfg.results_dir) / str(cfg.name)
    return Planned(list(job), folder, model, str(cfg.bench.name), str(method["name"]), missing_companion(method, model))


def find_in(path: Sequence[str]) -> Find:
    """Looks a config up as Hydra does: in each place of the search path, the shipped configs and the user's own."""
    sources = [SourcesRegistry.instance().resolve(place.split("://")[0])("sweeper", place) for place in path]

    @lru_cache(maxsize=256)
    def find(name: str) -> Any:
        source = next((source for source in sources if source.is_config(name)), None)
        return None if source is None else source.load_config(name).config

    return find


def command(arguments: Sequence[str]) -> str:
    """What to type to give the same sweep again."""
    shell = any(word in ("-m", "--multirun") or word.startswith("experiment=") for word in arguments)
    return f"{'bash eval.sh' if shell else 'python -m evaluation.run'} {shlex.join(arguments)}".strip()
