"""Figures and lessons: the theme of all figures, drawings, explorers with sliders, exercises that check an answer.

Nothing that computes imports this package; matplotlib and ipywidgets are loaded on first use.
"""

from typing import TYPE_CHECKING

from plpkg.imports import on_first_use

if TYPE_CHECKING:
    from plpkg.show import drawing, exercise, explorer, theme
    from plpkg.show.exercise import check_function, check_number, compare
    from plpkg.show.explorer import Explorer
else:
    __getattr__ = on_first_use(__name__)

__all__ = ["Explorer", "check_function", "check_number", "compare", "drawing", "exercise", "explorer", "theme"]
