"""From settings to jobs: expand a command line, check its settings, identify a job's run.

Others use `jobs`, `config` and `fingerprint`. This folder may import `loading`, `records` and the
answerers.
"""
