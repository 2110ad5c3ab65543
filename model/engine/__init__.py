"""The one engine: tree, cache, target, verification, loop. It knows no method by name.

Import from outside only the names below, and modules that methods are made with (`sampling`,
`devices`, `cache`).
"""

from .answer import Generation, StepRecord
from .drafter import DeviceDrafter, DeviceSession, Drafter, Needs, Session
from .layers import LAST
from .loop import decode, generate
from .target import Target
from .tree import Draft, Tree
from .verification import Verification, verify

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
