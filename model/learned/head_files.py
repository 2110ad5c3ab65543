"""Files of learned heads: folders with config.json and weights, in the public layouts or as tools.heads writes."""

from __future__ import annotations

import json
import pickle
import shlex
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..decoding import Target, Tree
from ..errors import UserError
from ..files import located
from ..tree_files import read_tree

_TREES = Path(__file__).parent / "trees"  # as published with the heads
# What torch raises on a pickle that is cut short, corrupt, or asks for more than tensors.
_BROKEN = (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, TypeError, AttributeError, LookupError)


def locate(path: str, kind: str) -> Path:
    """The folder of a head. Raises UserError, with the command that trains one, if there is none.

    Args:
        path: as given, or relative to the repository.
        kind: what tools.heads.train calls it: medusa or eagle.
    """
    folder = located(path)
    if not folder.is_dir():
        raise UserError(
            f"no {kind} head in {path}: train one with `python -m tools.heads.train {kind} "
            f"--model MODEL --text FILE --output {shlex.quote(path)}` "
            "(--model data/embedded --text embedded for the shipped model)"
        )
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a head. Raises UserError if it is missing or no JSON object."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: missing; a head is a folder with config.json and weights") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: is not readable JSON ({error})") from None
    if not isinstance(config, dict):
        raise UserError(f"{file}: must hold a JSON object")
    return config


def read_weights(folder: Path, *names: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """The first of the named files that is there, on the CPU; a pickle is read as weights only, so it runs no code.

    Raises:
        UserError: none is there, or it is corrupt, cut short, holds other things than tensors, or would run code.
    """
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{folder}: has no weights ({' or '.join(names)})")
    try:
        if file.suffix == ".safetensors":
            state = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise UserError(f"{file}: corrupt or cut short ({error})") from None
    except _BROKEN as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(f"{file}: corrupt, cut short, or more than a pickle of weights ({reason})") from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"{file}: must hold a dictionary of tensors and nothing else")
    return file, state


def check_shapes(
    file: Path, state: dict[str, torch.Tensor], wanted: dict[str, tuple[int, ...]], fits: str = "this model"
) -> None:
    """Raises UserError at the first tensor that is missing, unknown or of another shape than `wanted`."""
    for name, shape in wanted.items():
        if name not in state:
            raise UserError(f"{file}: has no {name}; cut short, or not of this kind")
        if tuple(state[name].shape) != shape:
            raise UserError(f"{file}: {name} is {list(state[name].shape)}, {fits} needs {list(shape)}")
    for name in state:
        if name not in wanted:
            raise UserError(f"{file}: unknown tensor {name}; not of this kind")


def check_sizes(folder: Path, config: dict[str, Any], target: Target) -> None:
    """Raises UserError where the config names another hidden size or vocabulary than the target's."""
    for key, of_target in (("hidden_size", hidden_size(target)), ("vocab_size", target.vocab_size)):
        if config.get(key, of_target) != of_target:
            raise UserError(f"{folder}: made for a {key} of {config[key]}, {target.name} has {of_target}")


def hidden_size(target: Target) -> int:
    """H, the width of what enters the target's own head."""
    return int(target.model.get_output_embeddings().weight.shape[1])


def template(name: str, path: str | None) -> Tree:
    """The tree of a YAML file, or the published one of that name."""
    return read_tree(_TREES / f"{name}.yaml" if path is None else path)
