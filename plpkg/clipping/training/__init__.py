"""Private training with the loop that you had: sampling, noise, accounting."""
