"""Loading models and benches; devices, memory, locks.

Other folders may use all modules. This folder may import `records`.
"""
