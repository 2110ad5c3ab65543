"""Running questions: one run, interleaved runs, progress, and the report at the end.

Commands may use all modules. This folder may import `configuration`, `loading`, `records` and
`statistics`.
"""
