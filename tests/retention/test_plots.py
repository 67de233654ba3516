"""Figures show the recorded numbers, and say so in words."""

import matplotlib.pyplot as plt
import pytest
import torch

from plpkg import theme
from plpkg.retention import chunked_prefill, plots, recorded, scorers, tasks, tiny

LINES = {
    plots.space: lambda: recorded.by_case("space", "live_kib") / 1024,
    plots.chunks: lambda: 100 * recorded.by_case("chunk"),
    plots.asked: lambda: 100 * recorded.by_case("asked"),
    plots.positions: lambda: 100 * recorded.by_case("positions"),
    plots.lengths: lambda: 100 * recorded.by_case("length"),
    plots.text: lambda: recorded.by_case("text, no tail", "perplexity"),
    plots.speed: lambda: recorded.by_case("speed", "tokens_per_s"),
}


@pytest.mark.parametrize("plot", LINES, ids=lambda plot: plot.__name__)
def test_lines_are_the_recorded_rows(plot):
    ax = plot()
    table = LINES[plot]()
    drawn = {line.get_label(): line for line in ax.lines}
    for case, row in table.iterrows():
        assert list(drawn[case].get_xdata()) == list(row.dropna().index)
        assert list(drawn[case].get_ydata()) == pytest.approx(list(row.dropna()))
    assert len(theme.alt(ax.figure)) > 40
    assert plot(ax) is ax


def test_budget_has_intervals():
    ax = plots.budget()
    table = recorded.budget()
    lines = [container.lines[0] for container in ax.containers]
    assert len(lines) == table["case"].nunique()
    own = table[table["case"] == "Locret"]
    assert list(lines[0].get_ydata()) == pytest.approx(list(100 * own["mean"]))
    assert "Locret 101 %" in theme.alt(ax.figure) or "Locret 100 %" in theme.alt(ax.figure)


def test_lookup_shows_its_cases():
    ax = plots.lookup()
    line = next(line for line in ax.lines if line.get_label() == "asked first, question protected: Locret")
    assert list(line.get_ydata()) == pytest.approx(
        list(100 * recorded.by_case("lookup").loc["asked first, Locret, protected"])
    )


def test_labels_and_scores_marks_the_values():
    ids = torch.tensor([tasks.BOS, 40, tasks.FIRST_KEY, 50, 60])
    ax = plots.labels_and_scores(torch.arange(5.0), torch.zeros(5), ids)
    assert ax.lines[2].get_xdata().tolist() == [3]
    assert "1 values" in theme.alt(ax.figure)


def test_kept_shows_each_chunks_units():
    model, ids = tiny.untrained(), tiny.packed(torch.arange(20)[None])
    log = chunked_prefill(model, ids, scorers.SinkRecent(), 6, 5).log
    ax = plots.kept(log, layer=1, head=1)
    assert [list(line.get_xdata()) for line in ax.lines] == [
        [0, 1, 2, 3, 4], [0, 1, 2, 3, 8, 9], [0, 1, 2, 3, 13, 14], [0, 1, 2, 3, 18, 19],
    ]  # fmt: skip
    assert "at the end [0, 1, 2, 3, 18, 19]" in theme.alt(ax.figure)
    marked = plots.kept(log, marked=[3, 8])
    assert [list(line.get_xdata()) for line in marked.lines[:2]] == [[3, 3], [8, 8]]
    plt.close("all")
