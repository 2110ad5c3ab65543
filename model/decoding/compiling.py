"""torch.compile for a forward: a few compilations for all trees, and an error where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import UserError


def compiled(function: Callable[..., Any], frozen: bool) -> Callable[..., Any]:
    """The function by torch.compile, for steps of any tree and bucket.

    Sizes that change become symbols, so that a few compilations serve all. Where they do not, torch would go on without
    compiling after some attempts, and only say so in a log; here it raises.

    Args:
        frozen: take weights as constants, so that the compiler packs them in the layout that its products like.

    Raises:
        UserError: when called, what torch cannot compile, or has no compiler for.
    """
    import torch._dynamo.config as limits
    import torch._inductor.config as inductor
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    limits.recompile_limit, limits.fail_on_recompile_limit_hit = 32, True
    inductor.freezing = frozen  # not as an option of torch.compile: the part that traces would not know of it
    run = torch.compile(function)

    def call(*args: Any) -> Any:
        try:
            return run(*args)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            why = " ".join(str(error).strip().split("\n\n")[0].split())  # what follows is advice on debugging torch
            raise UserError(f"execution=compiled: torch.compile failed ({why[:300]}); use execution=eager") from None

    return call
