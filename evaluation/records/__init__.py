"""What a run writes and how it is read.

That is answers, a run's folder, provenance, sweeps, and other people's files.

Other folders may use everything. This folder imports no other one.
"""
