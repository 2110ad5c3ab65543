"""Running questions: one run, interleaved runs, progress, and the report at the end.

From outside: what the commands call. May import `configuration`, `loading`, `records` and `statistics`.
"""
