"""Trials of eviction: tasks with nothing to download, models of two layers that solve them, and real text."""
