"""A configuration becomes answers: model, method, bench, conversation, devices, processes, runs that take turns.

From outside: what the commands call. May import `records` and `statistics`; no other room imports it but `stepping`.
"""
