"""Which tokens are accepted: draft trees, verification, sampling."""
