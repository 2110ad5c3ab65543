"""What the target picks after each node, greedily or by sampling, and the candidates that methods ask for.

Sampling's output does not depend on what was drafted: the noise belongs to a place in the text, not to a node.

The token at position p is the arg-max of the processed logits over the temperature plus Gumbel noise g(seed, p), which
is a draw from their softmax (the Gumbel-max trick). The noise depends on the seed and on p alone: all nodes of one
depth have the same. So a drafted token is accepted where it is its parent's choice, as in greedy decoding, and the text
is, token for token, what plain sampling with that seed gives, whatever was tried on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UserError
from .tree import Draft

# What reads the text so far: (ids (m, L), scores (m, V)) -> (m, V), rows one by one; transformers' LogitsProcessors do.
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_HALF = (1 << 32) - 1
LARGE = 16384  # from this vocabulary on, dealing pays
MAXIMA = 512  # groups of columns whose maxima stand for all logits, at least or nearly
Candidates = tuple[torch.Tensor | None, torch.Tensor | None]  # tokens and bits, (n, k) each, if they are asked for
NOISE_BYTES = 64 << 20  # of noise that are kept; a row takes 4 V


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; each setting as in transformers' `generate`, and in its order.

    Args:
        temperature: 0: the arg-max, without noise.
        top_k, top_p, min_p: what is left of a distribution; 0, 1 and 0 leave all.
        repetition_penalty: on every token of the text so far; 1: none.
        seed: of the noise.
        processors: what else changes logits, before the temperature; looks at each node's own path.

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
        right = {
            "temperature": 0 <= self.temperature < float("inf"),
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": 0 < self.repetition_penalty < float("inf"),
            "seed": -(1 << 63) <= self.seed < 1 << 63,
        }
        for name, fits in right.items():
            if not fits:
                raise UserError(f"sampling.{name}={getattr(self, name)}: out of range")

    @property
    def reads_text(self) -> bool:
        """Whether a choice depends on more than its logits and its place."""
        return self.repetition_penalty != 1 or bool(self.processors)


GREEDY = Sampling()


class Choice:
    """What the target picks after each node of a draft: the rule of one setting, for whatever sequence takes its turn.

    Args:
        sampling: its seed may change from sequence to sequence (`take`), nothing else.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        self.seed = torch.zeros((), dtype=torch.long, device=device)  # where it stays, for captured steps
        self._now = 0
        # Noise (V,) by seed and place, on a CPU; what was used last comes last.
        self._rows: dict[tuple[int, int], torch.Tensor] = {}
        self._processors, self._warpers = _processors(sampling), _warpers(sampling)
        self.take(sampling.seed)

    def take(self, seed: int) -> None:
        """Draw by this seed from now on."""
        if seed != self._now:
            self._now = seed
            self.seed.fill_(seed)

    @property
    def draws(self) -> bool:
        """Whether a choice depends on its place in the text."""
        return self.sampling.temperature > 0

    def among(self, logits: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """The choices (n,) by logits (n, V) for these places in the text, int64 (n,), or None where nothing is drawn;
        elsewhere than on a CPU no host value is read."""
        return argmax(self.scores(logits, positions))

    def ranked(
        self, logits: torch.Tensor, positions: torch.Tensor | None, k: int, bits: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The choices (n,), and what `candidates_of` finds, whose first may be another of equal logits."""
        return self.among(logits, positions), *candidates_of(logits, k, bits)

    def scores(self, logits: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """What choices are the arg-max of, (n, V): by another model's logits what it would choose by this noise."""
        if not self.draws:
            return logits
        assert positions is not None
        scores = logits.float()
        for warper in self._warpers:
            scores = warper(None, scores)
        return scores + self._noise(positions, logits.shape[1])

    def after(self, logits: torch.Tensor, draft: Draft, text: Sequence[int], *, every: bool = True) -> torch.Tensor:
        """The choices (n,) after each node of a draft, whose root is the text's last token.

        Args:
            every: False: where it saves work only the accepted nodes have a choice, and the others -1.
        """
        tree = draft.tree
        if self.sampling.temperature == 0 and not self._processors:
            return argmax(logits)
        if logits.device.type == "cpu" and not every:
            return self._along(logits, draft, text)
        if self._processors:
            tokens = draft.tokens.tolist()
            logits = torch.cat([self._processed(logits[i : i + 1], draft, tokens, i, text) for i in range(len(tree))])
        return self.among(logits, tree.depths.to(logits.device) + len(text))

    def _along(self, logits: torch.Tensor, draft: Draft, text: Sequence[int]) -> torch.Tensor:
        """The choices of the accepted nodes, found from the root down: a step's depth of rows, and not n of them."""
        tree, tokens = draft.tree, draft.tokens.tolist()
        choices, node = [-1] * len(tokens), 0
        while True:
            row = self._processed(logits[node : node + 1], draft, tokens, node, text)
            place = torch.tensor([tree.depth_of[node] + len(text)])
            choices[node] = chosen = int(self.among(row, place))
            below = (i for i in range(node + 1, len(tokens)) if tree.parent_of[i] == node and tokens[i] == chosen)
            if (node := next(below, -1)) < 0:
                return torch.tensor(choices)

    def _processed(
        self, row: torch.Tensor, draft: Draft, tokens: Sequence[int], node: int, text: Sequence[int]
    ) -> torch.Tensor:
        """A node's logits (1, V) behind its own path. One row at a time, as processors are used to in `generate`."""
        if not self._processors:
            return row
        ids = torch.tensor([[*text, *(tokens[i] for i in draft.tree.chain_of[node][1:])]], device=row.device)
        scores = row.float().clone()  # a processor may write into it, and the drafter learns from the model's own
        for processor in self._processors:
            scores = processor(ids, scores)
        return scores

    def _noise(self, positions: torch.Tensor, vocab: int) -> torch.Tensor:
        """(n, V). On a CPU a row is drawn once for all steps that look ahead to its place."""
        if positions.device.type != "cpu":
            return gumbel(self.seed, positions, vocab)
        places = [(self._now, place) for place in positions.tolist()]
        rows = {place: self._rows.pop(place) for place in places if place in self._rows}
        missing = [place for place in dict.fromkeys(places) if place not in rows]
        if missing:
            drawn = gumbel(self.seed, torch.tensor([place for _, place in missing]), vocab)
            rows |= zip(missing, (row.clone() for row in drawn), strict=True)  # a view would keep all that was drawn
        self._rows |= rows
        while len(self._rows) > max(NOISE_BYTES // (4 * vocab), len(rows)):  # the longest unused, none of these
            del self._rows[next(iter(self._rows))]
        return torch.stack([rows[place] for place in places])


def gumbel(seed: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """Gumbel noise of each place for each token: float32 (n, V), from integers alone until the last logarithms.

    Token and place are hashed (splitmix64 for the keys of a place, then twice lowbias32 of the token under them), so
    any device draws the same and none keeps a state.

    Args:
        seed: int64 ().
        positions: int64 (n,).
    """
    key = _splitmix(_splitmix(seed) ^ positions)[:, None]  # (n, 1)
    tokens = torch.arange(vocab, device=positions.device)  # (V,)
    drawn = _lowbias(_lowbias(tokens ^ (key & _HALF)) ^ (key >> 32 & _HALF))  # (n, V), 0 to 2^32 - 1
    # in (0, 1): the small ones, which make the large noise, are exact; of the large ones some would round to 1
    share = ((drawn.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-share))


def _splitmix(number: torch.Tensor) -> torch.Tensor:
    """A step of splitmix64 (Steele, Lea and Flood 2014): int64 to int64, one to one, overflows wrapping."""
    number = number + _signed(0x9E3779B97F4A7C15)
    number = (number ^ _down(number, 30)) * _signed(0xBF58476D1CE4E5B9)
    number = (number ^ _down(number, 27)) * _signed(0x94D049BB133111EB)
    return number ^ _down(number, 31)


def _lowbias(number: torch.Tensor) -> torch.Tensor:
    """Wellons' hash of 32 bits (nullprogram.com/blog/2018/07/31), one to one; of int64 the lower half counts."""
    number = (number ^ number >> 16) * 0x7FEB352D & _HALF
    number = (number ^ number >> 15) * 0x846CA68B & _HALF
    return number ^ number >> 16


def _down(number: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifted down with zeros coming in, as unsigned numbers are."""
    return number >> bits & (1 << 64 - bits) - 1


def _signed(word: int) -> int:
    """An unsigned word of 64 bits as int64 has it."""
    return word - (1 << 64) if word >> 63 else word


def _processors(sampling: Sampling) -> list[Processor]:
    """What reads the text, in `generate`'s order: the penalty, then the caller's own."""
    if sampling.repetition_penalty == 1:
        return list(sampling.processors)
    from transformers import RepetitionPenaltyLogitsProcessor  # not above: greedy decoding needs none of it

    return [RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty), *sampling.processors]


def _warpers(sampling: Sampling) -> list[Any]:
    """What a temperature brings with it, in `generate`'s order."""
    if sampling.temperature == 0:
        return []
    from transformers.generation import logits_process as library

    warpers: list[Any] = []
    if sampling.temperature != 1:
        warpers.append(library.TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        warpers.append(library.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(library.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(library.MinPLogitsWarper(sampling.min_p))
    return warpers


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


def candidates_of(logits: torch.Tensor, k: int, bits: bool = False) -> Candidates:
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
