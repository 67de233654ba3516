"""What a private training can be held against: sensitivity, audits, and a zoo of bugs."""
