"""Drafts whose tree is another one each step: the likeliest nodes of all that rows and text suggest.

From outside: the class of each method's file. May import `decoding` and `copying`.
"""
