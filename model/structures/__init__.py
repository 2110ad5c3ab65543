"""What methods share: rows of candidates, kept text, automata, n-gram tables, datastores, learned heads.

From outside: any class by its file. May import `engine`.
"""
