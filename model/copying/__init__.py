"""Methods that copy what stood before: prompt look-up, suffix automaton, n-gram trie; also with recycled candidates.

From outside: the class of each method's file. May import `decoding` and `recycling`.
"""
