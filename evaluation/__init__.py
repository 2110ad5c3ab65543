"""How tokens are measured. Here stands only what one runs, `python -m evaluation.NAME`; the work is done in the rooms.

Imports `model/`, never the reverse.
"""
