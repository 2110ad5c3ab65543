"""What a run writes and how it is read: answers, a run's folder, provenance, sweeps, other people's
files.

Other folders may use everything. This folder imports no other one.
"""
