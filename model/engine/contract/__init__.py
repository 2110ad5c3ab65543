"""What a method must provide and may save, and the tuning of its draft sizes."""
