"""The greatest logits of each row. torch is slow at this along a long row, so the search is cut down first."""

from __future__ import annotations

import math

import torch

LARGE = 16384  # from this vocabulary on, dealing pays
MAXIMA = 512  # groups of columns whose maxima stand for all logits, at least or nearly
Found = tuple[torch.Tensor | None, torch.Tensor | None]  # candidates and bits, (n, k) each, if they are asked for


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The first of each row's greatest logits: (n, V) -> (n,), exactly torch.argmax.

    On the CPU torch's own is not vectorised along a row, NumPy's is: 106 us against 28 us for 81 x 2048; and of
    bfloat16, which NumPy does not know, as float32: 252 us against 20 us for 1 x 49152.
    """
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.detach().float().numpy().argmax(axis=-1))


def top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The k greatest logits of each row, best first: (n, V) -> (n, k), as torch.topk; which of equals is left open."""
    return _greatest(logits, k)[1]


def candidates_of(logits: torch.Tensor, k: int, bits: bool = False) -> Found:
    """What a drafter asks of logits: their top-k, and the bits of `top_k_and_bits`; None for what it does not."""
    if bits:
        return top_k_and_bits(logits, k)
    return top_k(logits, k) if k else None, None


def top_k_and_bits(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k greatest logits of each row, best first, and how many bits short of certain each is: (n, k) twice.

    A token of probability p is -log2 p bits short. The mass of all tokens is estimated by that of the maxima of groups
    of columns, which finding the k greatest takes anyway: the sum of all V exponentials would take longer
    than the rest of a step's host work. Where few tokens are likely, the estimate is good; of a flat distribution of
    128,000 tokens the bits are some eight too few.
    """
    greatest, best, maxima = _greatest(logits, k)
    if maxima is None or maxima.shape[1] < MAXIMA // 2:
        n, vocab = logits.shape
        # a group has a power of two of columns that divides V
        width = min(vocab & -vocab, 1 << max((vocab // MAXIMA).bit_length() - 1, 0))
        maxima = logits.reshape(n, width, -1).amax(1)  # (n, V / width)
    mass = torch.logsumexp(maxima.float(), 1, keepdim=True)  # (n, 1)
    return best, (mass - greatest.float()) / math.log(2)


def _greatest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The k greatest of each row and their columns, (n, k) each, and the maxima of groups of columns if they were made.

    The columns are dealt to g groups. The k greatest lie in the k groups with the greatest maxima, so that torch.topk
    need only look at g maxima and at k groups: 1377 us against 798 us for 81 x 32000 (a CPU, two threads). On CUDA it
    reads long rows several times; unmeasured.
    """
    n, vocab = logits.shape
    groups = _groups(vocab, k)
    if vocab < LARGE or groups < k:
        return *logits.topk(k, dim=-1), None
    dealt = logits.reshape(n, -1, groups)  # (n, V / g, g): column c is in group c % g
    maxima = dealt.amax(dim=1)
    best = maxima.topk(k, dim=-1).indices  # (n, k): the groups
    inside = dealt.gather(2, best[:, None, :].expand(-1, vocab // groups, -1)).view(n, -1)  # (n, V / g * k)
    greatest, place = inside.topk(k, dim=-1)  # (n, k)
    row = place.div(k, rounding_mode="floor")
    return greatest, torch.add(best.gather(1, place % k), row, alpha=groups), maxima


def _groups(vocab: int, k: int) -> int:
    """How many groups: a power of two that divides V, near sqrt(k V), where the two searches balance."""
    powers = vocab & -vocab  # the greatest power of two that divides V
    return min(powers, 1 << round(math.log2(k * vocab) / 2))
