"""Where eviction is tried: tasks with nothing to download, models of two layers that solve them, and real text."""
