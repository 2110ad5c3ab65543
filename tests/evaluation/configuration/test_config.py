"""What is told of a configuration before anything is loaded; what is right stays as it is, as do keys of one's own."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Literal

import hydra
import pytest
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from evaluation.configuration import config
from evaluation.configuration.config import checked_config
from evaluation.configuration.jobs import compose
from model.errors import UserError
from model.files import ROOT
from model.settings import check_settings

# groups of one command, apart from launchers; each with its files
TOGETHER = (("bench", "method", "preset"), ("tree", "companions"), ("experiment",), ("model",))
CHOICES = []
for groups in TOGETHER:
    CHOICES += zip_longest(*(sorted((ROOT / "configs" / name).glob("*.yaml")) for name in groups))


def test_every_group_is_looked_at():
    shipped = {path.parent.name for path in (ROOT / "configs").glob("*/*.yaml")}
    assert {path.parent.name for paths in CHOICES for path in paths if path} == shipped - {"launcher"}  # fmt: skip


@pytest.mark.parametrize("paths", CHOICES)
def test_every_shipped_choice_is_right_and_stays_as_it_is(paths, monkeypatch):
    monkeypatch.setattr(config, "fetch_companions", lambda method, model: None)
    given = [f"{path.parent.name}={path.stem}" for path in paths if path]
    for group, path in (("model", "path"), ("bench", "file")):
        given += [f"{group}.path=x"] * (f"{group}={path}" in given)
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        found = hydra.compose("config", given)
    assert checked_config(found) == OmegaConf.to_container(found, resolve=True)


def test_names_that_look_like_numbers_and_keys_of_ones_own():
    (job,) = compose(["name=2026", "model.name=7", "+models=[a,b]", "+note=tired"]).jobs
    assert checked_config(job.config) == OmegaConf.to_container(job.config, resolve=True)


def untyped(one: "Nothing", two: "int" = 2) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def typed(a: int, b: float = 0.5, c: str | None = None, d: Sequence[float] | None = None) -> None: ...  # fmt: skip


def worded(e: Literal["on", "off"] | dict[str, Any] = "on", f: set[int] = frozenset(), g=None): ...  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("of", "given", "says"),
    [
        (typed, {"a": True}, "x.a=True: must be a whole number"),
        (typed, {"a": 1.0}, "x.a=1.0: must be a whole number"),
        (typed, {"a": 1, "b": "0.5"}, "x.b=0.5: must be a number"),
        (typed, {"a": 1, "c": 3}, "x.c=3: must be a text or null"),
        (typed, {"a": 1, "d": "0.5"}, r"x.d=0.5: must be a list as \[a,b\] or null"),
        (typed, {}, r"x\.a: typed needs this setting"),
        (worded, {"e": "of"}, "x.e=of: use one of on, off, a mapping"),
        (worded, {"h": 1}, "x.h: no such setting; worded has e, f, g"),
        # a type for type checkers alone hides no name
        (untyped, {"one": 1, "three": 3}, "x.three: no such setting; untyped has one, two"),
    ],
)
def test_what_does_not_fit_is_told_with_its_place(of, given, says):
    with pytest.raises(UserError, match=rf"^{says}$"):
        check_settings(given, of, "x.")


def test_what_fits():
    check_settings(dict(a=1, b=2, c=None, d=[1]), typed)
    check_settings(dict(e={"f": 1}, f=[3], g=object()), worded)
    check_settings(dict(e="off"), worded, without=("f", "g"))
    check_settings(dict(one="x", two="cannot be known"), untyped)
