"""What a device makes of the method, in minutes: steps checked against eager ones, T(n), kernels, launches, a forecast.

From outside: `run.make_report` and `plan`. Needs torch, transformers, safetensors and numpy alone, so that it runs where
nothing else is installed: of the other rooms it may import only what loads no more.
"""
