"""From settings to jobs: expand a command line to jobs, check settings, build a job's method, identify its run.

From outside: `jobs`, `config`, `methods`, `fingerprint`. May import `loading` and `records`.
"""
