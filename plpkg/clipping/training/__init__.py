"""Private training: samples, steps, noise, accounting."""
