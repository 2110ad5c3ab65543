"""Compute from records: metrics, intervals, acceptance, audits, tables.

Published figures are put next to them.

Other folders may use everything. This folder may import `records`.
"""
