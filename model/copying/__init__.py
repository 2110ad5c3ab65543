"""Methods that copy earlier text: prompt look-up, suffix automaton, n-gram trie, trees of copied and recycled tokens.

From outside: the class of each method's file. May import `decoding` and `recycling`.
"""
