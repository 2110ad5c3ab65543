"""How many nodes a draft should have: what a step of n nodes takes, recorded or learnt while decoding.

From outside: `draft_size` for step times measured once a machine, `online_size` for `nodes="auto"`.
"""
