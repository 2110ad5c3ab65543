"""The report: a JSON file and a page, rewritten after every section."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from model.files import write_json, write_text

from .page import page
from .plan import Budget


class Report:
    """Sections by name, written to disk as soon as they are finished.

    Args:
        folder: for `report.json` and `report.html`; earlier ones are replaced.
    """

    def __init__(self, folder: Path, budget: Budget, mat: float) -> None:
        self.json, self.html, self.budget = folder / "report.json", folder / "report.html", budget
        self.data: dict[str, Any] = {
            "kind": "device_report",
            "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "mat": mat,
            "minutes": budget.seconds / 60,
            "done": False,
            "notes": [],
        }

    def keep(self, **sections: Any) -> None:
        """Add or replace sections and write the report. Raises UserError if it cannot be written."""
        self.data |= sections
        self.data["seconds"] = self.budget.spent()
        write_json(self.json, self.data)
        write_text(self.html, page(self.data))

    def note(self, text: str) -> None:
        """Add a note on what was cut or left out, and why."""
        self.data["notes"].append(text)

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"{text} [{max(self.budget.left(), 0) / 60:.1f} min left]", flush=True)
