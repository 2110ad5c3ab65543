"""The target's token after each node, greedily or by sampling, and methods' candidates.

The token at position p is the arg-max of the processed logits over the temperature plus Gumbel
noise g(seed, p). The noise is keyed by position, not by node, so the text is that of plain sampling
with the same seed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from .tree import Draft

# Reads the text so far, as transformers' LogitsProcessors: (ids (m, L), scores (m, V)) -> (m, V),
# row by row.
Processor = Callable[[Tensor, Tensor], Tensor]
# True if the answer ends with the last of these new tokens
Ends = Callable[[list[int]], bool]
_HALF = (1 << 32) - 1
LARGE_VOCAB = 16384  # from this vocabulary on, grouping columns pays
GROUPS_OF_MAXIMA = 512  # groups of columns, about, whose maxima estimate the sum over all logits
# Tokens and the log2 of their probabilities, (n, k) each; None if not needed
Candidates = tuple[Tensor | None, Tensor | None]


LEAST = 1e-300  # of settings that must be more than 0
MOST = 1e300  # of settings without a limit
LEAST_TEMPERATURE = 1e-20  # next to 0; less would overflow
_RANGES: dict[str, tuple[Any, float, float]] = {
    "temperature": (Real, 0, MOST),
    "top_k": (Integral, 0, MOST),
    "top_p": (Real, LEAST, 1),
    "min_p": (Real, 0, 1),
    "repetition_penalty": (Real, LEAST, MOST),
    "seed": (Integral, -(1 << 63), (1 << 63) - 1),
}


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; each setting as in transformers' `generate`.

    Args:
        temperature: 0: the arg-max, without noise.
        top_k, top_p, min_p: filters of the distribution; 0, 1 and 0 keep all tokens.
        repetition_penalty: on every token of the text so far; 1: none.
        processors: of logits, before the temperature, given each node's own path.

    Raises:
        UserError: a setting out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        for name, (kind, low, high) in _RANGES.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or not low <= value <= high:
                words = "whole number" if kind is Integral else "number"
                raise UserError(f"sampling.{name}={value}: must be a {words}, {low} to {high}")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise UserError(f"sampling.temperature={self.temperature}: out of range")

    @property
    def reads_text(self) -> bool:
        """True if a choice depends on more than its logits and its position."""
        return self.repetition_penalty != 1 or bool(self.processors)


GREEDY = Sampling()


def hashed_seed(*key: object) -> int:
    """Return a seed of 56 bits for a key such as (seed, index)."""
    name = " ".join(map(str, key)).encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:7], "big")


def drawn_by(processors: Iterable[Any], seed: int) -> Sampling:
    """Return the sampling of transformers' processors, given in `generate`'s order.

    The last warpers become settings, so that choices do not depend on the text.
    """
    rest = list(processors)
    settings = dict[str, Any](temperature=1.0)
    names = {"MinP": "min_p", "TopP": "top_p", "TopK": "top_k", "Temperature": "temperature"}
    for kind, name in names.items():
        if not rest or type(rest[-1]).__name__ != f"{kind}LogitsWarper":
            continue
        # others keep more tokens than the setting says, or leave filtered tokens some probability
        least = getattr(rest[-1], "min_tokens_to_keep", 1)
        if least == 1 and getattr(rest[-1], "filter_value", -math.inf) == -math.inf:
            with suppress(UserError):  # a value that is out of range here
                Sampling(**{name: getattr(rest[-1], name)})
                settings[name] = getattr(rest.pop(), name)
    return Sampling(seed=seed, processors=tuple(rest), **settings)


class Choice:
    """The target's rule for the token after each node, shared by sequences.

    Attributes:
        seeds: of the sequences of a step.
        seed: of the first one, on the device.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        # never reallocated, for graphs
        self.seed = torch.zeros((), dtype=torch.long, device=device)
        self.seeds: Sequence[int] = (0,)
        self._processors = list(sampling.processors)
        if sampling.repetition_penalty != 1:
            # not above: greedy decoding needs none of it
            from transformers import RepetitionPenaltyLogitsProcessor

            penalty = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
            self._processors.insert(0, penalty)  # as in `generate`
        self._warpers = _warpers(sampling)
        self.set_seeds(sampling.seed)

    def set_seeds(self, *seeds: int) -> None:
        if seeds[0] != self.seeds[0]:
            self.seed.fill_(seeds[0])
        self.seeds = seeds

    @property
    def draws(self) -> bool:
        return self.sampling.temperature > 0

    def among(
        self,
        logits: Tensor,
        positions: Tensor | None,
        noise_of: Tensor | None = None,
        seeds: Tensor | None = None,
    ) -> Tensor:
        """Return the choices (n,) from logits (n, V). Reads no host value on a device.

        Args:
            positions: int64 (n,), None for greedy decoding.
            noise_of: int64 (n,), which of `positions` is each row's, as nodes of one depth share
                noise.
            seeds: of each position; None: the one that is set.
        """
        return argmax(self.scores(logits, positions, noise_of, seeds))

    def scores(
        self,
        logits: Tensor,
        positions: Tensor | None,
        noise_of: Tensor | None = None,
        seeds: Tensor | None = None,
    ) -> Tensor:
        if not self.draws:
            return logits
        assert positions is not None
        scores = logits.float()
        for warper in self._warpers:
            scores = warper(None, scores)
        noise = gumbel(self.seed if seeds is None else seeds, positions, logits.shape[1])
        return scores + (noise if noise_of is None else noise.index_select(0, noise_of))

    @property
    def greedy(self) -> bool:
        """True if every choice is the arg-max of its logits."""
        return not self.draws and not self._processors

    def after(
        self,
        logits: Tensor,
        draft: Draft,
        text: Sequence[int],
        *,
        every: bool = False,
        over: Ends = lambda new: False,
    ) -> Tensor:
        """Return the choices (n,) after each node of a draft, whose root is the text's last token.

        Processors are called only for accepted nodes, as some count their calls or raise where
        their grammar ends.

        Args:
            every: False: other nodes may have -1. True: they have a choice, with processors the
                arg-max.
        """
        if self.greedy:
            return argmax(logits)
        if not self._processors and (every or logits.device.type != "cpu"):
            positions = torch.arange(
                len(text), len(text) + draft.tree.max_depth + 1, device=logits.device
            )
            return self.among(logits, positions, draft.tree.depths.to(logits.device))
        choices = self._along(logits, draft, text, over)
        return torch.where(choices < 0, argmax(logits), choices) if every else choices

    def _along(
        self,
        logits: Tensor,
        draft: Draft,
        text: Sequence[int],
        over: Ends,
    ) -> Tensor:
        """Return the choices of accepted nodes before the answer's end, -1 for the others."""
        tree = draft.tree
        tokens = draft.tokens.tolist()
        choices = [-1] * len(tokens)
        nodes = [0]
        new = list[int]()
        while nodes:  # they have one depth and one text
            row = logits[nodes[0] : nodes[0] + 1]
            if self._processors:  # row by row, as `generate` calls them
                ids = torch.tensor([[*text, *new]], device=row.device)
                # processors may write into it; drafters learn from the model's
                row = row.float().clone()
                for processor in self._processors:
                    row = processor(ids, row)
            new.append(
                int(self.among(row, torch.tensor([len(text) + len(new)], device=logits.device)))
            )
            for node in nodes:
                choices[node] = new[-1]
            if over(new):
                break
            below = range(nodes[0] + 1, len(tokens))
            # several, as only one of equal siblings may have children
            nodes = [i for i in below if tree.parent_of[i] in nodes and tokens[i] == new[-1]]
        return torch.tensor(choices, device=logits.device)


def gumbel(seed: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return Gumbel noise for each position and token: float32 (n, V), equal on all devices.

    Args:
        seed: int64 () or (n,).
        positions: int64 (n,).
    """
    key = _splitmix(_splitmix(seed) ^ positions)[:, None]  # (n, 1)
    tokens = torch.arange(vocab, device=positions.device)  # (V,)
    # (n, V), 0 to 2^32 - 1
    hashes = _lowbias(_lowbias(tokens ^ (key & _HALF)) ^ (key >> 32 & _HALF))
    # in (0, 1): small values, which make large noise, are exact; some large values would round to 1
    share = ((hashes.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-share))


def _splitmix(number: Tensor) -> Tensor:
    """A step of splitmix64 (Steele, Lea and Flood 2014) in int64."""
    number = number + _signed(0x9E3779B97F4A7C15)
    number = (number ^ _down(number, 30)) * _signed(0xBF58476D1CE4E5B9)
    number = (number ^ _down(number, 27)) * _signed(0x94D049BB133111EB)
    return number ^ _down(number, 31)


def _lowbias(number: Tensor) -> Tensor:
    """Wellons' hash of 32 bits (nullprogram.com/blog/2018/07/31), in the lower half of int64."""
    number = (number ^ number >> 16) * 0x7FEB352D & _HALF
    number = (number ^ number >> 15) * 0x846CA68B & _HALF
    return number ^ number >> 16


def _down(number: Tensor, bits: int) -> Tensor:
    return number >> bits & (1 << 64 - bits) - 1  # as unsigned numbers are shifted


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _warpers(sampling: Sampling) -> list[Any]:
    if sampling.temperature == 0:
        return []
    from transformers.generation import logits_process as library

    warpers: list[Any] = []  # in `generate`'s order
    if sampling.temperature != 1:
        warpers.append(library.TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        warpers.append(library.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(library.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(library.MinPLogitsWarper(sampling.min_p))
    return warpers


def argmax(logits: Tensor) -> Tensor:
    """Return each row's arg-max, the first of equals: (n, V) -> (n,), exactly torch.argmax.

    On a CPU, NumPy takes 28 us and torch 106 us for 81 x 2048. NumPy lacks bfloat16.
    """
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.detach().float().numpy().argmax(axis=-1))


def top_k(logits: Tensor, k: int) -> Tensor:
    """Return each row's top-k, best first: (n, V) -> (n, k). The order of equals is undefined."""
    return _greatest(logits, k)[1]


def candidates_of(logits: Tensor, k: int, log_probs: bool = False) -> Candidates:
    if log_probs:
        return top_k_log_probs(logits, k)
    return top_k(logits, k) if k else None, None


def top_k_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return each row's top-k, best first, and the log2 of their probabilities: (n, k) twice.

    The softmax's denominator is estimated from the maxima of groups of columns, as the sum of all V
    exponentials takes long. The estimate is good if few tokens are likely.
    """
    greatest, best, maxima = _greatest(logits, k)
    if maxima is None or maxima.shape[1] < GROUPS_OF_MAXIMA // 2:
        n, vocab = logits.shape
        # a group has a power of two of columns that divides V
        width = min(vocab & -vocab, 1 << max((vocab // GROUPS_OF_MAXIMA).bit_length() - 1, 0))
        maxima = logits.reshape(n, width, -1).amax(1)  # (n, V / width)
    mass = torch.logsumexp(maxima.float(), 1, keepdim=True)  # (n, 1)
    log_probs = (greatest.float() - mass) / math.log(2)
    return best, log_probs.nan_to_num(-math.inf, neginf=-math.inf)  # of logits that are NaN


def _greatest(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return each row's top-k logits and columns, (n, k) each, and maxima of groups if computed.

    Only the k groups of columns with the greatest maxima are searched: 798 us instead of
    torch.topk's 1377 us for 81 x 32000 on a CPU.
    """
    n, vocab = logits.shape
    groups = _groups(vocab, k)
    if vocab < LARGE_VOCAB or groups < k:
        return *logits.topk(k, dim=-1), None
    grouped = logits.reshape(n, -1, groups)  # (n, V / g, g): column c is in group c % g
    maxima = grouped.amax(dim=1)
    best = maxima.topk(k, dim=-1).indices  # (n, k): the groups
    # (n, V / g * k)
    inside = grouped.gather(2, best[:, None, :].expand(-1, vocab // groups, -1)).view(n, -1)
    greatest, index = inside.topk(k, dim=-1)  # (n, k)
    row = index.div(k, rounding_mode="floor")
    return greatest, torch.add(best.gather(1, index % k), row, alpha=groups), maxima


def _groups(vocab: int, k: int) -> int:
    """Return a power of two that divides V, near sqrt(k V), where the two searches balance."""
    powers = vocab & -vocab  # the greatest power of two that divides V
    return min(powers, 1 << round(math.log2(k * vocab) / 2))
