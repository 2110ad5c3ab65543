"""What is told of a configuration before anything is loaded; what is right stays as it is, as do keys of one's own."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from evaluation.configuration import config
from evaluation.configuration.config import checked_config
from model.errors import UserError
from model.settings import check_settings

ROOT = Path(__file__).resolve().parents[3]
# groups of one command
TOGETHER = [
    {"bench", "method", "preset", "tree"},
    {"experiment"},
    {"companions"},
    {"model"},
]
CHOICES = [
    paths
    for names in TOGETHER
    for paths in zip_longest(
        *(sorted((ROOT / "configs" / name).glob("*.yaml")) for name in sorted(names))
    )
]


def composed(*overrides: str):
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        return compose("config", overrides=list(overrides))


def test_every_group_is_looked_at():
    assert set().union(*TOGETHER) == {
        path.parent.name for path in (ROOT / "configs").glob("*/*.yaml")
    } - {"launcher"}


@pytest.mark.parametrize("paths", CHOICES)
def test_every_shipped_choice_is_right_and_stays_as_it_is(paths, monkeypatch):
    """One of each of these groups at a time, as long as it has some."""
    monkeypatch.setattr(config, "fetch_companions", lambda method, model: None)
    given = []
    for path in filter(None, paths):
        given.append(f"{path.parent.name}={path.stem}")
        given += {"path": ["model.path=x"], "file": [f"{path.parent.name}.path=x"]}.get(
            path.stem, []
        )
    cfg = composed(*given)
    assert checked_config(cfg) == OmegaConf.to_container(cfg, resolve=True)


def test_names_that_look_like_numbers_and_keys_of_ones_own():
    cfg = composed(
        "name=2026",
        "model.name=7",
        "bench.name=1.5",
        "+models=[a,b]",
        "+note=tired",
        "+paper.seed=3",
    )
    assert checked_config(cfg) == OmegaConf.to_container(cfg, resolve=True)


def taker(
    a: int,
    b: float = 0.5,
    c: Optional[str] = None,  # noqa: UP045  (somebody may write it so)
    d: Sequence[float] | None = None,
    e: Literal["on", "off"] | dict[str, Any] = "on",
    f: set[int] = frozenset(),  # type: ignore[assignment]
    g=None,
) -> None: ...


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"a": True}, "x.a=True: must be a whole number"),
        ({"a": 1.0}, "x.a=1.0: must be a whole number"),
        ({"b": "0.5"}, "x.b=0.5: must be a number"),
        ({"c": 3}, "x.c=3: must be a text or null"),
        ({"d": "0.5"}, r"x.d=0.5: must be a list as \[a,b\] or null"),
        ({"e": "of"}, "x.e=of: use one of on, off, a mapping"),
        ({"e": None}, "x.e=None: use one of on, off, a mapping"),
        ({"h": 1}, "x.h: no such setting; taker has a, b, c, d, e, f, g"),
    ],
)
def test_what_does_not_fit_is_told_with_its_place(given, says):
    with pytest.raises(UserError, match=rf"^{says}$"):
        check_settings({"a": 1} | given, taker, "x.")


def test_what_fits():
    check_settings(dict(a=1, b=2, c="c", d=[1], e={"f": 1}, f=[3], g=object()), taker)
    check_settings(dict(a=1, b=2.5, c=None, d=None, e="off"), taker, without=("f", "g"))
    with pytest.raises(UserError, match=r"^x\.a: taker needs this setting$"):
        check_settings({}, taker, "x.")
    check_settings({}, taker, without=("a",))


def test_a_type_for_type_checkers_alone_hides_no_name():
    def drafter(one: "Nothing", two: "int" = 2) -> None: ...  # noqa: F821

    check_settings({"one": "x", "two": "cannot be known"}, drafter)
    with pytest.raises(UserError, match="three: no such setting; drafter has one, two"):
        check_settings({"one": 1, "three": 3}, drafter)
