"""From settings to jobs: expand a command line to jobs, check their settings, identify the run of a
job.

Others use `jobs`, `config` and `fingerprint`. This folder may import `loading`, `records` and the
answerers.
"""
