"""Methods that copy what stood before: prompt look-up, suffix automaton, n-gram trie, and trees of copied and recycled
candidates.

From outside: the class of each method's file. May import `decoding` and `recycling`.
"""
