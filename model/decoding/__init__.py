"""The one engine: tree, cache, target, verification, loop. It knows no method by name."""

from .drafter import Draft, Drafter
from .loop import Generation, StepRecord, decode
from .target import Target
from .tree import Tree
from .verification import Verification, verify

__all__ = [
    "Draft",
    "Drafter",
    "Generation",
    "StepRecord",
    "Target",
    "Tree",
    "Verification",
    "decode",
    "verify",
]
