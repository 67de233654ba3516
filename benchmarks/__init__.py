"""This project beside its peers, in one run, as ratios. Each script says how it is run, and what it takes."""
