"""The explorer's parts without a browser."""

import matplotlib.pyplot as plt

from plpkg.clipping import widget
from plpkg.show import theme


def test_what_it_computes_and_says():
    costs, execution = widget.compute(8, 4096, (512, 256, 128), "ghost")
    assert costs.by_execution["ghost"].flops > costs.by_execution["per_sample"].flops
    said = widget.read_out((costs, execution))
    assert said.startswith("ghost, 8 examples of 4,096 tokens, 512 → 256 → 128: peak ")
    assert f"({costs.by_execution['ghost'].flops / costs.by_execution['sgd'].flops:.2f} ×)" in said


def test_the_figure_has_words():
    _, ax = plt.subplots()
    widget.draw(widget.compute(4, 8, (512, 256, 128), "fast"), ax)
    assert "fast" in theme.alt(ax.figure)
    assert [label.get_text().replace("\n", "_") for label in ax.get_xticklabels()] == list(widget.COMPARED)
