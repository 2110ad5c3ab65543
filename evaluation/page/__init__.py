"""One page to read: `report.html` of an experiment, self-contained, written from its records alone.

From outside: `write_page`. May import `records`, `statistics` and `figures`.
"""

from .page import write_page

__all__ = ["write_page"]
