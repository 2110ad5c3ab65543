"""Methods with trained draft heads or a draft model."""
