"""A server that answers with the toy model's tokens, and runs of method=server on it."""

import pytest

from tests.evaluation.running.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def plain(checkpoint):
    return FakeEngine(checkpoint)


@pytest.fixture
def engine(plain):
    """Without speculation and faults."""
    plain.reset()
    return plain


@pytest.fixture(scope="module")
def drafting(checkpoint):
    return FakeEngine(checkpoint, drafting=True)


@pytest.fixture
def served(evaluate):
    """A run of method=server, untyped settings by the fixture `evaluate`."""

    def running(engine, *words, name="served"):
        url = engine if isinstance(engine, str) else engine.url
        return evaluate("method=server", f"method.url={url}", f"name={name}", "timed=true", *words)

    return running
