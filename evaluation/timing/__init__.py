"""Timing a step: its parts, T(n), what it must cost at least, kernels, and a device's report with a forecast.

From outside: `run` for the device report, `step_bench`. The report needs torch, transformers, safetensors and numpy
alone, so that it runs where nothing else is installed: of the other folders it may import only what loads no more.
"""
