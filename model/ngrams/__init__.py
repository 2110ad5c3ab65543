"""Methods that keep tables of n-grams: lookahead decoding and the n-gram cache.

From outside: the class of each method's file, and `ngram_table` to make tables. May import `decoding`.
"""
