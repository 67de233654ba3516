"""Figures of notebook 04. The measured ones take the rows of a section of ``retention_quality``."""

import numpy as np

from plpkg import drawing, theme
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


def mechanism(ax=None):
    """A chunk comes in: a layer's attention, its retaining head, and the cut of the cache to the best units."""
    ax = drawing.canvas(12, 7.6, ax)
    kept, chunk, head = drawing.colours(3)
    drawing.lane(ax, 0, 0, 12, 2.75, "a layer reads a chunk of B tokens")
    drawing.box(ax, 0.2, 1.15, 1.7, 0.8, "chunk", chunk)
    drawing.box(ax, 3.1, 1.15, 1.7, 0.8, "q, k, v", chunk)
    drawing.box(ax, 6, 0.65, 2.9, 0.8, "retaining head", head)
    drawing.box(ax, 6, 1.7, 2.9, 0.8, "attention")
    for start, stop in (((1.9, 1.55), (3.1, 1.55)), ((4.8, 1.4), (6, 1.05)), ((4.8, 1.7), (6, 2.1))):
        drawing.arrow(ax, start, stop)
    for y, goal in ((1.05, "units' scores"), (2.1, "next layer")):
        drawing.arrow(ax, (8.9, y), (9.6, y))
        drawing.note(ax, 9.7, y, goal, 10, ha="left")
    drawing.arrow(ax, (6.5, 2.95), (6.5, 2.5))
    drawing.lane(ax, 0, 2.95, 6.9, 3.5, "b kept units, and the chunk's")
    drawing.lane(ax, 7.9, 2.95, 4.1, 3.5, "the best b")
    for row, (scores, best) in enumerate(CUT):
        y = 3.75 + 0.9 * row
        drawing.note(ax, 0.6, y + 0.35, f"head {row}", 9)
        for i, score in enumerate(scores):
            x, colour = 1.2 + 0.56 * i, kept if i < 6 else chunk
            if i in best:
                drawing.box(ax, x, y, 0.55, 0.7, str(score), colour)
            else:
                drawing.box(ax, x, y, 0.55, 0.7, colour="0.82")
                drawing.note(ax, x + 0.28, y + 0.35, str(score), 10)
        for place, i in enumerate(best):
            drawing.box(ax, 8.3 + 0.56 * place, y, 0.55, 0.7, str(scores[i]), kept if i < 6 else chunk)
    drawing.arrow(ax, (6.9, 4.55), (7.9, 4.55), "cut")
    drawing.arrow(ax, (6.5, 5.95), (6.5, 5.4))
    drawing.note(ax, 6.35, 5.95, "stabilizer: stays, whatever its score", ha="right")
    drawing.note(ax, 9.95, 5.85, "the next chunk\ncomes behind these")
    drawing.note(ax, 6, 6.78, "Numbers are scores, grey units go. Each head has its own scores and its own units.")
    drawing.note(ax, 6, 7.2, "A local tail: the prompt's last tokens run after the last cut, and stay whole.")
    after = " and ".join(str([scores[i] for i in best]) for scores, best in CUT)
    return theme.describe(
        ax,
        "A chunk gives queries, keys and values. Attention takes them, with the cache's units, to the next layer; a "
        "retaining head beside it gives each unit a score. Two heads hold six kept units and four of the chunk, with a "
        f"score each. The cut leaves six, {after}: the best, and the last one, a stabilizer, whatever its score.",
    )


CUT = (
    ((9, 4, 7, 3, 8, 5, 2, 6, 1, 3), (0, 2, 4, 5, 7, 9)),
    ((3, 9, 2, 8, 6, 5, 7, 1, 4, 1), (1, 3, 4, 5, 6, 9)),
)
"""The drawing's heads: the scores of six units and a chunk of four, and which six stay, the last of them by rule."""


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
    table = table.reindex(rows["case"].drop_duplicates()).rename(columns=int)
    return table.rename_axis(index=None, columns=None)


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
    """Accuracy by chunk size where the prompt ends with a question that is asked again: the section "asked"."""
    table = 100 * by_case(rows)
    xlabel = f"tokens of a chunk ({table.columns[-1]}: the prompt at once)"
    title = f"pairs in noise, then a question: 16 units of {table.columns[-1]}"
    ax, level = (
        _lines(table, ax, xlabel, "accuracy (%)", title, log="x"),
        100 * rows["accuracy"][rows["x"].isna()].item(),
    )
    ax.axhline(level, color="0.4", lw=1, linestyle="--")
    ax.text(ax.get_xlim()[0], level, " full cache", va="bottom", fontsize=9)
    return theme.describe(ax, f"{ax.alt_text} Dashed, the full cache: {level:.3g}.")


def lengths(rows, contracts, ax=None):
    """Accuracy by length: the section "length", and of "positions" the line where units stay where they stood."""
    table, by_contract = by_case(rows), by_case(contracts)
    table = table.reindex(columns=table.columns.union(by_contract.columns))
    table.loc["Locret, 32 units, original positions"] = by_contract.loc["original"]
    return _lines(100 * table, ax, "tokens of noise", "accuracy (%)", "a model trained on up to 128 tokens", log="x")


def text(rows, ax=None):
    """How much better or worse than chance each method goes on with a text, with 95 % intervals: the section "text"."""
    ax, rows = theme.axes(ax), rows[rows["x"].notna() & (rows["case"] != "random")]
    cases, budgets = list(rows["case"].unique()), sorted(rows["x"].unique())
    for k, (case, style) in enumerate(zip(cases, theme.styles(len(cases)), strict=True)):
        points = rows[rows["case"] == case].set_index("x").loc[budgets]
        places = [i + (k - (len(cases) - 1) / 2) / (len(cases) + 2) for i in range(len(budgets))]
        nats, half = points["over_random"], points["half_width"]
        low, middle, high = (100 * np.expm1(each) for each in (nats - half, nats, nats + half))
        around = [middle - low, high - middle]
        ax.errorbar(places, middle, yerr=around, label=case, capsize=2, **style | {"linestyle": "none"})
    ax.axhline(0, color="0.4", lw=1, linestyle="--")
    ax.set_xticks(range(len(budgets)), [f"{budget:.0f}" for budget in budgets])
    ax.grid(False, axis="x")
    ax.set(xlabel="units that each head keeps, of 384", ylabel="perplexity over that of random scores (%)")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    ax.figure.set_size_inches(8.6, 4.2)
    apart = rows[rows["over_random"].abs() > rows["half_width"]]
    told = "; ".join(
        f"{e.case} with {e.x:.0f} units ({100 * np.expm1(e.over_random):.1f} %)" for e in apart.itertuples()
    )
    said = "Perplexity after a cut over that of random scores, with 95 % intervals"
    return theme.describe(ax, f"{said}. Apart from 0: {told or 'none'}.")


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
    ax.set(xlabel="position", ylabel="attention logit", title="layer 0, KV head 0, one prompt")
    ax.legend()
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
    return theme.describe(ax, f"{ylabel[0].upper()}{ylabel[1:]} against {xlabel}: {said}.")
