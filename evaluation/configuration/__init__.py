"""From settings to jobs: which settings there are, what a job needs, its method, and what tells two runs apart.

From outside: `methods`, `config`, `needs`, `fingerprint`. May import `loading` and `records`.
"""
