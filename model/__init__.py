"""How tokens are made: one decoding engine (`decoding/`) and one drafter a file.

Imports itself relatively and knows neither Hydra nor the harness, so that it can be vendored under another name.
"""
