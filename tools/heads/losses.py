"""Losses of the heads, on features of a frozen target: (B, T, H) last hidden states of ids (B, T)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from model.methods.medusa import MedusaHeads
from model.structures.heads import EagleHead

DECAY = 0.8  # weight of each further Medusa head (2401.10774, 2.2.1)
NOISE = 0.1  # half-width of the uniform noise on EAGLE's features (2401.15077, 4.2)


def medusa_loss(
    heads: MedusaHeads, lm_head: nn.Module, features: torch.Tensor, ids: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """Sum over heads i of 0.8^(i + 1) times the cross-entropy of the token i + 2 after each position.

    Args:
        wanted: bool (B, T); a position counts for head i if the next token (the root) and the one predicted are wanted.
    """
    total = features.new_zeros(())
    for i in range(len(heads)):
        ahead = i + 2
        counts = wanted[:, 1 : ids.shape[1] - ahead + 1] & wanted[:, ahead:]  # (B, T - ahead)
        if counts.any():
            logits = heads.logits(i, features[:, :-ahead][counts], lm_head)  # (m, V)
            total = total + DECAY ** (i + 1) * F.cross_entropy(logits.float(), ids[:, ahead:][counts])
    return total


def eagle_loss(
    head: EagleHead,
    lm_head: nn.Module,
    features: torch.Tensor,
    ids: torch.Tensor,
    wanted: torch.Tensor,
    weight: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Smooth L1 to the next feature, plus `weight` times the cross-entropy to the target's distribution (paper, 4.2).

    It counts positions whose next feature predicts a wanted token. Noise on the features imitates the head's own errors
    while drafting.
    """
    noise = torch.rand(features.shape, generator=generator).to(features) - 0.5
    cos, sin = head.angles(ids.shape[1] - 1)
    out = head((features + 2 * NOISE * noise)[:, :-1], ids[:, 1:], (cos, sin))  # (B, T - 1, H): next features
    counts = wanted[:, 2:]  # (B, T - 2)
    predicted, true = out[:, :-1][counts], features[:, 1:-1][counts]  # (m, H)
    with torch.no_grad():
        probabilities = lm_head(true).float().softmax(dim=-1)  # (m, V)
    classes = F.cross_entropy(lm_head(predicted).float(), probabilities)
    return F.smooth_l1_loss(predicted, true) + weight * classes
