"""Loading models and benches; devices, memory, locks."""
