"""Drafting both ways: in Python, and by compiled loops."""

from collections.abc import Callable

import pytest

from model import jit


def take_way(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """From now on drafters are made for compiled loops, or for Python."""
    if compiled:
        pytest.importorskip("numba", reason="optional: numba, which compiles drafting")
    monkeypatch.setattr(jit, "compiled", lambda: compiled)


@pytest.fixture(params=[False, True], ids=["python", "compiled"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Runs a test twice; whether drafting is compiled."""
    take_way(monkeypatch, request.param)
    return bool(request.param)


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Changes the way within a test."""
    return lambda compiled: take_way(monkeypatch, compiled)
