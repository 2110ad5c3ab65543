"""Methods that copy what stood before: prompt look-up, suffix automaton, and both with recycled candidates.

From outside: the class of each method's file. May import `decoding` and `recycling`.
"""
