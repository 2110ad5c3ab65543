"""Hydra's end of a run or sweep: tables and figures from the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from .distributed import rank


class ReportAtEnd(Callback):
    """Draws the experiment's tables and figures when its last job is done."""

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        self._report(config)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        self._report(config)

    @staticmethod
    def _report(config: DictConfig) -> None:
        folder = Path(config.results_dir) / config.name
        if rank() > 0:  # the first of several processes does it for all
            return
        if config.run_dir is None and any(folder.glob("runs/*/answers.jsonl")):
            from .report import report  # matplotlib and pandas are needed only now

            report(folder)
