"""The explorer's parts without a browser."""

import matplotlib.pyplot as plt

from plpkg import theme
from plpkg.clipping import widget


def test_what_it_computes_and_says():
    costs, execution = widget.compute(8, 4096, (512, 256, 128), "ghost")
    assert costs.by_execution["ghost"].flops > costs.by_execution["per_sample"].flops
    said = widget.read_out((costs, execution))
    assert said.startswith("ghost, 8 examples of 4,096 tokens, 512 → 256 → 128: peak ")
    assert f"({costs.by_execution['ghost'].flops / costs.by_execution['sgd'].flops:.2f} ×)" in said


def test_every_control_changes_words_and_picture():
    explorer = widget.explorer()
    for control in explorer.controls.values():
        words, picture = explorer.text, explorer._image.value
        values = [
            value[1] if isinstance(value, tuple) and isinstance(value[0], str) else value for value in control.options
        ]
        control.value = values[(values.index(control.value) + 1) % len(values)]
        assert explorer.text != words
        assert explorer._image.value != picture


def test_the_figure_has_words():
    _, ax = plt.subplots()
    widget.draw(widget.compute(4, 8, (512, 256, 128), "fast"), ax)
    assert "fast" in theme.alt(ax.figure)
    assert [label.get_text().replace("\n", "_") for label in ax.get_xticklabels()] == list(widget.COMPARED)
