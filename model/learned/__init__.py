"""Methods with weights of their own: a draft model, Medusa's heads, EAGLE's head; their files and published trees.

From outside: the class of each method's file, `medusa` and `eagle_head` to train heads. May import `decoding`.
"""
