"""Compute from records: metrics, intervals, acceptance, audits, published figures."""
