"""From settings to jobs: expand a command line to jobs, check their settings, identify the run of a job.

From outside: `jobs`, `config`, `fingerprint`. May import `loading`, `records` and the answerers.
"""
