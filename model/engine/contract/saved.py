"""A drafter's state kept between prompts, as tensors by name, and the check of a saved one."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import UserError

State = dict[str, Tensor]
MAX_COUNT = 1 << 53  # of anything; beyond it float64 does not count


def checked(
    state: State, name: str, shape: tuple[int, ...], low: float, high: float, *, real: bool = False
) -> Tensor:
    """Return a tensor of a saved state on the host: int64, or float64 if `real`.

    Args:
        shape: -1: any size.

    Raises:
        UserError: it is missing, of another kind or shape, or has values out of range.
    """
    saved = state.get(name)
    kind = "numbers" if real else "whole numbers"
    if saved is not None and len(saved.shape) == len(shape):
        is_real = saved.is_floating_point()
        is_whole = not (is_real or saved.is_complex() or saved.dtype == torch.bool)
        sizes = zip(shape, saved.shape, strict=True)
        if (is_real if real else is_whole) and all(size in (-1, other) for size, other in sizes):
            values = saved.cpu().double()
            if bool(((values >= low) & (values <= high)).all()):
                return values if real else saved.cpu().long()
    actual = "" if saved is None else f" (its own: {saved.dtype} {list(saved.shape)})"
    raise UserError(
        f"start: the saved state has no {name} of {kind} from {low:g} to {high:g} in the shape"
        f" {list(shape)}{actual}; it is damaged, or another method's, model's or setting's"
    )
