"""What the records say: metrics, intervals, acceptance, audits, tables, and published figures beside them.

From outside: everything. May import `records`.
"""
