"""Plain decoding on this engine: the draft is the root alone.

The baseline that isolates drafting: same loop, cache and verification as every method. MAT is
exactly 1.
"""

from ..engine import DeviceDrafter


class Vanilla(DeviceDrafter):
    """The contract's defaults are plain decoding already."""

    joins = True
