"""How many workers each pool should have: from token-level signals, both pools at once."""
