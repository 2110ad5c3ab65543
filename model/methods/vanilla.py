"""Plain decoding on this engine, the baseline that isolates drafting: MAT is exactly 1."""

from ..engine import DeviceDrafter


class Vanilla(DeviceDrafter):
    """The contract's defaults are plain decoding already."""

    joins = True
