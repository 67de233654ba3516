"""Figures and lessons: the theme of all figures, drawings, explorers with sliders, exercises that check an answer.

Nothing that computes imports this package; matplotlib and ipywidgets are loaded on first use.
"""

from plpkg.imports import on_first_use

__all__ = ["Explorer", "check_function", "check_number", "compare", "drawing", "exercise", "explorer", "theme"]

__getattr__ = on_first_use(
    __name__,
    Explorer="explorer",
    check_function="exercise",
    check_number="exercise",
    compare="exercise",
    drawing="drawing",
    exercise="exercise",
    explorer="explorer",
    theme="theme",
)
