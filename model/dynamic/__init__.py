"""Dynamic trees: each step drafts the most likely nodes by tables of candidates and suffix matches.

From outside: the class of each method's file. May import `decoding` and `copying`.
"""
