"""The report as it grows: a JSON and a page, written anew whenever a section is done."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from model.files import write_json, write_text

from .page import page
from .plan import Budget


class Report:
    """Sections by name, on disk as soon as they are there.

    Args:
        folder: gets `report.json` and `report.html`; an earlier report's are replaced.
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
        """Write what there is with these sections in it. Raises UserError if the disk refuses it."""
        self.data |= sections
        self.data["seconds"] = self.budget.spent()
        write_json(self.json, self.data)
        write_text(self.html, page(self.data))

    def note(self, text: str) -> None:
        """What was cut or left out, and why."""
        self.data["notes"].append(text)

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"{text} [{max(self.budget.left(), 0) / 60:.1f} min left]", flush=True)
