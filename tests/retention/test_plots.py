"""Figures show the rows that they are given, and say so in words."""

import pandas as pd
import pytest
import torch

from plpkg.retention import chunked_prefill, plots, scorers, tasks, tiny
from plpkg.retention.eviction import keep_indices
from plpkg.show import theme

ROWS = pd.DataFrame(
    [dict(case="full cache", value=3.0)]
    + [dict(case=case, x=x, value=x / 8 + i) for i, case in enumerate(("zero", "one")) for x in (16, 64)]
)
LINES = [
    (plots.space, "live_kib", 1 / 1024),
    (plots.asked, "accuracy", 100),
    (plots.speed, "tokens_per_s", 1),
]


@pytest.mark.parametrize(("plot", "column", "factor"), LINES, ids=lambda value: getattr(value, "__name__", None))
def test_lines_are_the_rows(plot, column, factor):
    rows = ROWS.rename(columns={"value": column})
    ax = plot(rows)
    drawn = {line.get_label(): line for line in ax.lines}
    for i, case in enumerate(("zero", "one")):
        assert list(drawn[case].get_xdata()) == [16, 64]
        assert list(drawn[case].get_ydata()) == pytest.approx([factor * (2 + i), factor * (8 + i)])
    assert len(theme.alt(ax.figure)) > 40
    assert plot(rows, ax) is ax


def test_a_method_looks_the_same_in_every_figure():
    looks = plots.styles(["full cache", "Locret, 16 units", "Locret, 32 units", "H2O, a quarter recent"])
    assert looks["Locret, 16 units"] == plots.styles(["random", "Locret"])["Locret"] == plots.STYLES["Locret"]
    assert looks["Locret, 32 units"]["color"] == looks["Locret, 16 units"]["color"]
    assert looks["Locret, 32 units"] != looks["Locret, 16 units"]
    assert looks["H2O, a quarter recent"] == plots.STYLES["H2O"]
    assert looks["full cache"] == plots.styles(["full attention"])["full attention"] == plots.STYLES["full"]


def test_lengths_have_the_line_of_original_positions():
    rows = ROWS.rename(columns={"value": "accuracy"})
    contracts = pd.DataFrame([dict(case=c, x=x, accuracy=x / 64) for c in ("reassigned", "original") for x in (16, 32)])
    lines = plots.lengths(rows, contracts).lines
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}
    assert list(drawn) == ["zero", "one", "Locret, where they stood"]
    assert drawn["Locret, where they stood"] == ([16, 32], [25, 50])
    assert drawn["one"][0] == [16, 64]


def test_the_mechanism_cuts_by_the_scores_that_it_shows():
    for scores, best in plots.CUT:
        kept = keep_indices(torch.tensor(scores, dtype=torch.float)[None, None], 6, stabilizers=1)
        assert kept.flatten().tolist() == list(best)
    ax = plots.mechanism()
    assert {"KV head 0", "KV head 1", "retaining head"} <= {text.get_text() for text in ax.texts}
    assert "a stabilizer, whatever its score" in theme.alt(ax.figure)


def test_a_table_keeps_the_order_of_its_cases():
    table = plots.by_case(ROWS, "value")
    assert list(table.index) == ["zero", "one"]
    assert table.loc["one"].to_dict() == {16: 3.0, 64: 9.0}


def test_right_answers_stand_by_method_with_intervals():
    rows = [dict(case="full cache", share=1, right=0.9, right_half_width=0.0)]
    rows += [
        dict(case=case, share=share, right=right / share, right_half_width=0.05)
        for case, right in (("Locret", 3.2), ("random", 1.6)) for share in (4, 16)
    ]  # fmt: skip
    ax = plots.answers(pd.DataFrame(rows))
    points = {container.lines[0].get_xydata()[0].round(2).tolist()[0] for container in ax.containers}
    assert points == {80.0, 40.0, 20.0, 10.0}
    assert [label.get_text() for label in ax.get_yticklabels()] == ["random", "Locret"]
    bar = ax.containers[0].lines[2][0].get_segments()[0]
    assert bar[:, 0].tolist() == pytest.approx([75, 85])
    assert "Full cache: 90 %; one of 4 units: Locret 80 %; random 40 %" in theme.alt(ax.figure)
    assert plots.answers(pd.DataFrame(rows), ax=ax) is ax


def test_budget_has_the_intervals_of_its_models():
    shares = {"Locret": [1.0, 1.0, 1.0], "H2O": [0.4, 0.5, 0.6]}
    rows = pd.DataFrame([dict(case=c, x=x, of_full=share) for c, s in shares.items() for share in s for x in (8, 16)])
    ax = plots.budget(rows)
    line, _, (bars,) = ax.containers[1].lines
    assert list(line.get_ydata()) == pytest.approx([50, 50])
    low, high = bars.get_segments()[0][:, 1]
    assert (high - low) / 2 == pytest.approx(4.303 * 10 / 3**0.5, rel=1e-3)  # Student's t of two degrees of freedom
    assert "With 16 units: Locret 100 %; H2O 50 %" in theme.alt(ax.figure)


def test_lookup_shows_its_cases():
    rows = pd.DataFrame([dict(case=case, x=8, accuracy=i / 8) for i, case in enumerate(plots.LOOKUPS)])
    drawn = {line.get_label(): list(line.get_ydata()) for line in plots.lookup(rows).lines}
    assert drawn["Locret, first"] == [12.5]
    assert list(plots.lookup(rows, lambda units: units / 16).lines[-1].get_ydata()) == [50]


def test_labels_and_scores_marks_the_values():
    ids = torch.tensor([tasks.BOS, 40, tasks.FIRST_KEY, 50, 60])
    ax = plots.labels_and_scores(torch.arange(5.0), torch.zeros(5), ids)
    assert ax.lines[2].get_xdata().tolist() == [3]
    assert "1 values" in theme.alt(ax.figure)


def test_kept_shows_each_chunks_units():
    model, ids = tiny.untrained(), tiny.packed(torch.arange(20)[None])
    log = chunked_prefill(model, ids, scorers.SinkRecent(), 6, 5, log_positions=True).log
    ax = plots.kept(log, layer=1, head=1)
    assert [list(line.get_xdata()) for line in ax.lines] == [
        [0, 1, 2, 3, 4], [0, 1, 2, 3, 8, 9], [0, 1, 2, 3, 13, 14], [0, 1, 2, 3, 18, 19],
    ]  # fmt: skip
    assert "at the end [0, 1, 2, 3, 18, 19]" in theme.alt(ax.figure)
    marked = plots.kept(log, marked=[3, 8])
    assert [patch.get_x() for patch in marked.patches] == [2.5, 7.5]
    log = chunked_prefill(model, ids, scorers.SinkRecent(), 6, 5).log
    with pytest.raises(ValueError, match=r"this log has no positions: read with .* log_positions=True"):
        plots.kept(log)
