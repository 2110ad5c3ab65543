"""The one engine, which knows no method by name. Callers import the names below."""

from .attention.layers import LAST
from .contract.drafter import Device, DeviceDrafter, DeviceSession, Drafter, Needs, Session
from .contract.saved import State, checked
from .contract.sizing import Sizing
from .loop.answer import Generation, Request, StepRecord
from .loop.loop import decode, exhaust, generate
from .rule.sampling import GREEDY, Sampling, top_k
from .rule.tree import Draft, RankPath, Tree
from .rule.verification import Verification, verify
from .target.target import Target

__all__ = [
    "GREEDY",
    "LAST",
    "Device",
    "DeviceDrafter",
    "DeviceSession",
    "Draft",
    "Drafter",
    "Generation",
    "Needs",
    "RankPath",
    "Request",
    "Sampling",
    "Session",
    "Sizing",
    "State",
    "StepRecord",
    "Target",
    "Tree",
    "Verification",
    "checked",
    "decode",
    "exhaust",
    "generate",
    "top_k",
    "verify",
]
