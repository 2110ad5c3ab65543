"""How tokens are made: one engine (`decoding/`) and the methods in rooms by what they draft from.

Imports itself relatively and knows neither Hydra nor the harness, so that it can be vendored under another name.

From outside: any class by its file; `errors`, `files` and `tree_files` are everyone's.
"""
