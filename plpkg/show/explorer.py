"""The frame of every widget: a question, labelled controls, a read-out in words, a figure; without a kernel a page.

A room supplies three functions, each testable without a browser: ``compute(**values)`` gives a
result, ``read_out(result)`` puts it in a sentence, ``draw(result, ax)`` draws it.

Choices are sliders, not drop-down lists: JupyterLab takes the arrow keys from a drop-down list
(they move its cell cursor), but leaves them to a slider.
"""

from base64 import b64encode
from collections.abc import Callable
from html import escape

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
"""A narrow explorer has each label and value above its slider. The sign that it computes takes the place of the earlier
sentence, which keeps its height. It waits for 0.2 s: what takes less would only flicker, also for a screen reader."""


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
        What moving the controls answers; shown above them.

    Attributes
    ----------
    result
        What ``compute`` gave last.
    text
        What ``read_out`` said of it.
    """

    def __init__(
        self,
        controls: dict[str, ipywidgets.Widget],
        compute: Callable,
        read_out: Callable[[object], str],
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
            control.layout.width, control.layout.max_width = "98%", "46em"
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
        """What the controls say now."""
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
            # ipywidgets' own image takes no alternative text. The ratio keeps the picture's place until it is decoded.
            picture = f"data:image/png;base64,{b64encode(theme.png(figure)).decode()}"
            width, height = figure.get_size_inches() * figure.dpi
            style = f"aspect-ratio: {width:g} / {height:g}; display: block; max-width: {width:g}px; width: 100%"
            self._image.value = f'<img alt="{escape(theme.alt(figure))}" style="{style}" src="{picture}">'
        finally:
            plt.close(figure)
        self._drawn = values

    def _repr_mimebundle_(self, **kwargs) -> dict:
        # What a reader without a kernel sees; ipywidgets itself would cut the text at 110 characters.
        still = {"text/plain": repr(self), "text/html": self._still()}
        return super()._repr_mimebundle_(**kwargs) | still

    def _still(self) -> str:
        """The page's stand-in for the widget: where its controls are, what it says, its picture."""
        positions = {control.description: self._shown(control) for control in self.controls.values()}
        head, row = (
            "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
            for tag, texts in (("th", positions), ("td", positions.values()))
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody><tr>{row}</tr></tbody></table>"
        return f"{self._asked()}{table}<p>{escape(self.text)}</p>{self._image.value}"

    @staticmethod
    def _shown(control: ipywidgets.Widget) -> str:
        """What a control shows beside it: its option's label where it has one, or its value."""
        value = control.value
        option = control.options[control.index] if hasattr(control, "options") else value
        labelled = isinstance(option, tuple) and len(option) == 2 and option[1] == value
        return str(option[0] if labelled else value)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.values.items())
        return f"Explorer({values}): {self.text}"
