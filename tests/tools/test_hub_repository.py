"""A hub repository: its files, and what it replaces. That it decodes: tests/model/test_cli.py."""

import runpy
import sys

import pytest
import yaml

from model import METHODS, __version__
from model.files import ROOT
from tools import hub_repository


def test_it_is_what_transformers_reads(tmp_path):
    hub_repository.write_repository(tmp_path / "hub")
    files = {
        str(path.relative_to(tmp_path / "hub")): path
        for path in (tmp_path / "hub").rglob("*")
        if path.is_file()
    }
    assert files.keys() == {
        "README.md",
        "custom_generate/generate.py",
        "custom_generate/requirements.txt",
    }
    _, head, card = files["README.md"].read_text().split("---\n", 2)
    assert "custom_generate" in yaml.safe_load(head)["tags"]
    assert all(f"`{name}`" in card for name in ("method", "start", "method_settings"))
    assert {"dynamic", "recycling", "pld", "suffix", "spine"} <= METHODS.keys()
    assert (
        files["custom_generate/requirements.txt"].read_text() == f"token-recycling>={__version__}\n"
    )
    assert (
        files["custom_generate/generate.py"].read_bytes()
        == (ROOT / "custom_generate/generate.py").read_bytes()
    )


def test_anothers_readme_is_left_alone_and_an_older_version_is_replaced(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "README.md").write_text("# A project\n\nwith custom_generate")
    monkeypatch.setattr(sys, "argv", ["hub_repository", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(hub_repository.__file__, run_name="__main__")
    assert ended.value.code == 2 and "name a new folder or delete it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    (tmp_path / "README.md").write_text("---\ntags: [custom_generate]\n---\nold")
    runpy.run_path(hub_repository.__file__, run_name="__main__")
    assert (tmp_path / "README.md").read_bytes() == (
        ROOT / "custom_generate/README.md"
    ).read_bytes()
