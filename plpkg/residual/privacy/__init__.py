"""What the cloud reads out of what it receives, and what helps against that."""
