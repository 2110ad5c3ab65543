"""The embedded model: a small chat model trained on a synthetic world, and its sample bench."""
