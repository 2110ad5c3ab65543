"""What a run writes and how it is read."""
