"""How gradients of examples are seen: hooks on layers, and the passes that collect what they report."""
