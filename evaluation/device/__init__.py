"""What a device makes of the method, in minutes: checks of its steps, T(n), kernels, launches, a forecast.

From outside: what the command calls. Needs torch, transformers, safetensors and numpy alone, so that it runs where
nothing else is installed: of the other rooms it may import only what loads no more.
"""
