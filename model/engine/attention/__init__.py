"""What a target's layers read and write, and checks of it."""
