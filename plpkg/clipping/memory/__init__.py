"""The published tables of Opacus's memory, and what the executions here cost."""
