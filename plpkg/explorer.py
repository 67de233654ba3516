"""The frame of every widget: labelled controls, a read-out in words, a figure.

A room supplies three functions, each testable without a browser: ``compute(**values)`` gives a
result, ``read_out(result)`` puts it in a sentence, ``draw(result, ax)`` draws it.

Choices are sliders, not drop-down lists: JupyterLab takes the arrow keys from a drop-down list
(they move its cell cursor), but leaves them to a slider.
"""

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
        self._image = ipywidgets.Image(
            format="png", layout={"height": "380px", "width": "auto", "object_fit": "contain"}
        )
        for control in controls.values():
            control.style.description_width = "12em"
            control.layout.width = "44em"
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
            self._image.value = theme.png(figure)
        finally:
            plt.close(figure)
        self._sentence.value = f"<p role='status' aria-live='polite'>{escape(self.text)}</p>"
        self._drawn = values

    def _repr_mimebundle_(self, **kwargs) -> dict:
        # ipywidgets cuts the text at 110 characters; it is all that a reader without a kernel sees.
        return super()._repr_mimebundle_(**kwargs) | {"text/plain": repr(self)}

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.values.items())
        return f"Explorer({values}): {self.text}"
