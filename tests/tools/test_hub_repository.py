"""A hub repository: its files, and what it replaces. That it decodes: tests/model/test_cli.py."""

import pytest
import yaml

from model import __version__
from model.files import ROOT
from tools.hub_repository import write_repository


def test_it_is_what_transformers_reads(tmp_path):
    write_repository(tmp_path)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    of_code = {"custom_generate/generate.py", "custom_generate/requirements.txt"}
    assert files == {"README.md", *of_code}
    _, head, _ = (tmp_path / "README.md").read_text().split("---\n", 2)
    assert "custom_generate" in yaml.safe_load(head)["tags"]
    requirements = (tmp_path / "custom_generate/requirements.txt").read_text()
    assert requirements == f"token-recycling>={__version__}\n"


def test_anothers_readme_is_left_alone_and_an_older_version_is_replaced(tmp_path):
    card = tmp_path / "README.md"
    card.write_text("# A project\n\nwith custom_generate")
    with pytest.raises(FileExistsError, match="name a new folder or delete it"):
        write_repository(tmp_path)
    assert list(tmp_path.iterdir()) == [card]
    card.write_text("---\ntags: [custom_generate]\n---\nold")
    write_repository(tmp_path)
    assert card.read_bytes() == (ROOT / "custom_generate/README.md").read_bytes()
