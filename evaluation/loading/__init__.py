"""Loading models and benches; devices, memory, locks.

From outside: what the other folders call. May import `records`.
"""
