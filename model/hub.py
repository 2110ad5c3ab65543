"""Is the model hub in reach? Its client retries for two minutes where it is not, so that is asked once and briefly."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request

from huggingface_hub import constants


def is_reachable(seconds: float = 5.0) -> bool:
    """True if the hub answers at all. HF_ENDPOINT, HF_HUB_OFFLINE and proxies are honoured."""
    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=seconds):
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # it answers, and its client may know certificates of its own
    except (OSError, ValueError):
        return False
