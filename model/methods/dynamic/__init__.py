"""Dynamic trees from counts of what followed, our extension of Token Recycling."""
