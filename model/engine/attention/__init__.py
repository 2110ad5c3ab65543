"""What a target's layers read and write: cache, masks, kernels, and checks of both."""
