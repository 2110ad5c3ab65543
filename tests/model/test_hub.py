"""A model by its name on the hub: over HTTP from `tests.hub_server`, and from the cache that this fills."""

import json
import re
import shutil

import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer

from model.cli import main
from model.decoder import Decoder
from model.errors import UserError
from model.files import ROOT
from model.hub import local_snapshot, snapshot

EMBEDDED = ROOT / "data/embedded"
SHORT = ["--prompt", "Hello there.", "--max-new-tokens", "8", "--method", "vanilla", "--quiet"]


@pytest.fixture
def toy(tmp_path):
    """The files of a repository: the shipped model's, a second copy of its weights, and no heads."""
    folder = tmp_path / "toy"
    folder.mkdir()
    for path in (*EMBEDDED.glob("*.json"), EMBEDDED / "model.safetensors"):
        shutil.copy(path, folder)
    (folder / "consolidated.safetensors").write_bytes(b"of another library")
    (folder / "pytorch_model.bin").write_bytes(b"older")
    return folder


def changed(folder, name, **keys):
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def printed(capsys, *arguments):
    """The answer of `token-recycling generate`, or its error."""
    try:
        main(["generate", *arguments, *SHORT])
    except SystemExit:
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1, error
        return error[0]
    return capsys.readouterr().out


def test_a_name_is_one_commit_online_and_offline(hub, toy, capsys, monkeypatch):
    commit = hub.add("me/toy", toy)
    decoder = Decoder.from_pretrained("me/toy", method="vanilla")
    model = decoder.target.model
    assert decoder.target.name == model.name_or_path == decoder.tokenizer.name_or_path == "me/toy"
    assert local_snapshot("me/toy").name == commit
    wanted = {path.name for path in EMBEDDED.glob("*.json")} | {"model.safetensors"}
    assert sorted(hub.files) == sorted(f"me/toy/{name}" for name in wanted)
    answer = printed(capsys, str(EMBEDDED))
    assert printed(capsys, "me/toy") == answer
    with monkeypatch.context() as switched:  # as HF_HUB_OFFLINE=1 does
        switched.setattr(constants, "HF_HUB_OFFLINE", True)
        assert printed(capsys, "me/toy") == answer
    assert len(hub.files) == len(wanted), "fetched once"

    hub.stop()
    assert printed(capsys, "me/toy") == answer
    ids = decoder.tokenizer("Hello there.")["input_ids"]
    alone = AutoTokenizer.from_pretrained("me/toy", local_files_only=True)
    assert alone("Hello there.")["input_ids"] == ids


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, toy, tmp_path):
    old = hub.add("me/revised", toy)
    new = "f" * 40
    repository = hub.repositories["me/revised"]
    repository.commits[new] = shutil.copytree(toy, tmp_path / "new")
    changed(repository.commits[new], "generation_config.json", eos_token_id=[2, 50])
    repository.refs |= {"main": new, "v1": old}

    def ends(revision):
        return 50 in Decoder.from_pretrained("me/revised", revision=revision, method="vanilla").eos

    for revision, expected in ((None, True), ("v1", False), (old, False), (new, True)):
        assert ends(revision) == expected, revision
    hub.stop()
    assert (ends("main"), ends("v1"), ends(old)) == (True, False, False)
    hub.start()
    repository.refs["main"] = old  # the branch has moved on
    assert not ends(None)
    with pytest.raises(UserError, match=r"model me/revised: http\S+/me/revised has no revision v9"):
        ends("v9")


def test_shards_are_fetched_by_their_index_and_a_tokenizer_without_weights(hub, toy, tmp_path):
    sharded = shutil.copytree(toy, tmp_path / "sharded")
    model = Decoder.from_pretrained(str(toy), method="vanilla", dtype="float32").target.model
    (sharded / "model.safetensors").unlink()
    model.save_pretrained(sharded, max_shard_size="4MB")
    (sharded / "model-00009-of-00009.safetensors").write_bytes(b"left over")
    hub.add("me/sharded", sharded)
    assert not list(snapshot("me/sharded", "model me/sharded").glob("*.safetensors"))
    hub.stop()
    with pytest.raises(UserError, match=r"model-0\S+ is missing, and http\S+ is not in reach"):
        Decoder.from_pretrained("me/sharded")
    hub.start()
    assert Decoder.from_pretrained("me/sharded", method="vanilla").tokenizer is not None
    shards = [name for name in hub.files if name.endswith(".safetensors")]
    assert len(shards) > 1 and not any("00009-of-00009" in name for name in shards)


def test_what_the_hub_refuses_is_one_true_line(hub, toy, capsys):
    hub.add("me/gated", toy, gated=True)
    hub.add("me/cut", toy, cut="model.safetensors")
    says = {
        "me/gated": "model me/gated: no access: accept the terms at http.*/me/gated, and log in",
        "me/missing": "model me/missing: no such folder, and no such model on http.*log in",
        "me/cut": "model me/cut: no such folder, and it cannot be fetched .*reset",
    }
    for name, line in says.items():
        with pytest.raises(UserError, match=line):
            Decoder.from_pretrained(name)
        assert re.match(f"error: {line}", printed(capsys, name))
    hub.stop()
    assert "is not in reach, and this machine has no copy" in printed(capsys, "me/gated")
    assert "no weights (model.safetensors), and http" in printed(capsys, "me/cut")
    hub.start()
    hub.repositories["me/cut"].cut = ""
    assert printed(capsys, "me/cut") == printed(capsys, str(EMBEDDED))


def pointer(folder, name):
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n")


def adapter(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / "config.json").unlink()
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


FLAWS = {
    "lfs weights": (lambda f: pointer(f, "model.safetensors"), "model.safetensors is a pointer of git-lfs; run `git lfs pull`"),
    "lfs tokenizer": (lambda f: pointer(f, "tokenizer.json"), "tokenizer.json is a pointer of git-lfs; run `git lfs pull`"),
    "adapter": (adapter, "an adapter .*: merge it into its model, or load it in peft"),
    "tokenizer": (lambda f: (f / "tokenizer.json").write_text('{"version": '), "its tokenizer cannot be loaded"),
    "empty tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "its tokenizer cannot be loaded"),
    "cut": (lambda f: (f / "model.safetensors").write_bytes(bytes(99)), "model.safetensors is cut short or broken"),
}  # fmt: skip


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_folder_that_is_no_model_is_named_in_one_line(toy, capsys, flaw):
    break_it, says = FLAWS[flaw]
    break_it(toy)
    with pytest.raises(UserError, match=f"model {toy}: {says}"):
        Decoder.from_pretrained(str(toy))
    assert re.match(f"error: model {toy}: {says}", printed(capsys, str(toy)))


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_flash_attention_in_a_config_is_loaded_with_sdpa(toy, capsys, key):
    answer = printed(capsys, str(toy))
    changed(toy, "config.json", **{key: "flash_attention_2"})
    main(["generate", str(toy), *SHORT])
    out, err = capsys.readouterr()
    assert out == answer
    assert err.strip() == (
        f"model {toy}: its config.json asks for flash_attention_2, which takes no tree; loaded with"
        " sdpa, or eager where the model has no sdpa"
    )
