"""A model of a folder or of the hub: what is neither, and what is out of reach, is one line."""

import pytest
from transformers import AutoTokenizer

from model.decoder import Decoder
from model.errors import UserError
from model.files import ROOT


@pytest.mark.parametrize("name", ["/nowhere/at/all", "no/such/folder/at/all", "../missing", "~/missing", "org/", ""])
def test_what_is_neither_a_folder_nor_a_hub_name_is_called_so(monkeypatch, name):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(UserError) as caught:
        Decoder.from_pretrained(name)
    assert str(caught.value) == f"model {name}: no such folder, and not a hub name either"


@pytest.mark.parametrize("name", ["org/name", "name", "data/embeded"])
def test_a_hub_name_without_a_network_is_an_error_of_one_line(monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        Decoder.from_pretrained(name)
    assert str(caught.value).startswith(f"model {name}: no such folder, and the hub's cannot be loaded (We couldn't")
    assert "\n" not in str(caught.value)


def test_a_folder_in_ones_home_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="^model ~/empty: cannot be loaded"):
        Decoder.from_pretrained("~/empty")
    (tmp_path / "toy").symlink_to(ROOT / "data/embedded")
    assert Decoder.from_pretrained("~/toy", method="vanilla").tokenizer is not None
