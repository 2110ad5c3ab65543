"""A model's forward over a draft as one compiled loop, on a CPU.

A layer of Llama's kind is some 45 operators, called from Python: of a small model's plain step,
more than half. A trial at load compares the loop's numbers and times with the model's own.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache as once
from typing import Any

import numpy as np
import torch
from llvmlite.binding import get_host_cpu_features
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ...compiled import VERSION
from ...errors import one_line
from ...files import measured_once, processor, quartiles
from ...weights.linear import OWN_HOOKS, PackedLinear
from ..attention.cache import TreeCache
from ..attention.layers import LAST, Hidden, Masks
from ..attention.sight import Sight, additive
from ..rule.tree import Tree
from . import lean_loops as loops

TRIED = (1, 13)  # rows of the trial's forwards: each number that one pass over a weight serves
TIMED = (1, 8, 16, 24)  # rows of the forwards that are timed
LIMITS = (4, 8, 16, 24)  # maximum rows of the loop, by the number of TIMED at which it is faster
PAST = 12  # tokens before the trial's rows
BEHIND = 3  # of these, tokens that a window hides
# A change of the embedded tokens. What it does to a row shows how much rounding grows there: in
# SmolLM2's rows to between 1e-7 and 6e-5 of the greatest number.
CHANGE = 2.0**-20
LEAST = 1e-6  # rounding to expect in any case, relative to a number
# Largest allowed error over the expected rounding: SmolLM2's rows have up to 7, those of wrong
# layers 100 or more.
ROUNDINGS = 32
MOST = 1e-2  # largest allowed error in any case, relative to a row's greatest number
RUNS = 3  # of each forward that is timed
# names of a layer's modules; of the norms that some layers have; of the decoder's modules
PARTS = {
    "input_layernorm",
    "self_attn",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    "post_attention_layernorm",
    "mlp",
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj", "act_fn")),
}
NORMED = {"self_attn.q_norm", "self_attn.k_norm"}
DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
SILU = {"SiLU", "SiLUActivation"}
# NumPy's type of the bits of a weight, by which loops know its type
BITS = {torch.float16: np.uint16, torch.bfloat16: np.int16, torch.float32: np.float32}


class OtherPartsError(Exception):
    """A model has other parts than Llama's."""


class LeanForward:
    """A target's forward as one compiled loop.

    Attributes:
        limit: maximum number of rows; 0: not used.
        why: why it is not used, in a few words.
        times: microseconds of a forward for each number of TIMED, own and lean, if measured.
    """

    def __init__(self, target: Any) -> None:
        self.limit = 0
        self.why = ""
        self.times: dict[str, list[float]] = {}
        self._target: Any = weakref.proxy(target)  # it holds this
        self._tensors: list[Tensor] = []  # whose addresses are in the table
        self._narrow: dict[nn.Linear, Tensor] = {}  # copies of weights that have 16 bits
        self._values = b""  # of the weights that were copied
        self._is_same = False
        self._buffers: tuple[Any, ...] = ()
        self._trial: TreeCache | None = None

    def __str__(self) -> str:
        return (
            f"one loop for up to {self.limit} rows" if self.limit else f"the model's ({self.why})"
        )

    @property
    def curve(self) -> tuple[Sequence[int], list[float]]:
        used = ["lean" if rows <= self.limit else "own" for rows in TIMED]
        return TIMED, [self.times[name][number] for number, name in enumerate(used)]

    def serves(self, rows: int, mask: Masks) -> bool:
        return rows <= self.limit and (rows == 1 or mask is not None) and self._is_same

    def refresh(self, values: bytes) -> None:
        """Begin an answer: the loop serves if nothing but weights was changed since the trial."""
        if not self.limit:
            return
        self._is_same = False  # also if Ctrl-C comes while weights are read
        if self._target.mode == self._mode:
            try:
                self._read(values)
                self._is_same = True
            except OtherPartsError:
                self._narrow.clear()

    def clear(self) -> None:
        self.limit = 0
        self._is_same = False
        self._narrow.clear()
        self._tensors = []
        self._buffers = ()

    # -- the model's parts ------------------------------------------------------------------------

    def _read(self, values: bytes) -> None:
        model = self._target.model
        self._decoder = decoder = model.get_decoder()
        if {name for name, _ in decoder.named_children()} != DECODER:
            raise OtherPartsError
        head = model.get_output_embeddings()
        around = (model, decoder, decoder.norm, head)
        if not _is_plain(*around, *decoder.layers.modules()) or not len(decoder.layers):
            raise OtherPartsError
        if _has_any_global_hook():  # type: ignore[no-untyped-call]
            raise OtherPartsError
        if values != self._values:
            self._narrow.clear()
            self._values = values
        self._tensors = []
        count = len(decoder.layers)
        self._table = np.zeros((count + 1, loops.TABLE), dtype=np.int64)
        self._eps = np.zeros((count + 1, 4), dtype=np.float32)
        self._scaling = np.zeros(count, dtype=np.float32)
        self._rotates = [bool(getattr(each.self_attn, "use_rope", True)) for each in decoder.layers]
        shapes = {self._read_layer(number, layer) for number, layer in enumerate(decoder.layers)}
        self._norm(count, 0, decoder.norm)
        self._linear(count, loops.OUT, head)
        kinds = {tensor.dtype for tensor in self._tensors if tensor.dim() == 2}
        if len(shapes) != 1 or len(kinds) != 1:
            raise OtherPartsError
        ((self._heads, self._shared, self._dim, self._inner),) = shapes
        self._like = np.empty(0, dtype=BITS[kinds.pop()])

    def _read_layer(self, number: int, layer: Any) -> tuple[int, int, int, int]:
        """Note a layer's parts; return its heads, shared heads, D and I."""
        names = {name for name, _ in layer.named_modules()} - {""}
        attention = layer.self_attn
        network = layer.mlp
        if names not in (PARTS, PARTS | NORMED) or type(network.act_fn).__name__ not in SILU:
            raise OtherPartsError
        self._norm(number, 0, layer.input_layernorm)
        self._norm(number, 1, layer.post_attention_layernorm)
        if names > PARTS:
            self._norm(number, 2, attention.q_norm)
            self._norm(number, 3, attention.k_norm)
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [network.gate_proj, network.up_proj, network.down_proj]
        for part, linear in enumerate(linears):
            self._linear(number, part, linear)
        self._scaling[number] = attention.scaling
        dim = attention.head_dim
        heads = attention.q_proj.out_features // dim
        shared = attention.k_proj.out_features // dim
        return heads, shared, dim, network.down_proj.in_features

    def _norm(self, layer: int, number: int, norm: Any) -> None:
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if [name for name, _ in norm.named_parameters()] != ["weight"] or eps is None:
            raise OtherPartsError
        self._table[layer, loops.NORM + number] = self._address(norm.weight, torch.float32)
        self._eps[layer, number] = eps

    def _linear(self, layer: int, part: int, linear: Any) -> None:
        if type(linear) not in (nn.Linear, PackedLinear) or type(linear.weight) is not nn.Parameter:
            raise OtherPartsError
        weight: Tensor = linear.weight
        if weight.dtype is torch.float32 and self._target.linear.copy == "half":
            if linear not in self._narrow:
                self._narrow[linear] = _narrowed(weight)
            weight = self._narrow[linear]
        self._table[layer, part] = self._address(weight, *BITS)
        if linear.bias is not None:
            self._table[layer, loops.BIAS + part] = self._address(linear.bias, torch.float32)

    def _address(self, tensor: Tensor, *types: torch.dtype) -> int:
        if tensor.dtype not in types or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise OtherPartsError
        self._tensors.append(tensor.detach())
        return tensor.data_ptr()

    # -- a forward --------------------------------------------------------------------------------

    def __call__(
        self,
        cache: TreeCache,
        tokens: Tensor,
        mask: Masks,
        positions: Tensor,
        hidden: Hidden,
    ) -> tuple[Tensor, Tensor | None]:
        """Forward n rows; return logits (n, V) and hidden states (n, .)."""
        target = self._target
        n = len(tokens)
        cursor = cache.cursor
        end = cursor.length + n if cursor.write_at is None else cursor.bucket
        columns = np.arange(cursor.length, end)
        if cursor.write_at is not None:
            columns = cursor.write_at.numpy()
        embedded = self._decoder.embed_tokens(tokens[None])
        cos, sin = self._decoder.rotary_emb(embedded, position_ids=positions[None])
        angles = torch.stack((cos[0], sin[0])).numpy()
        width = embedded.shape[2]
        kept = np.full(len(self._table), -1)
        kept[list(hidden)] = range(len(hidden))
        states = torch.empty_like(embedded.expand(len(hidden), n, width))
        # products write whole passes of rows
        rows = -(-n // loops.ROWS) * loops.ROWS
        logits = embedded.new_empty(rows, target.logits_size)
        team = target.threads
        seen, counts, types = self._sight(mask, cursor.length, n, end)
        _together(
            team,
            (n, self._heads, self._shared, self._dim, cache.capacity),
            self._like,
            self._table,
            np.array([(each.keys.data_ptr(), each.values.data_ptr()) for each in cache.layers]),
            self._eps,
            self._scaling,
            angles,
            columns,
            seen,
            counts,
            types,
            self._buffers_of(team, cache.capacity, width),
            embedded[0].numpy(),
            kept,
            states.numpy(),
            logits.numpy(),
        )
        return logits[:n], torch.cat([*states], -1) if hidden else None

    def _sight(self, mask: Masks, past: int, n: int, end: int) -> tuple[Any, Any, Any]:
        # by type of layer: columns that each row sees (M, n, .), and their counts (M, n)
        masks = mask if isinstance(mask, dict) else {"": mask}
        kinds = self._target._types if isinstance(mask, dict) else [""] * len(self._rotates)
        numbers = {kind: number for number, kind in enumerate(masks)}
        seen = np.empty((len(masks), n, end + loops.BLOCK), dtype=np.int64)
        counts = np.empty((len(masks), n), dtype=np.int64)
        for number, each in enumerate(masks.values()):
            if each is None:
                values = np.empty((0, end), dtype=np.float32)
            elif each.dtype is torch.long:
                table = Sight(each[0, 0], each.shape[1])
                values = additive(table.seen(end)[0], torch.float32).numpy()
            else:
                values = each[0, 0].numpy()
            loops.look(values, past, seen[number], counts[number])
        types = zip([numbers[kind] for kind in kinds], self._rotates, strict=True)
        return seen, counts, np.array([*types], dtype=np.int64)

    def _buffers_of(self, team: int, capacity: int, width: int) -> tuple[Any, ...]:
        if not self._buffers or self._buffers[2].shape != (team, capacity + loops.BLOCK):
            rows = max(LIMITS)
            heads = self._heads
            shapes = [(team, rows, width), (team, rows, width), (team, capacity + loops.BLOCK)]
            shapes += [(rows, (heads + 2 * self._shared) * self._dim), (rows, heads * self._dim)]
            shapes += [(rows, self._inner), (rows, self._inner), (rows, width)]
            self._buffers = tuple([np.zeros(shape, dtype=np.float32) for shape in shapes])
        return self._buffers

    # -- the trial --------------------------------------------------------------------------------

    def try_out(self, values: bytes) -> None:
        try:
            self.why = self._refusal(values)
            self.limit = 0 if self.why else self._fastest_rows()
        except OtherPartsError:
            self.why = "other parts"
        except Exception as error:  # whatever a model of another kind raises
            self.why = f"another loop: {one_line(error)}"[:60]
        self._trial = None
        self._is_same = True
        if not self.limit:
            self.why = self.why or "measured to be slower"
            self.clear()

    @torch.inference_mode()
    def _refusal(self, values: bytes) -> str:
        """Return why the loop cannot be used; "" if it can."""
        target = self._target
        if target.dtype is not torch.float32 or target.recurrent:
            return "not of float32"
        if not get_host_cpu_features().get("f16c", True):  # x86 before 2013 widens no float16
            return "an old processor"
        self._mode = target.mode
        self._read(values)
        for rows in TRIED:
            lean = self._states_of(rows, max(LIMITS))
            model = self._states_of(rows, 0)
            moved = self._states_of(rows, 0, CHANGE)
            for state, model_state, moved_state in zip(lean, model, moved, strict=True):
                finite = model_state.isfinite().all(-1)
                errors = (state - model_state).abs().amax(-1)
                rounding = (moved_state - model_state).abs() + LEAST * model_state.abs()
                most = MOST * model_state.abs().amax(-1)
                allowed = torch.minimum(ROUNDINGS * rounding.amax(-1), most)
                if not bool((errors <= allowed)[finite].all()):
                    return "other numbers"
        return ""

    def _states_of(self, rows: int, limit: int, change: float = 0.0) -> list[Tensor]:
        """Forward a tree of tokens, the states of its last node NaN.

        Args:
            limit: up to which rows the forward is ours.
            change: of every second number of the embedded tokens, as a part of it.

        Returns:
            The states (n, H) behind each layer, those behind the last one normed; the logits.
        """
        target = self._target
        if self._trial is None:
            self._trial = TreeCache(target._shapes, PAST + max(LIMITS))
            for buffer in self._trial._buffers:
                buffer.fill_(torch.nan)  # what is not in use must not count
            target.prefill(self._trial, [token % target.vocab_size for token in range(PAST + 1)])
        tree = Tree([0, *((node - 1) // 2 for node in range(1, rows))])
        mask = additive(tree.ancestors, torch.float32, PAST) if rows > 1 else None
        if mask is not None and rows == max(TRIED):  # a part of the text is behind a window
            mask[:, :BEHIND] = torch.finfo(torch.float32).min

        def poison(module: Any, args: Any, output: Tensor) -> Tensor:
            output = output.clone()
            output[..., ::2] *= 1 + change
            output[0, 1:][-1:] = torch.nan
            return output

        numbers = *range(1, len(target.layers)), LAST
        hook = self._decoder.embed_tokens.register_forward_hook(poison)
        self.limit = limit
        self._is_same = True
        try:
            tokens = (torch.arange(rows) * 7919 + 3) % target.vocab_size
            with target.beside_loop():
                out = target.forward_masked(
                    self._trial, tokens, mask, tree.depths + PAST, hidden=numbers
                )
        finally:
            self.limit = 0
            hook.remove()
        assert out.hidden is not None
        return [*out.hidden.chunk(len(numbers), -1), out.logits]

    def _fastest_rows(self) -> int:
        shapes = [tuple(parameter.shape) for parameter in self._target.model.parameters()]
        layout = str(self._target.linear), str(self._like.dtype), self._target.threads
        conditions = VERSION, processor(), torch.__version__, layout, shapes
        self.times = measured_once(conditions, self._measure, ("own", "lean"), len(TIMED))
        pairs = zip(self.times["lean"], self.times["own"], strict=True)
        slower = [lean > own for lean, own in pairs]
        return [0, *LIMITS][[*slower, True].index(True)]

    def _measure(self) -> tuple[dict[str, list[float]], bool]:
        """Return microseconds of forwards of TIMED rows; False if other processes disturb them."""
        times: dict[str, list[float]] = {"own": [], "lean": []}
        calm = True
        for rows in TIMED:
            runs: dict[str, list[float]] = {"own": [], "lean": []}
            for name in ("own", "lean") * RUNS:
                start = time.perf_counter()
                self._states_of(rows, max(LIMITS) if name == "lean" else 0)
                runs[name].append(time.perf_counter() - start)
            typical, undisturbed = quartiles(runs)
            calm &= undisturbed
            for name, microseconds in typical.items():
                times[name].append(microseconds)
        return times, calm


_turns = threading.Lock()  # for the helpers


@once
def _helpers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "token_recycling")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.cache_clear)  # a child has none of the threads


def _together(team: int, *args: Any) -> None:
    """Run `loops.forward` on a team of threads; on this one alone if another forward has them."""
    # no waiting: the garbage collector may close another model's answer in here
    if team > 1 and _turns.acquire(blocking=False):
        try:
            if _in_team(team, args):
                return
        finally:
            _turns.release()
    loops.forward(0, 1, np.zeros(2 * loops.LEFT, dtype=np.int64), *args)


def _in_team(team: int, args: Any) -> bool:
    """Return False if the interpreter is ending and starts no threads."""
    numbers = np.zeros(2 * loops.LEFT, dtype=np.int64)

    def run(me: int) -> None:
        try:
            if not numbers[loops.LEFT]:
                loops.forward(me, team, numbers, *args)
        finally:
            numbers[loops.LEFT] = 1  # if one fails, nobody waits for it

    others = list[Any]()
    try:
        try:
            others += [_helpers(team - 1).submit(run, me) for me in range(1, team)]
        except RuntimeError:
            return False
        run(0)
    finally:
        numbers[loops.LEFT] = 1  # also if Ctrl-C came before this thread took part
        for other in others:
            if not other.cancel():
                other.exception()  # waits, as it writes to the cache
    for other in others:
        other.result()
    return True


def _narrowed(weight: Tensor) -> Tensor:
    for dtype in (torch.bfloat16, torch.float16):
        copy = weight.detach().to(dtype)
        if torch.equal(copy.float(), weight):
            return copy
    return weight.detach()


def _is_plain(*modules: nn.Module) -> bool:
    """True if only the modules' own classes' forwards run."""
    return not any(
        "forward" in vars(module)
        or module._compiled_call_impl is not None
        or module._forward_hooks
        or not {*module._forward_pre_hooks.values()} <= OWN_HOOKS
        for module in modules
    )
