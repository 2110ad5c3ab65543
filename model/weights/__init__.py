"""How weights are held and multiplied."""
