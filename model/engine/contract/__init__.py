"""What a method must provide, and the tuning of its drafts' size."""
