"""Replacements for attention, RMSNorm and rotary embedding, active only during our forwards.

On a CPU, attention does not repeat keys and values that heads share. In graphs, attention reads the cache in parts at
the same time, and RMSNorm and rotary embedding are one kernel each: in float16 they are 26 of a Llama layer's 39
operators, and 3 if compiled. In eager steps, calling compiled code costs more time on the host than it gains.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from threading import RLock
from typing import Any

import torch

from .devices import without_cudnn

OUR_SDPA = SDPA_GROUPED, SDPA_SPLIT = "sdpa_grouped", "sdpa_split"  # what a config says instead of sdpa for a moment
SETTING = "_attn_implementation_internal"  # of a transformers config: the name that each layer looks up
# Arguments by which models change what attention computes; torch's grouped kernel has none of them
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")
ROTARY = "apply_rotary_pos_emb"  # a function of transformers' model files; attention layers look it up by this name
ROUNDS: dict[str, Any] = {"emulate_precision_casts": True}  # round after each operator, as eager steps do
RECOMPILE_LIMIT = 1 << 10  # compilations of one function, by all models of a process
IN_PARTS = "attention in parts"  # what a trial calls `SplitAttention`
ROWS_OF_BLOCK = 64  # rows that one block of CUDA's kernel for masked attention computes, for one head
BLOCKS = 2  # such blocks for each multiprocessor; more parts than that gain nothing
LEAST_COLUMNS = 128  # of a part; smaller parts cost more to merge than they gain
_swapping = RLock()  # models of one family share the rotary function


def blocked(dtype: torch.dtype) -> float:
    """Return what a mask adds to the score of a column that a row does not see: half of the least number.

    CUDA's kernel multiplies scores by log2(e), which makes -inf of the least bfloat16 or float32 number. Of a part
    without any visible column it then says that its sum of exponentials is 1, and `merged` would count it.
    """
    return torch.finfo(dtype).min / 2


class Grouped:
    """Switches to the fastest attention inside `with`.

    On a GPU, cuDNN's attention is off (`without_cudnn`). On a CPU, keys and values that heads share are not copied, if
    the model uses sdpa.

    With a mask, transformers' sdpa repeats shared keys and values for every head before each product, as CUDA's kernels
    need it. torch's CPU kernel does not, and its results are bit-identical: a forward over a draft takes 0.95 of the
    time (SmolLM2-135M, 9 heads on 3, 8 to 80 nodes after 200 and 600 tokens).

    Outside `with` the model attends as before, and other threads' forwards inside it get the same numbers.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
        self._device = model.get_input_embeddings().weight.device
        on_cpu = self._device.type == "cpu"
        self._settings = vars(config)  # written directly: a config's own setter takes longer than the gain
        self._for_it = on_cpu and shared not in (None, heads) and self._settings.get(SETTING) == "sdpa"
        if self._for_it:
            GroupedAttention().register(SDPA_GROUPED)

    def __enter__(self) -> None:
        if self._for_it and self._settings[SETTING] == "sdpa":
            self._settings[SETTING] = SDPA_GROUPED
        without_cudnn(self._device).__enter__()

    def __exit__(self, *error: object) -> None:
        without_cudnn(self._device).__exit__(None, None, None)
        if self._for_it and self._settings[SETTING] == SDPA_GROUPED:
            self._settings[SETTING] = "sdpa"


class Attention:
    """A transformers attention implementation; where its own `attend` gains nothing, it calls transformers' sdpa."""

    def __init__(self) -> None:
        from transformers import AttentionInterface

        # Looked up once, as each layer of each forward calls it
        self._sdpa: Callable[..., tuple[torch.Tensor, None]] = AttentionInterface()["sdpa"]

    def register(self, name: str) -> None:
        """Let transformers find it by this name."""
        from transformers import AttentionInterface, AttentionMaskInterface  # not above: it loads torch's compiler

        AttentionInterface.register(name, self)
        AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])  # so that padding works

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' contract: query (1, H, n, D), key and value (1, Hkv, L, D) -> (1, n, H, D)."""
        if attention_mask is not None and all(kwargs.get(name) is None for name in UNSUPPORTED):
            attended = self.attend(query, key, value, attention_mask, scaling, dropout)
            if attended is not None:
                return attended, None
        return self._sdpa(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scaling: float | None,
        dropout: float,
    ) -> torch.Tensor | None:
        """Attend under a mask; None: this gains nothing here."""
        raise NotImplementedError


class GroupedAttention(Attention):
    """Attention that does not repeat keys and values that heads share; see `Grouped`."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scaling: float | None,
        dropout: float,
    ) -> torch.Tensor | None:
        if query.shape[2] == 1 or query.device.type != "cpu":  # layers may differ
            return None
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=True
        )
        return attended.transpose(1, 2).contiguous()


class SplitAttention(Attention):
    """Attention for graphs: attends to S parts of the cache and merges the results.

    CUDA's kernel for masked attention has one block per head and 64 rows, which reads the whole cache alone: with 32
    heads most of the GPU waits. As in Flash-Decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html), parts
    are read at the same time, and each part's result counts by its sum of exponentials. On an H200, 32 heads of 128
    attend to 2,048 columns in 47 us instead of 95 (81 rows) and in 26 instead of 87 (one row). Heads that share keys
    are further rows of one head, so keys and values are not repeated.

    For threads outside `CompiledKernels` it is sdpa, too.

    Args:
        merge: `merged`, compiled.
    """

    def __init__(self, merge: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._merge = merge

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scaling: float | None,
        dropout: float,
    ) -> torch.Tensor | None:
        (heads, n, width), (shared, columns) = query.shape[1:], key.shape[1:3]
        rows = heads // shared * n
        parts = parts_of(shared * -(-rows // ROWS_OF_BLOCK), columns, BLOCKS * _processors(query.device))
        fits = mask.shape == (1, 1, n, columns) and mask.dtype == query.dtype and not (width % 8 or value.shape[3] % 8)
        if parts == 1 or not fits or dropout or not _entered():
            return None
        query = query.reshape(1, shared, rows, width).expand(parts, -1, -1, -1)
        # (S, Hkv, L / S, D), not copied, and (S, rows, L / S)
        key, value = (x.view(shared, parts, -1, x.shape[3]).transpose(0, 1) for x in (key, value))
        mask = mask[0, 0].repeat(rows // n, 1).view(rows, parts, -1).transpose(0, 1)
        output, log_sums = _attend(query, key, value, mask[:, None].expand(-1, shared, -1, -1), scaling)
        return self._merge(output, log_sums, heads)


def parts_of(blocks: int, columns: int, most: int) -> int:
    """Return the number of parts of a cache: a power of two; 1 if the kernel's blocks alone occupy the device.

    Args:
        blocks: of the kernel, for each part.
        columns: of the cache. Parts have equal sizes, multiples of 8, as the kernel wants aligned rows.
        most: maximum number of blocks.
    """
    parts = 1
    while 2 * parts * blocks <= most and columns >= 2 * parts * LEAST_COLUMNS and columns % (16 * parts) == 0:
        parts *= 2
    return parts


@cache
def _processors(device: torch.device) -> int:
    """Return a GPU's number of multiprocessors; 1 for other devices."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend and return also the logarithm of each row's sum of exponentials, float32 (S, Hkv, rows or more)."""
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    output, log_sums, *_ = efficient(query, key, value, mask, True, scale=scaling)
    return output, log_sums


def merged(output: torch.Tensor, log_sums: torch.Tensor, heads: int) -> torch.Tensor:
    """Merge what S parts give: (S, Hkv, rows, D) and float32 (S, Hkv, rows or more) -> (1, n, H, D)."""
    weights = log_sums[:, :, : output.shape[2]].softmax(0)
    every = (output * weights[..., None]).sum(0).to(output.dtype)  # added in float32
    return every.view(1, heads, -1, output.shape[3]).transpose(1, 2).contiguous()


def _entered() -> bool:
    """Return whether this thread is inside a `CompiledKernels`."""
    return bool(_swapping._is_owned())  # type: ignore[attr-defined]  # as threading.Condition asks


def _call(compiled: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return (compiled if _entered() else original)(*args, **kwargs)


class CompiledKernels:
    """A model's RMSNorms and rotary embedding, compiled, inside `with` and for the thread that entered it.

    If the model is on a GPU and uses sdpa, it attends by `SplitAttention` there.

    torch compiles norms and rotary embedding once for one row and once for any other number of rows, and all layers of
    a kind share the result. Outside `with`, and in other threads, the model's own functions are called. A copy does
    nothing.

    Args:
        backend: of torch.compile.
        parts: False: attention stays as it is.

    Attributes:
        names: what is replaced; empty if the model has none of it.
    """

    def __init__(self, model: Any, backend: Any = "inductor", *, parts: bool = True) -> None:
        self._swaps: list[tuple[dict[str, Any], str, Any]] = []  # names, name, replacement
        self._replaced: list[list[Any]] = []  # originals, for each `with`; None where there was none
        self._compiling: list[ExitStack] = []  # dynamo's limit and silence about what it does, for each `with`
        compiled: dict[Any, Callable[..., Any]] = {}

        def once(original: Any) -> Callable[..., Any]:
            if original not in compiled:
                compiled[original] = torch.compile(original, dynamic=True, backend=backend, options=ROUNDS)
            return compiled[original]

        def swap(where: dict[str, Any], name: str, original: Any, *bound: Any) -> None:
            self._swaps.append((where, name, partial(_call, once(original), original, *bound)))

        with _swapping:
            for module in model.modules():
                if type(module).__name__.endswith("RMSNorm") and "forward" not in vars(module):
                    swap(vars(module), "forward", type(module).forward, module)
            for module in {sys.modules[type(module).__module__] for module in model.modules()}:
                if callable(original := vars(module).get(ROTARY)):
                    swap(vars(module), ROTARY, original)
            self.names = sorted(original.__qualname__.removesuffix(".forward") for original in compiled)
            config = getattr(model, "config", None)
            settings = {} if config is None else vars(config.get_text_config())
            on_gpu = parts and config is not None and _processors(model.get_input_embeddings().weight.device) > 1
            if on_gpu and settings.get(SETTING) == "sdpa":
                SplitAttention(once(merged)).register(SDPA_SPLIT)
                self._swaps.append((settings, SETTING, SDPA_SPLIT))
                self.names.append(IN_PARTS)

    def __reduce__(self) -> tuple[type[nullcontext[None]], tuple[()]]:
        return nullcontext, ()

    def __enter__(self) -> None:
        _swapping.acquire()
        self._compiling.append(compiling := ExitStack())
        # Each hidden width compiles a norm twice: dynamo's limit of eight would allow four models in a process
        compiling.enter_context(torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT))
        compiling.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", r"\s*Online softmax")  # of torch 2.11, seven times
        warnings.filterwarnings("ignore", module=r"torch\._(dynamo|inductor)\.")  # of no use to users, either
        self._replaced.append([where.get(name) for where, name, _ in self._swaps])
        for where, name, call in self._swaps:
            where[name] = call

    def __exit__(self, *error: object) -> None:
        for (where, name, _), replaced in zip(self._swaps, self._replaced.pop(), strict=True):
            if replaced is None:
                del where[name]
            else:
                where[name] = replaced
        self._compiling.pop().close()
        _swapping.release()
