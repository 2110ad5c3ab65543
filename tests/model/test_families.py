"""Every causal family of transformers does what docs/models.md says of it."""

import pytest
import transformers

from tests.model.families import PAGE, families, rows, verdict

OF_THIS_VERSION = f"transformers {transformers.__version__} " in " ".join(
    PAGE.read_text(encoding="utf-8").split()
)
pytestmark = pytest.mark.skipif(
    not OF_THIS_VERSION, reason="docs/models.md is of another version of transformers"
)


def test_the_page_has_every_family_and_none_that_is_wrong():
    assert rows().keys() == set(families()) and {word for word, _ in rows().values()} <= {
        "yes",
        "no",
        "not built",
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_a_family_is_as_the_page_says(family):
    assert verdict(family)[0] == rows()[family][0]
