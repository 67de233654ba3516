"""Figures of notebook 04. The measured ones take the rows of a section of ``retention_quality``."""

import numpy as np

from plpkg import theme
from plpkg.recorded import half_width
from plpkg.retention.tasks import FIRST_KEY, FIRST_VALUE

LOOKUPS = {
    "asked last, Locret": "asked last: Locret",
    "asked last, random": "asked last: random",
    "asked first, Locret": "asked first: Locret",
    "asked first, Locret, protected": "asked first, question protected: Locret",
    "asked first, random, protected": "asked first, question protected: random",
    "asked last, oracle": "asked last: an oracle that knows the question",
}
"""The cases of the section "lookup" that are drawn, and what the legend calls them."""


def by_case(rows, value: str = "accuracy"):
    """A section as a table.

    Parameters
    ----------
    rows
        With ``case``, ``x`` and ``value``; without ``x`` (a full cache) they are left out.
    value
        The column in the cells.

    Returns
    -------
    pandas.DataFrame
        A row a case, in the order in which they were measured, and a column for each ``x``.
    """
    rows = rows.dropna(subset="x")
    table = rows.pivot(index="case", columns="x", values=value)
    return table.reindex(rows["case"].drop_duplicates()).rename(columns=int)


def space(rows, ax=None):
    """The peak of live memory while a prompt is read, by class of method: the section "space"."""
    table, title = by_case(rows, "live_kib") / 1024, "4 layers of width 128, eager attention"
    return _lines(table, ax, "tokens of the prompt", "peak beside the weights (MiB)", title, log="xy")


def budget(rows, ax=None):
    """Accuracy by budget and scorer, with 95 % intervals over models: the section "budget"."""
    ax = theme.axes(ax)
    shares = 100 * rows.dropna(subset="x").groupby(["case", "x"], sort=False)["of_full"].agg(["mean", half_width])
    cases = list(shares.index.unique("case"))
    for case, style in zip(cases, theme.styles(len(cases)), strict=True):
        points = shares.loc[case]
        ax.errorbar(points.index, points["mean"], yerr=points["half_width"], label=case, capsize=2, **style)
    _powers_of_two(ax, sorted(shares.index.unique("x")))
    ax.set(xlabel="units that each head keeps, of 129", ylabel="% of the full cache's accuracy", ylim=(0, 108))
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    with_16 = shares["mean"].xs(16, level="x")
    said = "; ".join(f"{case} {value:.0f} %" for case, value in with_16.items())
    return theme.describe(ax, f"Accuracy against budget for {len(cases)} scorers. With 16 units: {said}.")


def asked(rows, ax=None):
    """Accuracy by chunk size where the prompt ends with the question: the section "asked"."""
    xlabel = "tokens of a chunk (35: the prompt at once)"
    return _lines(100 * by_case(rows), ax, xlabel, "accuracy (%)", "lookup, 8 units of 35", log="x")


def positions(rows, ax=None):
    """Accuracy by length under either contract: the section "positions"."""
    return _lines(100 * by_case(rows), ax, "tokens of noise", "accuracy (%)", "Locret, 32 units", log="x")


def lengths(rows, ax=None):
    """Accuracy by length and scorer: the section "length"."""
    return _lines(100 * by_case(rows), ax, "tokens of noise", "accuracy (%)", "trained on up to 128 tokens", log="x")


def text(rows, ax=None):
    """Perplexity of a continuation by budget and scorer, above the full cache's: the section "text, no tail"."""
    table, title = by_case(rows, "perplexity"), "plpkg-small, no local tail"
    ax = _lines(table, ax, "units that each head keeps, of 384", "perplexity of what follows", title, log="x")
    full = rows.set_index("case").loc["full cache", "perplexity"]
    ax.axhline(full, color="0.4", lw=1, linestyle="--")
    ax.text(table.columns[0], full, "full cache", va="bottom", fontsize=9)
    return ax


def speed(rows, ax=None):
    """Tokens per second by length, full attention and Locret: the section "speed"."""
    table, title = by_case(rows, "tokens_per_s"), "12 layers × 768, 2,048 units, one thread"
    return _lines(table, ax, "tokens of the prompt", "tokens per CPU second", title, log="x")


def lookup(rows, ax=None):
    """Accuracy by budget, for the question after the text and before it: the section "lookup"."""
    table, xlabel = (
        100 * by_case(rows).loc[list(LOOKUPS)].rename(index=LOOKUPS),
        "units that each head keeps, of 33 or 35",
    )
    return _lines(table, ax, xlabel, "accuracy (%)", "16 pairs, one asked for")


def labels_and_scores(labels, predicted, ids, ax=None):
    """What one head's units are worth: the label, and what the retaining head predicts.

    Parameters
    ----------
    labels, predicted
        ``(seq,)`` each.
    ids
        ``(seq,)`` tokens; values that follow a key are marked.
    """
    ax = theme.axes(ax)
    ids, labels, predicted = (np.asarray(x) for x in (ids, labels, predicted))
    keys = (ids >= FIRST_KEY) & (ids < FIRST_VALUE)
    values = np.roll(keys, 1)
    styles = theme.styles(2)
    for name, shown, style in (("label", labels, styles[0]), ("predicted", predicted, styles[1])):
        ax.plot(shown, label=name, color=style["color"], linestyle=style["linestyle"], lw=1)
    ax.plot(np.flatnonzero(values), labels[values], "o", color=styles[0]["color"], mfc="none", label="value of a pair")
    ax.set(xlabel="position", ylabel="attention logit")
    ax.legend(loc="upper right")
    gap = labels[values].mean() - labels[~values].mean()
    return theme.describe(
        ax,
        f"Labels and predictions over {len(ids)} positions: the labels of the {values.sum()} values of pairs are "
        f"{gap:.1f} above the others on average.",
    )


def kept(log, layer: int = 0, head: int = 0, row: int = 0, marked=(), ax=None):
    """Which units one head held after each chunk.

    Parameters
    ----------
    log
        The log of :func:`plpkg.retention.chunked_prefill`, with positions.
    layer, head, row
        Which; ``row`` of the batch.
    marked
        Positions to mark with a line.
    """
    if any(step.kept is None for step in log):
        raise ValueError("this log has no positions: read with chunked_prefill(…, log_positions=True)")
    ax = theme.axes(ax)
    for position in marked:
        ax.axvline(int(position), color="0.6", lw=0.8, zorder=0.5)
    colour = theme.styles(1)[0]["color"]
    for number, step in enumerate(log, start=1):
        ax.barh(number, step.stop, left=0, height=0.9, color="0.92", zorder=0.2)
        ax.plot(step.kept[layer, row, head], np.full(step.after, number), "s", ms=3, color=colour)
    ax.set(xlabel="position in the text (grey: read so far)", ylabel="after chunk", ylim=(len(log) + 0.6, 0.4))
    ax.set_title(f"layer {layer}, head {head}")
    ax.set_yticks(range(1, len(log) + 1))
    ax.grid(False)
    last = sorted(int(p) for p in log[-1].kept[layer, row, head])
    return theme.describe(
        ax, f"The units that head {head} of layer {layer} held after each of {len(log)} chunks; at the end {last}."
    )


def _powers_of_two(ax, values) -> None:
    """A logarithmic axis with the measured values themselves as ticks, in plain digits."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(values), [f"{value:,.0f}" for value in values])
    ax.minorticks_off()


def _lines(table, ax, xlabel: str, ylabel: str, title: str = "", log: str = ""):
    ax = theme.axes(ax)
    for (case, row), style in zip(table.iterrows(), theme.styles(len(table)), strict=True):
        points = row.dropna()
        ax.plot(points.index, points.values, label=case, **style)
    if "x" in log:
        _powers_of_two(ax, table.columns)
    if "y" in log:
        ax.set_yscale("log")
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    if len(table) > 4:
        ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        ax.figure.set_size_inches(8.6, 4.2)
    else:
        ax.legend()
    said = "; ".join(
        f"{case} from {row.dropna().iloc[0]:.3g} to {row.dropna().iloc[-1]:.3g}" for case, row in table.iterrows()
    )
    return theme.describe(ax, f"{ylabel.capitalize()} against {xlabel}: {said}.")
