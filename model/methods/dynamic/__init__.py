"""Dynamic trees, our extension of Token Recycling."""
