"""Hydra's callback at the end of a run: write tables and figures from the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from ..loading.processes import rank


class ReportAtEnd(Callback):
    """Draw a single run's tables and figures when it is finished; a sweep's are drawn by its sweeper."""

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        report_at_end(config, Path(config.results_dir) / config.name)


def report_at_end(config: DictConfig, folder: Path) -> None:
    """Draw an experiment's tables and figures, if it has answers."""
    if rank() > 0:  # the first of several processes does it for all
        return
    if config.run_dir is None and any(folder.glob("runs/*/answers.jsonl")):
        from ..report import report

        report(folder)
