"""Checks of a private training: sensitivity, audits, and a zoo of bugs."""
