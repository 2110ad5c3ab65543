"""Is the model hub in reach? Asked once and briefly: its own client tries for minutes before it says no."""

from __future__ import annotations

import urllib.error
import urllib.request
from functools import cache

from huggingface_hub import constants


@cache
def in_reach(seconds: float = 5.0) -> bool:
    """Does the hub's address answer at all, whatever it says? HF_ENDPOINT, HF_HUB_OFFLINE and proxies are honoured."""
    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=seconds):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
