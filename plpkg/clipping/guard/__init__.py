"""Whether a model mixes examples: tried before a pass, in it, and by repeating it with other examples."""
