"""RMSNorm and rotary embedding as one kernel each: in float16 they are 26 of a Llama layer's 39 operators, now 3.

For captured steps alone. In eager ones the host's part of calling compiled code takes longer than it gains.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from threading import RLock
from typing import Any

import torch

ROTARY = "apply_rotary_pos_emb"  # of transformers' modules of models, whose attention layers look it up by this name
ROUNDS: dict[str, Any] = {"emulate_precision_casts": True}  # after each operator in half precision, as eager steps do
_swapping = RLock()  # models of one family share that function


def _call(compiled: Callable[..., Any], own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    entered = _swapping._is_owned()  # type: ignore[attr-defined]  # by this thread, as threading.Condition asks
    return (compiled if entered else own)(*args, **kwargs)


class CompiledKernels:
    """A model's RMSNorms and rotary embedding, compiled, inside `with` and for the thread that entered it.

    torch compiles each once for one row and once for any other number of rows, and all layers of a kind share that.
    Outside `with`, and in other threads, the model's own are called. A copy has none.

    Args:
        backend: of torch.compile.

    Attributes:
        names: what is compiled; empty if the model has neither.
    """

    def __init__(self, model: Any, backend: Any = "inductor") -> None:
        self._swaps: list[tuple[dict[str, Any], str, Callable[..., Any]]] = []  # in which names, as what
        self._found: list[Any] = []  # there, before; None where nothing was
        compiled: dict[Any, Callable[..., Any]] = {}

        def swap(where: dict[str, Any], name: str, own: Any, *bound: Any) -> None:
            if own not in compiled:
                compiled[own] = torch.compile(own, dynamic=True, backend=backend, options=ROUNDS)
            self._swaps.append((where, name, partial(_call, compiled[own], own, *bound)))

        with _swapping:
            for module in model.modules():
                if type(module).__name__.endswith("RMSNorm") and "forward" not in vars(module):
                    swap(vars(module), "forward", type(module).forward, module)
            for module in {sys.modules[type(module).__module__] for module in model.modules()}:
                if callable(own := vars(module).get(ROTARY)):
                    swap(vars(module), ROTARY, own)
        self.names = sorted(own.__qualname__.removesuffix(".forward") for own in compiled)

    def __reduce__(self) -> tuple[type[nullcontext[None]], tuple[()]]:
        return nullcontext, ()

    def __enter__(self) -> None:
        _swapping.acquire()
        self._found = [where.get(name) for where, name, _ in self._swaps]
        for where, name, call in self._swaps:
            where[name] = call

    def __exit__(self, *error: object) -> None:
        for (where, name, _), found in zip(self._swaps, self._found, strict=True):
            if found is None:
                del where[name]
            else:
                where[name] = found
        _swapping.release()
