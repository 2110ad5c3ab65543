"""Plain decoding on this engine: MAT is exactly 1."""

from ..engine import DeviceDrafter


class Vanilla(DeviceDrafter):
    """The contract's defaults."""

    joins = True
