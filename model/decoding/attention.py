"""Attention of a draft tree over a preallocated KV cache, at a cost that follows the tokens in use.

Node i attends to all `length` committed tokens, to its ancestors in the tree and to itself; its own key and value are
row length + i. `length` is a tensor on the device and all shapes are static, so a step can be captured in a CUDA graph.
`tree_attention_reference` says in plain torch what is computed; on CUDA a Triton kernel (attention_kernel.py) computes
it from the rows in use alone. There the twin is never taken in its place: it costs the whole capacity, tens of
milliseconds a step of a 7B model. Triton is imported when it is first needed, never by importing this module.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import UserError
from .devices import current, triton_installed, triton_problem

WORD = 64  # bits of an int64, in which a tree is packed
MAX_HEAD_DIM = 256  # and a multiple of 8, so that a row of float16 is loaded in whole words
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
H200 = (132, 227 << 10)  # multiprocessors, shared memory of a program; only where there is no GPU to ask


def tree_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    length: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """The kernel's twin in plain torch: what it must equal, and what runs where Triton does not.

    No host sync and static shapes, so it costs the whole capacity. Rows from length + n on may hold anything, NaN
    included.

    Args:
        q: (1, H, n, D), floating point.
        k, v: (1, Hkv, B, D), q's dtype; H a multiple of Hkv, query head h reads KV head h // (H // Hkv).
        length: int32 or int64 (), the committed tokens; length + n <= B.
        ancestors: bool (n, n); [i, j] says that node i attends to node j.
        scale: of the scores. Default: D ** -0.5.

    Returns:
        (1, H, n, D), q's dtype; scores, softmax and sum are in float32 (float64 for float64).
    """
    _, heads, n, dim = q.shape
    kv_heads, rows = k.shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    node = torch.arange(rows, device=q.device) - length  # (B,): the draft node in each row; negative if committed
    attend = ancestors[:, node.clamp(0, n - 1)] & (node < n) | (node < 0)  # (n, B)
    grouped = q.reshape(kv_heads, -1, dim).to(wide)  # (Hkv, G * n, D): a group shares its K and V, nothing is repeated
    scores = grouped @ k[0].to(wide).transpose(1, 2) * (dim**-0.5 if scale is None else scale)  # (Hkv, G * n, B)
    scores = scores.view(kv_heads, -1, n, rows).masked_fill(~attend, -math.inf)
    weights = scores.softmax(dim=-1).view(kv_heads, -1, rows)
    values = v[0].to(wide).masked_fill((node >= n)[:, None], 0)  # a weight of 0 does not silence a NaN
    return (weights @ values).view(1, heads, n, -1).to(q.dtype)


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """How the kernel divides its work; fixed by shapes, so that a captured graph stays valid.

    Attributes:
        block_m: query rows (heads of a group x nodes) a program; 16 to 128.
        block_n: cache rows a loop step; 16, 32 or 64.
        splits: parts the used rows are divided into, at run time and evenly; the grid is splits x Hkv x row blocks.
        warps, stages: a program's warps, and loads in flight.
    """

    block_m: int
    block_n: int
    splits: int
    warps: int = 4
    stages: int = 3

    @classmethod
    def choose(
        cls, rows: int, kv_heads: int, head_dim: int, capacity: int, itemsize: int, gpu: tuple[int, int]
    ) -> KernelPlan:
        """A plan for `rows` = G * n query rows a KV head on a GPU: (multiprocessors, shared bytes a program).

        Arithmetic, not yet tuned on a GPU; it fits the registers, as compiled for compute capability 9.0. Two programs
        a multiprocessor, one where a program fills it: a short context then spreads as far as its blocks go, and a
        long one keeps enough loads in flight. Long contexts take wider tiles, as they pay for reading the cache again
        and short ones for reducing. float32 takes small ones: exact products use no tensor core and many registers.
        """
        (sms, shared), exact, width = gpu, itemsize == 4, _power_of_two(head_dim)
        long = capacity > 8192 and shared >= 160 << 10  # wide tiles take 132 KiB, which an RTX card does not have
        block_m = min(_power_of_two(rows), 32 if exact else 64 if width > 128 or not long else 128)
        block_n = 16 if exact else 64 if long and width <= 128 else 32
        programs = kv_heads * -(-rows // block_m)
        slots = sms if block_m == 128 else 2 * sms
        splits = max(1, min(slots // programs, -(-capacity // block_n), 64))
        warps = 8 if block_m == 128 or (exact and block_m == 32) else 4
        return cls(block_m, block_n, splits, warps, 2 if exact or width > 128 else 3)


class TreeAttention:
    """Attention of drafts of n nodes, with every buffer held: nothing is allocated or synchronised in a call.

    One object serves all layers of a model that have these shapes, one after the other on one stream. Call it once
    before capturing it in a CUDA graph: the first call compiles. The same input gives the same bits.

    Args:
        heads, kv_heads, head_dim: H, Hkv, D of q (1, H, n, D) and of k, v (1, Hkv, B, D).
        nodes: n; nodes of a smaller draft are padded by `set_tree`.
        capacity: B to plan for; another B is correct, too, but may be slower.
        length: int32 or int64 (), the committed tokens, read in each call; everything lives on its device. The caller
            must ensure length + n <= B: the device cannot raise.
        dtype: of q, k, v: float16, bfloat16 or float32.
        backend: triton | torch. Default: triton on CUDA, else torch.
        plan: how the work is divided. Default: `KernelPlan.choose`.

    Raises:
        UserError: shapes, types or devices that the kernel does not take, or triton is not installed.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        nodes: int,
        capacity: int,
        length: torch.Tensor,
        dtype: torch.dtype,
        *,
        backend: str | None = None,
        plan: KernelPlan | None = None,
    ) -> None:
        device = length.device
        if backend is None:
            backend = "triton" if device.type == "cuda" else "torch"
        if backend not in ("triton", "torch"):
            raise UserError(f"tree attention: backend {backend!r} is none of triton, torch")
        if heads % kv_heads or nodes < 1 or capacity < nodes:
            raise UserError(
                f"tree attention: {heads} heads over {kv_heads}, {nodes} nodes, capacity {capacity}: heads must be a "
                "multiple of the KV heads, and the capacity must hold the nodes"
            )
        if length.shape != () or length.dtype not in (torch.int32, torch.int64):
            raise UserError(
                f"tree attention: length must be one int32 or int64, got {length.dtype} {tuple(length.shape)}"
            )
        self.heads, self.kv_heads, self.head_dim, self.nodes = heads, kv_heads, head_dim, nodes
        self.length, self.dtype, self.device, self.backend = length, dtype, device, backend
        # Until `set_tree` every node sees itself alone, so that no row is ever empty.
        alone = torch.eye(nodes, dtype=torch.bool)
        if backend == "torch":
            self.ancestors = alone.to(device)
            return
        if head_dim > MAX_HEAD_DIM or head_dim % 8 or dtype not in KERNEL_DTYPES:
            raise UserError(
                f"tree attention: the kernel takes multiples of 8 up to {MAX_HEAD_DIM} as head dim, in float16, "
                f"bfloat16 or float32, not {head_dim} in {dtype}; use backend='torch'"
            )
        if not triton_installed():
            raise UserError("tree attention: backend='triton' needs the package triton; use backend='torch'")
        if device.type == "cuda" and (why := triton_problem(device)):
            raise UserError(f"tree attention: the kernel does not run on {device} ({why}); use model.attention=sdpa")
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UserError(f"tree attention: backend='triton' needs a GPU, not {device}; use backend='torch'")
        from . import attention_kernel

        self._kernel = attention_kernel
        rows, size = heads // kv_heads * nodes, _size(device) if device.type == "cuda" else H200
        self.plan = plan or KernelPlan.choose(rows, kv_heads, head_dim, capacity, dtype.itemsize, size)
        shape, f32 = (self.plan.splits, heads * nodes), torch.float32
        self.partial = torch.empty(*shape, head_dim, dtype=f32, device=device)  # (splits, H * n, D): weighted sums
        self.maxima = torch.empty(shape, dtype=f32, device=device)  # (splits, H * n), base 2
        self.sums = torch.empty(shape, dtype=f32, device=device)  # (splits, H * n)
        self.words = packed(alone, nodes).to(device)  # int64 (n, ceil(n / 64))
        # Node by node, as transformers wants it next: (1, n, H, D)
        self.output = torch.empty(1, nodes, heads, head_dim, dtype=dtype, device=device)

    def set_tree(self, ancestors: torch.Tensor) -> None:
        """Attend by this tree from now on; written in place, so that a captured graph follows.

        Args:
            ancestors: bool (m, m), m <= n. Nodes from m on attend to the committed tokens and themselves.

        Raises:
            UserError: more nodes than there is room for.
        """
        m = ancestors.shape[0]
        if ancestors.shape != (m, m) or ancestors.dtype != torch.bool or m > self.nodes:
            raise UserError(
                f"tree attention: ancestors must be bool (m, m) with m <= {self.nodes}, "
                f"got {ancestors.dtype} {tuple(ancestors.shape)}"
            )
        if self.backend == "triton":
            self.words.copy_(packed(ancestors, self.nodes))
            return
        if m < self.nodes:
            self.ancestors.zero_().fill_diagonal_(True)
        self.ancestors[:m, :m].copy_(ancestors)

    def set_packed_tree(self, words: torch.Tensor, ancestors: torch.Tensor) -> None:
        """Set a tree of all n nodes given on the device: as made by `packed`, and as bool (n, n)."""
        if self.backend == "triton":
            self.words.copy_(words)
        else:
            self.ancestors.copy_(ancestors)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """q (1, H, n, D), k and v (1, Hkv, B, D) -> (1, H, n, D), q's dtype, as `tree_attention_reference`.

        With triton the result is a view of this object's own buffer, good until the next call.

        Raises:
            UserError: q, k or v are not what this object was made for.
        """
        rows = k.shape[2]
        self._check("q", q, (1, self.heads, self.nodes, self.head_dim))
        self._check("k", k, (1, self.kv_heads, max(rows, self.nodes), self.head_dim))
        self._check("v", v, tuple(k.shape))
        scale = self.head_dim**-0.5 if scale is None else scale
        if self.backend == "torch":
            return tree_attention_reference(q, k, v, self.length, self.ancestors, scale)
        with current(self.device):
            self._kernel.launch(self, q, k, v, scale)
        return self.output.transpose(1, 2)

    def _check(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape or tensor.dtype != self.dtype or tensor.stride(-1) != 1:
            raise UserError(
                f"tree attention: {name} must be {self.dtype} {shape} with unit stride in the last dimension, "
                f"got {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
            )


def _size(device: torch.device) -> tuple[int, int]:
    """Multiprocessors of a GPU, and the shared memory that a program may have."""
    gpu = torch.cuda.get_device_properties(device)
    return gpu.multi_processor_count, getattr(gpu, "shared_memory_per_block_optin", 0)  # unknown: small tiles


def packed(ancestors: torch.Tensor, n: int) -> torch.Tensor:
    """bool (m, m) -> int64 (n, ceil(n / 64)) on the host: column j is bit j % WORD of word j // WORD.

    Nodes from m on see themselves. On the host, where a tree of one step is: by NumPy, which takes a tenth of the time.
    """
    seen = np.eye(n, -(-n // WORD) * WORD, dtype=bool)
    m = len(ancestors)
    seen[:m, :m] = ancestors.cpu().numpy()
    return torch.from_numpy(np.packbits(seen, axis=1, bitorder="little").view(np.int64))


def _power_of_two(number: int) -> int:
    """The next power of two, at least 16: what a tensor core's tile takes."""
    return max(16, 1 << (number - 1).bit_length())
