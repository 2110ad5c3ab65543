"""One page to read: `report.html` of an experiment, self-contained, written from its records alone."""

from .page import write_page

__all__ = ["write_page"]
