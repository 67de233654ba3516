"""The frame of every widget: a question, labelled controls, a read-out in words, a figure.

A notebook that is read without a kernel shows its controls' values, its read-out and its figure.

A room supplies three functions, each testable without a browser: ``compute(**values)`` gives a
result, ``read_out(result)`` puts it in a sentence, ``draw(result, ax)`` draws it.

Choices are sliders, not drop-down lists: JupyterLab takes the arrow keys from a drop-down list
(they move its cell cursor), but leaves them to a slider.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import ipywidgets

from plpkg.show import theme

STYLE = """<style>
.plpkg-explorer { container-type: inline-size; width: 100%; }
.plpkg-explorer p { line-height: 1.5; margin: 0.4em 0; }
.plpkg-explorer .slider-container { margin: 0 10px; }
.plpkg-explorer .widget-readout { max-width: none; }
.plpkg-explorer img { transition: opacity 0.2s; }
.plpkg-explorer:has(.plpkg-computing) img { opacity: 0.3; }
.plpkg-earlier { animation: plpkg-hide 0s 0.2s forwards; }
.plpkg-computing { animation: plpkg-show 0s 0.2s forwards; position: absolute; top: 0; visibility: hidden; }
@keyframes plpkg-hide { to { visibility: hidden; } }
@keyframes plpkg-show { to { visibility: visible; } }
@container (max-width: 30rem) {
  .plpkg-explorer .widget-inline-hbox { flex-wrap: wrap; height: auto; }
  .plpkg-explorer .widget-label { flex: 1 0 auto; text-align: left; width: auto !important; }
  .plpkg-explorer .widget-checkbox > .widget-label { display: none; }
  .plpkg-explorer .widget-readout { text-align: right; }
  .plpkg-explorer .slider-container { flex: 1 1 90%; margin: 6px 10px 10px; order: 1; }
  .plpkg-explorer .widget-text > .widget-label { flex-basis: 100%; }
}
</style>"""
"""A narrow explorer has each label and value above its slider.

While it computes, "computing …" lies over the earlier sentence, which is hidden but keeps its height. It appears after
0.2 s: a shorter computation would only make it flicker, also for a screen reader.
"""


class Explorer(ipywidgets.VBox):
    """Controls that recompute a result, a sentence and a figure whenever one of them moves.

    Parameters
    ----------
    controls
        At most four widgets with a ``value``, by the name of the argument that they set. Their
        descriptions carry the unit.
    compute, read_out, draw
        The room's functions, as above.
    question
        The question that moving the controls answers; shown above them.

    Attributes
    ----------
    result
        The last result of ``compute``.
    text
        The sentence of ``read_out`` about it.
    """

    def __init__(
        self,
        controls: Mapping[str, Any],
        compute: Callable,
        read_out: Callable[..., str],
        draw: Callable,
        question: str = "",
    ) -> None:
        if len(controls) > 4:
            raise ValueError(f"an explorer has at most 4 controls, got {len(controls)}: {', '.join(controls)}")
        self._functions = compute, read_out, draw
        self._drawn = None
        self.controls = controls
        self.question = question
        self._sentence = ipywidgets.HTML()
        self._sentence.add_class("plpkg-read-out")
        self._image = ipywidgets.HTML()
        for control in controls.values():
            # Relative, so that label, slider and value all fit where the window is narrow.
            control.style.description_width = "min(14em, 45%)"
            control.layout.width = "98%"
            control.layout.max_width = "46em"
            if hasattr(control, "continuous_update"):
                control.continuous_update = False
        self._draw()
        self._say()
        for control in controls.values():
            control.observe(self._update, "value")
        head = ipywidgets.HTML(STYLE + self._asked())
        super().__init__([head, *controls.values(), self._sentence, self._image])
        self.add_class("plpkg-explorer")

    @property
    def values(self) -> dict:
        """The controls' values, by the name of the argument that they set."""
        return {name: control.value for name, control in self.controls.items()}

    def _asked(self) -> str:
        return f"<p><strong>{escape(self.question)}</strong></p>" if self.question else ""

    def _update(self, change) -> None:
        if self.values == self._drawn:  # one control has moved another, which drew both
            return
        # The browser has this before the result: a widget sends what is set at once, from a thread of its own.
        self._sentence.value = (
            f"<p class='plpkg-earlier' aria-hidden='true'>{escape(self.text)}</p>"
            "<p class='plpkg-computing' role='status'>computing …</p>"
        )
        try:
            self._draw()
        finally:
            self._say()

    def _say(self) -> None:
        self._sentence.value = f"<p role='status'>{escape(self.text)}</p>"

    def _draw(self) -> None:
        import matplotlib.pyplot as plt

        values = self.values
        compute, read_out, draw = self._functions
        self.result = compute(**values)
        self.text = read_out(self.result)
        figure, ax = plt.subplots()
        try:
            draw(self.result, ax)
            self._image.value = _image(figure)
        finally:
            plt.close(figure)
        self._drawn = values

    def _repr_mimebundle_(self, **kwargs) -> dict:
        # For a reader without a kernel. ipywidgets itself would cut the text at 110 characters.
        still = {"text/plain": repr(self), "text/html": self._still()}
        return super()._repr_mimebundle_(**kwargs) | still  # pyright: ignore[reportOptionalOperand] (an ipywidget always has one)

    def _still(self) -> str:
        """The widget as HTML that needs no kernel: a table of its controls' values, its sentence, its picture."""
        values = {control.description: self._shown(control) for control in self.controls.values()}
        head = "".join(f"<th>{escape(description)}</th>" for description in values)
        row = "".join(f"<td>{escape(value)}</td>" for value in values.values())
        table = f"<table><thead><tr>{head}</tr></thead><tbody><tr>{row}</tr></tbody></table>"
        return f"{self._asked()}{table}<p>{escape(self.text)}</p>{self._image.value}"

    @staticmethod
    def _shown(control: Any) -> str:
        """The text beside a control: the label of the chosen option if it has one, else the value."""
        value = control.value
        if not hasattr(control, "options"):
            return str(value)
        option = control.options[control.index]  # a value, or a pair (label, value)
        labelled = isinstance(option, tuple) and len(option) == 2 and option[1] == value
        return str(option[0] if labelled else value)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.values.items())
        return f"Explorer({values}): {self.text}"


def _image(figure) -> str:
    """A figure as an HTML image with its alternative text, which ipywidgets' own image does not take."""
    picture = f"data:image/png;base64,{b64encode(theme.png(figure)).decode()}"
    width, height = figure.get_size_inches() * figure.dpi
    # The ratio keeps the picture's place until the browser has decoded it.
    style = f"aspect-ratio: {width:g} / {height:g}; display: block; max-width: {width:g}px; width: 100%"
    return f'<img alt="{escape(theme.alt(figure))}" style="{style}" src="{picture}">'
