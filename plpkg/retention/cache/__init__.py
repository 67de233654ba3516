"""The cache that evicts: its layers, how their units are stored or rounded, and positions that move with them."""
