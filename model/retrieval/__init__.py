"""REST: what followed the same words in a datastore of other text.

From outside: `rest`, and `datastore` to make one. May import `decoding`.
"""
