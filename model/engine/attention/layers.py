"""What a model's layers store and see, and what else decides its answers."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ...errors import UserError
from ...weights.linear import PackedLinear
from .attention import NAME
from .cache import LayerShape
from .checks import refusing_errors

# Kinds of transformers' layers that the engine can drive, by name, as older versions lack some.
WINDOWED = ("DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
ATTENTION = ("DynamicLayer", "DynamicIndexedLayer", "DummyLayer", *WINDOWED)
# Additive (1, 1, n, c), by type of layer if types have different masks
Masks = Tensor | dict[str, Tensor | None] | None
# Numbers of hidden states, as in transformers: i is the input of layer i.
Hidden = tuple[int, ...]
LAST = -1  # the number of the input of the model's own head, after the final norm
DRIVEN = (*ATTENTION, "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")
NUMBERS = {bool, int, float}  # types whose values a module's forward may multiply by, or ask
AUTOCAST = ("cpu", "cuda", "mps", "xpu")  # types of devices
# float32: newer names, as `torch.get_float32_matmul_precision` raises once they are used
PRECISION = attrgetter(
    "fp32_precision",
    "cuda.matmul.fp32_precision",
    "cudnn.conv.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "cuda.matmul.allow_fp16_accumulation",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
)


@dataclass(frozen=True)
class Window:
    size: int  # positions of the window, the token's own one included; or of a chunk
    chunked: bool  # True if a text is cut into chunks, each of which sees itself alone

    def hides(self, rows: Tensor, columns: Tensor) -> Tensor:
        """bool (n, c): True where positions `rows` (n,) do not see positions `columns` (c,)."""
        if self.chunked:
            return rows[:, None] // self.size != columns // self.size
        return rows[:, None] - columns >= self.size


def device_of(model: Any) -> torch.device:
    """Return the device of a model's inputs: accelerate's if embeddings are offloaded."""
    embeddings = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    hook = getattr(embeddings, "_hf_hook", None)
    return (
        torch.device(hook.execution_device)
        if device.type == "meta" and hook is not None
        else device
    )


def is_compiled(module: Any) -> bool:
    forward = vars(module).get("forward")
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


@torch.inference_mode()
def probe_layers(
    model: Any, name: str, device: torch.device, cache_name: str
) -> tuple[list[LayerShape | None], dict[str, Window], list[int]]:
    """Forward one token through transformers' own cache and read what each layer stores.

    Returns:
        Each layer's shape of keys and values, or None; the windows of bounded layers by type of
            layer, "" if one mask serves all; and each layer's number of recurrent states, empty if
            none has any.

    Raises:
        UserError: a layer stores something else, or the model takes no mask per layer type.
    """
    probe = DynamicCache(config=model.config)
    windows = dict[str, Window]()
    config = model.config.get_text_config(decoder=True)
    types = layer_types(model)
    for i, layer in enumerate(probe.layers):
        if type(layer).__name__ not in DRIVEN:
            raise UserError(
                f"{name}: layer {i} is a {type(layer).__name__}, from which tokens cannot be taken"
                " back"
            )
        if type(layer).__name__ in WINDOWED:
            chunked = (
                types[i] == "chunked_attention"
                if types
                else getattr(config, "sliding_window", None) is None
            )
            windows[types[i] if types else ""] = Window(layer.sliding_window, chunked)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    states = [getattr(layer, "number_of_states", 0) for layer in probe.layers]
    # chains need no masks
    mask = dict.fromkeys(types) if windows and types and not any(states) else None
    with refusing_errors(name):
        model(input_ids=token, attention_mask=mask, use_cache=True, **{cache_name: probe})
    shapes: list[LayerShape | None] = []
    for layer in probe.layers:
        keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
        if keys is None or values is None:  # an empty attention layer attends only to pictures
            empty = type(layer).__name__ == "DynamicLayer"
            shapes.append(LayerShape(0, 0, 0, model.dtype, device) if empty else None)
        else:
            index_keys = getattr(layer, "indexer_keys", None)  # (1, 1, index_dim)
            dims = keys.shape[1], keys.shape[3], values.shape[3]
            shapes.append(
                LayerShape(
                    *dims,
                    keys.dtype,
                    keys.device,
                    0 if index_keys is None else index_keys.shape[-1],
                )
            )
    return shapes, windows, states if any(states) else []


def decoder_layers(model: Any, name: str) -> torch.nn.ModuleList:
    """Return the decoder's layers. Raises UserError if the decoder does not list them."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for child in model.get_decoder().children():
        if isinstance(child, torch.nn.ModuleList) and len(child) == count:
            return child
    raise UserError(
        f"{name}: does not list its {count} layers, so that no states between them can be read"
    )


def layer_types(model: Any) -> tuple[str, ...]:
    """Return the type of each layer; () if the model takes one mask for all."""
    return tuple(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())


def form_of(model: Any) -> tuple[Any, ...]:
    """Return what a target assumes constant in its model: attention, modules, tensors' form."""
    attention = model.config.get_text_config()._attn_implementation
    # set for a moment by a model of the same config
    form: list[Any] = ["sdpa" if attention == NAME else attention]
    for module in model.modules():
        kind = torch.nn.Linear if type(module) is PackedLinear else type(module)
        forward = vars(module).get("forward", module._compiled_call_impl) or kind.forward
        form += kind, weakref.ref(forward)  # weak, as a function may hold the model
    for tensor in (*model.parameters(), *model.buffers()):
        address = tensor.data_ptr() if tensor.is_cuda else 0  # graphs contain it
        form.append((tensor.shape, tensor.dtype, tensor.device, address))
    return tuple(form)


def mode_of(model: Any) -> tuple[Any, ...]:
    """Return what decides answers next to weights: precision, numbers, hooks, adapters."""
    modules = list(model.modules())
    holders = (model.config, model.config.get_text_config(decoder=True), *modules)
    numbers = [
        value for holder in holders for value in vars(holder).values() if type(value) in NUMBERS
    ]
    hooks = list[int]()
    adapters = list[Any]()
    for module in modules:
        hooks += [*module._forward_hooks, *module._forward_pre_hooks]
        if hasattr(type(module), "merged_adapters"):
            scaling = getattr(module, "scaling", None)  # of LoRA
            adapters.append((module.active_adapters, module.disable_adapters, scaling))
    return torch_precision(), numbers, repr((hooks, adapters))


def torch_precision() -> tuple[Any, ...]:
    autocast = [
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in AUTOCAST
    ]
    return *autocast, *PRECISION(torch.backends), torch.get_default_dtype()
