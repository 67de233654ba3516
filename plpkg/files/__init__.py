"""Reading and writing files: one's own checkpoints, each whole or not at all, and files of strangers."""

from typing import TYPE_CHECKING

from plpkg.imports import on_first_use

if TYPE_CHECKING:
    from plpkg.files import checkpoints, untrusted
else:
    __getattr__ = on_first_use(__name__)

__all__ = ["checkpoints", "untrusted"]
