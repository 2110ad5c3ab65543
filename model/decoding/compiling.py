"""What torch compiles a forward by: a few compilations for all trees, and an error where it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import UserError
from .cache import TreeCache


@contextmanager
def compiling(frozen: bool) -> Iterator[None]:
    """What torch is to compile by, inside: these switches are the process's, and are put back as they were.

    Sizes that change become symbols, so that a few compilations serve all. Where they do not, torch would go on without
    compiling after some attempts, and only say so in a log; here it raises.

    Args:
        frozen: take weights as constants, so that the compiler packs them in the layout that its products like.

    Raises:
        UserError: what torch cannot compile, or has no compiler for.
    """
    import torch._dynamo.config as limits  # not above: they load the whole of the compiler
    import torch._inductor.config as inductor
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    try:
        # freezing is no option of torch.compile here: the part that traces would not know of it
        with limits.patch(recompile_limit=32, fail_on_recompile_limit_hit=True), inductor.patch(freezing=frozen):
            yield
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        why = " ".join(str(error).strip().split("\n\n")[0].split())  # what follows is advice on debugging torch
        raise UserError(f"execution=compiled: torch.compile failed ({why[:300]}); use execution=eager") from None


def sizes_change(cache: TreeCache, tokens: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor) -> None:
    """Say that rows, bucket and capacity are no constants, so that a second compilation finds that out for none.

    One row alone stays a constant: torch takes sizes of 1 for one.
    """
    from torch._dynamo import maybe_mark_dynamic  # as above

    write_at = cache.place.write_at
    assert write_at is not None
    for tensor in (tokens, positions, write_at):
        maybe_mark_dynamic(tensor, 0)
    if mask is not None:
        maybe_mark_dynamic(mask, [2, 3])
    for layer in cache.layers:
        maybe_mark_dynamic(layer.keys, 2)
        maybe_mark_dynamic(layer.values, 2)
