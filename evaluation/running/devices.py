"""Where a model goes: one device, several of them, or several processes."""

from __future__ import annotations

from typing import Any

import torch

from model.errors import UserError

from .model_settings import ModelSettings
from .processes import local_world_size, world_size


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU. Which of several GPUs, `locks.exclusive` says."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"model.device={name}: unknown device; use auto, cpu, cuda, cuda:N or mps") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"model.device={name}: this machine has no CUDA device (or a torch build without CUDA)")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"model.device={name}: this machine has {torch.cuda.device_count()} CUDA device(s)")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"model.device={name}: this machine has no MPS device")
    if device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"model.device={name}: unknown device; use auto, cpu, cuda, cuda:N or mps")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def check_placement(settings: ModelSettings) -> None:
    """Refuse settings that contradict each other or the way this process was started.

    Raises:
        UserError: says which.
    """
    given, parallel, processes = settings.device_map, settings.tensor_parallel, world_size()
    if given is not None and settings.device != "auto":
        raise UserError(f"model.device={settings.device} and model.device_map={given}: give one of the two")
    if parallel and (given is not None or settings.device != "auto"):
        raise UserError(
            "model.tensor_parallel=true places the model itself; leave out model.device and model.device_map"
        )
    if settings.quantize is not None and (given is not None or parallel):
        raise UserError(
            f"model.quantize={settings.quantize}: is for a model on one device; leave out device_map, tensor_parallel"
        )
    if parallel and processes == 1:
        raise UserError(
            "model.tensor_parallel=true: needs several processes; start it with "
            "torchrun --nproc-per-node NUMBER_OF_GPUS -m evaluation.run ..."
        )
    if not parallel and processes > 1:
        raise UserError(
            f"torchrun started {processes} processes, which work together with model.tensor_parallel=true only"
        )
    if parallel and torch.cuda.is_available() and local_world_size() > torch.cuda.device_count():
        raise UserError(
            f"torchrun started {local_world_size()} processes, but this machine has {torch.cuda.device_count()} CUDA "
            "device(s); give as many to --nproc-per-node"
        )


def placement(settings: ModelSettings) -> dict[str, Any]:
    """What `from_pretrained` is told: nothing for one device, as the model is moved there afterwards."""
    if settings.tensor_parallel:
        from transformers.distributed import DistributedConfig  # slow to import, and for this alone

        return {"distributed_config": DistributedConfig(tp_size=world_size(), tp_plan="auto")}
    return {} if settings.device_map is None else {"device_map": settings.device_map}


def place(model: Any, settings: ModelSettings, device: torch.device) -> Any:
    """The model where it belongs; refuses one that is not wholly on its devices.

    Raises:
        UserError: a device map that leaves weights in main memory or on the disk, heads that do not divide.
    """
    if settings.tensor_parallel:
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        if heads % world_size():
            raise UserError(
                f"{settings.name}: its {heads} key-value heads cannot be shared by {world_size()} processes"
            )
        return model
    if settings.device_map is None:
        return model.to(device)
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if "disk" in places or ("cpu" in places and len(places) > 1):
        raise UserError(
            f"{settings.name}: does not fit on the devices of model.device_map={settings.device_map}, and a step would "
            "wait for weights from main memory or disk; use more devices or a smaller model.dtype"
        )
    return model
