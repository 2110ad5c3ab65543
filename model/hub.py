"""Is the model hub in reach? Its client retries for two minutes where it is not, so that is asked briefly."""

from __future__ import annotations

import ssl
import time
import urllib.error
import urllib.request
from functools import lru_cache

from huggingface_hub import constants


def is_reachable() -> bool:
    """True if the hub answers at all, asked once a minute. HF_ENDPOINT, HF_HUB_OFFLINE and proxies are honoured."""
    return not constants.HF_HUB_OFFLINE and answers(constants.ENDPOINT, int(time.monotonic() // 60))


@lru_cache(maxsize=1)
def answers(endpoint: str, minute: int, seconds: float = 5.0) -> bool:
    """True if there is any answer; kept for the minute."""
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=seconds):
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # it answers, and its client may know certificates of its own
    except (OSError, ValueError):
        return False
