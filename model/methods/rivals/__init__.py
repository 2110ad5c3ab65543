"""Training-free methods by other authors."""
