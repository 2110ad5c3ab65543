"""Load a checkpoint of 16-bit weights so that it computes in float32, without a float32 copy of them.

If weights keep their type, transformers leaves them in the memory-mapped file. Linear layers multiply by a 16-bit copy
(`engine.linear`), with products and sums in float32. Embeddings widen the rows that are looked up. Norms, biases and
weights that fit no 16-bit copy are converted to float32. So the text is that of float32.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils import cached_file

from .engine.linear import HELD, Packed, PackedLinear, halves, plain_linears
from .errors import UserError
from .files import weight_files

NARROW = (torch.float16, torch.bfloat16)
MARGIN = 500_000_000  # bytes of a process without a model
PROBE = 16  # tokens of the forward that shows whether a model computes in float32 throughout


def may_hold(device: torch.device, dtype: Any, linear: str) -> bool:
    """True if the settings and this machine allow weights to be kept in 16 bits."""
    wide = str(dtype).removeprefix("torch.") in ("auto", "float32")
    return device.type == "cpu" and wide and linear in ("auto", "half") and halves()


def load(loader: Callable[..., Any], source: str, revision: str | None = None) -> Any:
    """Load a model that computes in float32, from weights kept in 16 bits where possible.

    Args:
        loader: returns the model in a dtype, as `from_pretrained` takes it.
        source, revision: the model's folder or hub name, and its revision.

    Raises:
        UserError: the model's files on this machine, if there are any, are larger than the free memory.
    """
    if folder := _folder(source, revision):
        check_memory(folder)
    model = loader(dtype="auto")
    if not any(parameter.dtype in NARROW for parameter in model.parameters()):
        return model
    folder = folder or _folder(source, revision)  # loading may have downloaded it
    if folder is not None and not _narrowed(model, folder) and hold_weights(model):
        return model
    del model
    if folder is not None:
        check_memory(folder, 2)
    return loader(dtype=torch.float32)


def needed_bytes(folder: Path) -> int:
    """Return the memory that a checkpoint takes on a CPU, without caches: its weights, and 0.5 GB for the process."""
    return int(1.06 * sum(path.stat().st_size for path in weight_files(folder))) + MARGIN


def check_memory(folder: Path, times: int = 1) -> None:
    """Raise UserError if `times` copies of the checkpoint need more than the free memory."""
    needed, free = times * needed_bytes(folder), psutil.virtual_memory().available
    if needed > free and needed > 2 * MARGIN:
        raise UserError(
            f"model {folder}: takes {needed / 1e9:.1f} GB of memory on a CPU, and {free / 1e9:.1f} GB are free; end "
            "other programs, or use a smaller model or a GPU"
        )


def _folder(source: str, revision: str | None) -> Path | None:
    """Return the folder of a checkpoint on this machine; None if it is not here, or not as files."""
    try:
        return Path(cached_file(source, "config.json", revision=revision, local_files_only=True)).parent
    except OSError:
        return None


def hold_weights(model: Any) -> bool:
    """Make a freshly loaded model compute in float32 from 16-bit weights.

    Returns:
        False if this is impossible: the model may be converted in part, and must be loaded again.
    """
    saved = model.state_dict().keys()
    if any(buffer.dtype in NARROW and name not in saved for name, buffer in model.named_buffers()):
        return False  # computed when the model was made, and rounded to 16 bits
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # torch packs in one thread
        list(pool.map(_pack, [layer for layer in plain_linears(model) if layer.weight.dtype in NARROW]))
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if name == "weight" and type(module) is nn.Embedding and tensor.dtype in NARROW:
                module.__class__ = WideEmbedding
            elif tensor.dtype in NARROW and not (name == "weight" and isinstance(module, PackedLinear)):
                tensor.data = tensor.data.float()
    vars(model)[HELD] = True
    with torch.inference_mode(), _Widths() as widths:  # type: ignore[no-untyped-call]
        model(input_ids=torch.zeros(1, PROBE, dtype=torch.long), use_cache=False)
    return not widths.narrow


def _pack(layer: nn.Linear) -> None:
    """Let a layer multiply by a 16-bit copy of its weight, if the values fit."""
    packed = Packed(layer.weight, half=True)
    if packed.exponent is not None:
        vars(layer)["packed"] = packed
        layer.__class__ = PackedLinear
        _page_out(layer.weight)


class WideEmbedding(nn.Embedding):
    """An embedding of 16 bits whose rows are widened to float32 as they are looked up."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).float()


class _Widths(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes if an operator other than embedding returns 16-bit values: some models cast to a weight's type."""

    narrow = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op is not torch.ops.aten.embedding.default:
            self.narrow |= any(
                isinstance(tensor, torch.Tensor) and tensor.dtype in NARROW for tensor in tree_leaves(out)
            )
        return out


def _narrowed(model: Any, folder: Path) -> bool:
    """True if a tensor has more bits in the files than in the model: config.json may name another type."""
    now, wide = dict(model.named_parameters()) | dict(model.named_buffers()), list[str]()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            wide += [name for name in file.keys() if file.get_slice(name).get_dtype() in ("F32", "F64")]  # noqa: SIM118
    for path in folder.glob("*.bin") if not any(folder.glob("*.safetensors")) else ():
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # saved before torch 1.6
            return True
        wide += [name for name, tensor in state.items() if tensor.dtype in (torch.float32, torch.float64)]
    return any(name not in now or now[name].dtype in NARROW for name in wide)


def _page_out(tensor: torch.Tensor) -> None:
    """Let the system page out a tensor of a mapped file that is not read soon; no contents are lost."""
    page, pageout = mmap.PAGESIZE, 21  # MADV_PAGEOUT of Linux
    if sys.platform == "linux":
        start = -(-tensor.data_ptr() // page) * page
        length = max(tensor.data_ptr() + tensor.nbytes - start, 0)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), pageout)
