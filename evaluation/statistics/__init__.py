"""What the records say: metrics, intervals, acceptance, audits, tables, and published figures next to them.

From outside: everything. May import `records`.
"""
