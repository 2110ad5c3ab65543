"""The one engine: tree, cache, target, verification, loop. It knows no method by name.

Import from outside only the names below, and modules that methods are made with (`sampling`,
`devices`, `cache`).
"""

from .attention.layers import LAST
from .contract.drafter import DeviceDrafter, DeviceSession, Drafter, Needs, Session
from .loop.answer import Generation, StepRecord
from .loop.loop import decode, generate
from .rule.tree import Draft, Tree
from .rule.verification import Verification, verify
from .target.target import Target

__all__ = [
    "LAST",
    "DeviceDrafter",
    "DeviceSession",
    "Draft",
    "Drafter",
    "Generation",
    "Needs",
    "Session",
    "StepRecord",
    "Target",
    "Tree",
    "Verification",
    "decode",
    "generate",
    "verify",
]
