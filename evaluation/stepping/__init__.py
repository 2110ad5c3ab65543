"""Where a step's time goes: the bench, what a step must cost at least, what drafting alone costs.

From outside: `bench`. May import any room but `page`.
"""
