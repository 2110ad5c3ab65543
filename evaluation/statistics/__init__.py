"""Compute from records: metrics, intervals, acceptance, audits, tables, and published figures next
to them.

Other folders may use everything. This folder may import `records`.
"""
