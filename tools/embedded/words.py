"""The words and facts that tasks are made of, from YAML files beside the code, and the lists that several share."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def tables(module: str) -> Any:
    """The content of the YAML file beside a module, which is given by its `__file__`."""
    return yaml.safe_load(Path(module).with_suffix(".yaml").read_text(encoding="utf-8"))


FIRST_NAMES: list[str] = tables(__file__)["first_names"]
LAST_NAMES: list[str] = tables(__file__)["last_names"]
CITIES: list[str] = tables(__file__)["cities"]
DAYS: list[str] = tables(__file__)["days"]
ORDINALS: list[str] = tables(__file__)["ordinals"]
