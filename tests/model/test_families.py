"""Every causal family of transformers does what docs/models.md says of it."""

import pytest

from tests.model.families import PAGE, families, verdict


def rows():
    lines = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {cells[1].strip(): cells[2].strip() for cells in lines[1:]}


def test_the_page_has_every_family_and_none_that_is_wrong():
    assert rows().keys() == set(families()) and set(rows().values()) <= {"yes", "no", "not built"}


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_a_family_is_as_the_page_says(family):
    assert verdict(family)[0] == rows()[family]
