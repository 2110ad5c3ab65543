"""How weights are held and multiplied; knows nothing of decoding."""
