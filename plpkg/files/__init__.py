"""Reading and writing files: one's own checkpoints, each whole or not at all, and files of strangers."""

from plpkg.imports import on_first_use

__all__ = ["checkpoints", "untrusted"]

__getattr__ = on_first_use(__name__, checkpoints="checkpoints", untrusted="untrusted")
