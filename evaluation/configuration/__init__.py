"""From settings to jobs: check settings, list what a job needs, build its method, identify its run.

From outside: `methods`, `config`, `needs`, `fingerprint`. May import `loading` and `records`.
"""
