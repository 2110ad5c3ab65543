"""The columns of the tables, as columns.yaml defines them: terminal, Markdown, LaTeX, page and documents read them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

TERMINAL, MARKDOWN, PAGE, SETUP = "terminal", "markdown", "page", "setup"  # where a column is shown
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Column:
    """A column; columns.yaml says what its fields are."""

    name: str
    meaning: str = ""
    unit: str = ""
    title: str = ""
    form: str = ".2f"
    shown: tuple[str, ...] = ()

    @property
    def setting(self) -> bool:
        return self.form == "g"

    @property
    def heading(self) -> str:
        return self.title or self.name

    @property
    def definition(self) -> str:
        """The meaning with its unit, as plain text."""
        return self.meaning.replace("`", "") + (f" ({self.unit})" if self.unit else "")


_DEFINED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
COLUMNS, TABLE1 = (
    tuple(Column(**entry | {"shown": tuple(entry.get("shown", ()))}) for entry in _DEFINED[table])
    for table in ("main", "table1")
)
_BY_NAME = {column.name: column for column in COLUMNS}


def column(name: str) -> Column:
    """Return the column of this name; the deviation of a measure is one, and so is any setting of a method."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    base, _, end = name.rpartition("_")
    if end == "std":
        measure = column(base)
        return replace(_BY_NAME["X_std"], name=name, title=f"{measure.title or base} std", form=measure.form)
    return Column(name)


def defined() -> list[tuple[str, str, str]]:
    """Return names, unit and meaning of what is defined: columns of one meaning together, for docs/concepts.md."""
    groups = itertools.groupby((c for c in COLUMNS if c.meaning), key=lambda c: (c.unit, c.meaning))
    return [(", ".join(f"`{c.name}`" for c in same), unit, meaning) for (unit, meaning), same in groups]
