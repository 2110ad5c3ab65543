"""Every causal family of transformers does what docs/models.csv says of it."""

from collections import Counter

import pytest
import transformers

from model.files import ROOT
from tests.model.families import families, rows, verdict

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(
    f"transformers {transformers.__version__}" not in PAGE,
    reason="docs/models.csv is of another version of transformers",
)


def test_the_list_has_every_family_and_the_page_counts_them():
    assert rows().keys() == set(families())
    count = Counter(word for word, _ in rows().values())
    assert count.keys() == {"yes", "no", "not built"}
    counted = [line.split("|")[2].strip() for line in PAGE.splitlines() if line.startswith("| ")]
    assert counted[1:] == [str(count[word]) for word in ("yes", "no", "not built")]


@pytest.mark.slow
@pytest.mark.parametrize("family", rows())
def test_a_family_is_as_the_list_says(family):
    assert verdict(family)[0] == rows()[family][0]
