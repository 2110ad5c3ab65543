"""Where a setting's path leads: as it is given, or inside the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def located(path: str | Path) -> Path:
    """The path as given, if something is there; else relative to the repository, so that shipped files are found."""
    given = Path(path).expanduser()
    return given if given.exists() or given.is_absolute() else ROOT / given
