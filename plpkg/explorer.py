"""The frame of every widget: labelled controls, a read-out in words, a figure; without a kernel the same as a page.

A room supplies three functions, each testable without a browser: ``compute(**values)`` gives a
result, ``read_out(result)`` puts it in a sentence, ``draw(result, ax)`` draws it.

Choices are sliders, not drop-down lists: JupyterLab takes the arrow keys from a drop-down list
(they move its cell cursor), but leaves them to a slider.
"""

from base64 import b64encode
from collections.abc import Callable
from html import escape

import ipywidgets

from plpkg import theme


class Explorer(ipywidgets.VBox):
    """Controls that recompute a result, a sentence and a figure whenever one of them moves.

    Parameters
    ----------
    controls
        At most four widgets with a ``value``, by the name of the argument that they set. Their
        descriptions carry the unit.
    compute, read_out, draw
        The room's functions, as above.

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
    ) -> None:
        if len(controls) > 4:
            raise ValueError(f"an explorer has at most 4 controls, got {len(controls)}: {', '.join(controls)}")
        self._functions = compute, read_out, draw
        self._drawn = None
        self.controls = controls
        self._sentence = ipywidgets.HTML()
        self._sentence.add_class("plpkg-read-out")
        # A fixed height keeps the page from jumping while the figure is redrawn.
        self._image = ipywidgets.HTML(layout={"height": "390px"})
        for control in controls.values():
            # Relative, so that label, slider and value all fit where the window is narrow.
            control.style.description_width = "min(14em, 45%)"
            control.layout.width, control.layout.max_width = "98%", "46em"
            if hasattr(control, "continuous_update"):
                control.continuous_update = False
        self._update()
        for control in controls.values():
            control.observe(self._update, "value")
        super().__init__([*controls.values(), self._sentence, self._image])
        self.add_class("plpkg-explorer")

    @property
    def values(self) -> dict:
        """What the controls say now."""
        return {name: control.value for name, control in self.controls.items()}

    def _update(self, change=None) -> None:
        import matplotlib.pyplot as plt

        values = self.values
        if values == self._drawn:  # one control has moved another, which drew both
            return
        compute, read_out, draw = self._functions
        self.result = compute(**values)
        self.text = read_out(self.result)
        figure, ax = plt.subplots()
        try:
            draw(self.result, ax)
            # ipywidgets' own image takes no alternative text.
            picture = f"data:image/png;base64,{b64encode(theme.png(figure)).decode()}"
            style = "height: 380px; max-width: 100%; object-fit: contain; object-position: left top"
            self._image.value = f'<img alt="{escape(theme.alt(figure))}" style="{style}" src="{picture}">'
        finally:
            plt.close(figure)
        self._sentence.value = f"<p role='status' aria-live='polite'>{escape(self.text)}</p>"
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
        return f"{table}<p>{escape(self.text)}</p>{self._image.value}"

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
