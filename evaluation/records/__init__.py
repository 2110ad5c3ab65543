"""What a run leaves and how it is read: answers, a run's folder, provenance, sweeps, other people's files.

From outside: everything; it imports no other folder.
"""
