"""Load a checkpoint of 16-bit weights so that it computes in float32, without a wider copy.

transformers leaves such weights in the memory-mapped file; linear layers widen them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import UserError
from ..files import weight_files
from .linear import NARROW, OWN_HOOKS, PackedLinear, WideEmbedding, is_narrow, plain_linears

MARGIN = 500_000_000  # bytes of a process without a model
PROBE = 16  # tokens of the forward that shows whether a model computes in float32 throughout


def load(loader: Callable[..., Any], folder: Path, called: str) -> Any:
    """Load a model that computes in float32, by a `loader` that takes a dtype.

    Raises UserError if the model's files are larger than the free memory.
    """
    check_memory(folder, called)
    # angles in files of old LLaMAs are no part of the model
    tensors = [
        tensor
        for name, tensor in _tensors(folder)
        if tensor.is_floating_point() and not name.endswith("inv_freq")
    ]
    types = {tensor.dtype for tensor in tensors} - {torch.float32}
    if len(types) == 1 and types <= {*NARROW} and _fit(tensors, *types):
        model = loader(dtype=next(iter(types)))
        if keep_narrow(model):
            return model
        del model

    if types:  # 16 bits are widened
        check_memory(folder, called, 2)
    return loader(dtype=torch.float32)


def _fit(tensors: Iterable[Tensor], dtype: torch.dtype) -> bool:
    """True if tensors of other types hold values of this one, such as a saved model's norms."""
    others = (tensor for tensor in tensors if tensor.dtype != dtype)
    return all(tensor.to(dtype).to(tensor.dtype).equal(tensor) for tensor in others)


def needed_bytes(folder: Path) -> int:
    return int(1.06 * sum(path.stat().st_size for path in weight_files(folder))) + MARGIN


def check_memory(folder: Path, called: str, times: int = 1) -> None:
    needed = times * needed_bytes(folder)
    free = psutil.virtual_memory().available
    if needed > free and needed > 2 * MARGIN:
        raise UserError(
            f"{called}: takes {needed / 1e9:.1f} GB of memory on a CPU, and {free / 1e9:.1f}"
            " GB are free; end other programs, or use a smaller model or a GPU"
        )


def keep_narrow(model: Any) -> bool:
    """Make a freshly loaded model compute in float32 from 16-bit weights.

    If False, it may be converted in part, and must be loaded again.
    """
    saved = model.state_dict().keys()
    if any(buffer.dtype in NARROW and name not in saved for name, buffer in model.named_buffers()):
        return False  # computed when the model was made, and rounded to 16 bits

    for layer in plain_linears(model):
        layer.__class__ = PackedLinear

    for module in model.modules():
        if type(module) is nn.Embedding:
            module.__class__ = WideEmbedding
            module.register_buffer("wide", torch.zeros(()), persistent=False)
        narrow = module.weight if type(module) in (PackedLinear, WideEmbedding) else None
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.dtype in NARROW and tensor is not narrow:
                tensor.data = tensor.data.float()

    model.register_forward_pre_hook(_widen_head)
    with torch.inference_mode(), _Widths() as widths:  # type: ignore[no-untyped-call]
        model(input_ids=torch.zeros(1, PROBE, dtype=torch.long), use_cache=False)
    return is_narrow(model) and not widths.narrow


def _widen_head(model: Any, inputs: Any) -> None:
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.dtype in NARROW:
        head.__class__ = PackedLinear


OWN_HOOKS.add(_widen_head)


class _Widths(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes if an operator returns 16-bit values, as where a model casts to a weight's type."""

    narrow = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op is not torch.ops.aten.embedding.default:
            self.narrow |= any(
                isinstance(tensor, Tensor) and tensor.dtype in NARROW for tensor in tree_leaves(out)
            )
        return out


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            yield from load_file(path).items()
        else:  # torch maps no file that was written before its version 1.6
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
            yield from (item for item in state.items() if isinstance(item[1], Tensor))
