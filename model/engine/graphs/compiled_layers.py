"""A model's own decoder layers, each compiled whole, for captured steps.

In float16 a Llama layer is 39 operators, and a few kernels if compiled. In eager steps, calling
compiled code costs more time than it gains.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ...weights.linear import Fused, Part
from ..target.target import Target

# round after each operator, as eager steps do
ROUNDS: dict[str, Any] = {"emulate_precision_casts": True}
# Dynamo's limits of compilations of one function, by all models of a process; and a layer's number
# is not a constant of compiled code
SETTINGS: dict[str, Any] = {
    "recompile_limit": 1 << 10,
    "accumulated_recompile_limit": 1 << 10,
    "allow_unspec_int_on_nn_module": True,
}
_swapping = RLock()  # layers of one model, by its targets and threads


class CompiledLayers:
    """Compiled layers and last norm of a model, inside `with` and for the thread that entered it.

    Args:
        backend: of torch.compile.

    Raises:
        UserError: the model does not list its layers.
    """

    def __init__(self, target: Target, backend: Any = "inductor") -> None:
        self._swaps: list[tuple[dict[str, Any], str, Any]] = []  # names, name, replacement
        self._inside: list[ExitStack] = []  # what is undone at the end, for each `with`
        compiled: dict[Any, Callable[..., Any]] = {}
        cache_name = target.cache_name

        def call(number: int, module: Any, *args: Any, **kwargs: Any) -> Any:
            class_forward = type(module).forward
            by_another = not _swapping._is_owned()  # type: ignore[attr-defined]
            # under such a mode dynamo would give the function up for good
            if by_another or is_in_torch_dispatch_mode():
                return class_forward(module, *args, **kwargs)
            cache = kwargs.get(cache_name)
            if cache is not None:  # an index into all parts would be a constant of compiled code
                kwargs[cache_name] = cache.layers[number]
            if class_forward not in compiled:
                compiled[class_forward] = torch.compile(
                    class_forward, dynamic=True, backend=backend, options=ROUNDS
                )
            return compiled[class_forward](module, *args, **kwargs)

        norms = [
            part
            for part in target.model.get_decoder().children()
            if type(part).__name__.endswith("Norm")
        ]
        with _swapping:  # nobody else's replacements are there
            for number, module in enumerate([*target.layers, *norms]):  # norms get no cache
                if "forward" not in vars(module):  # else what somebody put there runs
                    self._swaps.append((vars(module), "forward", partial(call, number, module)))
        # compiled code does not merge equal products, so it gets those that no layer has left
        parts = defaultdict[Fused, list[tuple[Any, Part]]](list)
        for layer, copy in target.copies.by_layer.items():
            if isinstance(copy, Part) and target.copies.is_fused(layer):
                parts[copy.fused].append((layer, copy))
        for fused, members in parts.items():
            if len(members) == len(fused.widths):
                self._swaps += [(vars(layer), "joined", part) for layer, part in members]

    def __enter__(self) -> None:
        with ExitStack() as inside:  # undone if a version of torch lacks a setting
            inside.enter_context(_swapping)
            inside.enter_context(torch._dynamo.config.patch(SETTINGS))
            inside.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", r"\s*Online softmax")  # of torch 2.11, seven times
            warnings.filterwarnings("ignore", module=r"(torch|triton)\.")  # of no use to users
            for names, name, replacement in self._swaps:
                inside.callback(names.pop, name)
                names[name] = replacement
            self._inside.append(inside.pop_all())

    def __exit__(self, *error: object) -> None:
        self._inside.pop().close()
