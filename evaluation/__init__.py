"""The harness. Modules here are commands, `python -m evaluation.NAME`; the folders do the work."""
