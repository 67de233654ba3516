"""Figures of notebook 04. The measured ones take the rows of a section of ``retention_quality``."""

import numpy as np

from plpkg.recorded import half_width
from plpkg.retention.trials.tasks import FIRST_KEY, FIRST_VALUE
from plpkg.show import drawing, theme

METHODS = ("Locret", "SnapKV", "H2O", "oracle", "SirLLM", "sink + recent", "key norm", "random")
STYLES: dict[str, dict] = dict(zip(METHODS, theme.styles(len(METHODS)), strict=True))
STYLES["full"] = {"color": "0", "linestyle": "-", "marker": "x"}
"""One style for a method in every figure: a case has that of the method in its name, or else the full cache's."""

FOUND = "values found (%), better →"  # the label is turned: its arrow points up

VARIANTS = ({}, {"linestyle": "--", "markerfacecolor": "white"}, {"linestyle": ":", "fillstyle": "left"})
"""Styles that tell a method's second and third line in one figure from its first."""

LOOKUPS = {
    "asked first, Locret, protected": "Locret, first, protected",
    "asked first, Locret": "Locret, first",
    "asked last, Locret": "Locret, last",
    "asked last, random": "random, last",
    "asked first, random, protected": "random, first, protected",
}
"""The cases of the section "lookup" that are drawn, and their names in the figure, from the best to the worst."""

SPACES = {
    "O(n²): whole prompt": "full cache, whole prompt: O(n²)",
    "O(B·n): chunks of 64": "full cache, chunks of 64: O(B·n)",
    "O(n/c): chunks, 2 bit": "full cache, chunks of 64, 2 bit: O(B·n + n/c)",
    "O(1): chunks, 128 units": "sink + recent, chunks of 64, 128 units: O(1)",
}
"""The cases of the section "space", and their names in the legend."""


def styles(cases) -> dict[str, dict]:
    """The line style of each case: its method's, and a variant of it where the figure has several of one method."""
    found = {}
    seen = []  # the method of each case so far
    for case in cases:
        method = next((name for name in STYLES if name in case), "full")
        found[case] = STYLES[method] | VARIANTS[seen.count(method)]
        seen.append(method)
    return found


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
    drawing.lane(ax, 0, 2.95, 6.9, 3.5, "b kept units | the chunk's")
    drawing.lane(ax, 7.9, 2.95, 4.1, 3.5, "the best b")
    for row, (scores, best) in enumerate(CUT):
        y = 3.75 + 0.9 * row
        drawing.note(ax, 0.65, y + 0.35, f"KV head {row}", 9)
        for i, score in enumerate(scores):
            colour = kept if i < 6 else chunk
            gap = 0 if i < 6 else 0.3  # between the kept units and the chunk's
            x = 1.3 + gap + 0.52 * i
            if i in best:
                drawing.box(ax, x, y, 0.51, 0.7, str(score), colour)
            else:
                drawing.box(ax, x, y, 0.51, 0.7, colour="0.82")
                drawing.note(ax, x + 0.26, y + 0.35, str(score), 10)
        for place, i in enumerate(best):
            drawing.box(ax, 8.3 + 0.56 * place, y, 0.55, 0.7, str(scores[i]), kept if i < 6 else chunk)
    ax.plot([4.56, 4.56], [3.65, 5.45], color="0.25", lw=1.2, linestyle="--")
    drawing.arrow(ax, (6.9, 4.55), (7.9, 4.55), "cut")
    drawing.arrow(ax, (6.53, 5.95), (6.53, 5.4))
    drawing.note(ax, 6.38, 5.95, "stabilizer: stays, whatever its score", ha="right")
    drawing.note(ax, 9.95, 5.85, "the next chunk\ncomes behind these")
    drawing.note(ax, 6, 6.78, "Numbers are scores, grey units go. Each KV head has its own scores and units.")
    drawing.note(ax, 6, 7.2, "A local tail: the prompt's last tokens run after the last cut, and are not cut.")
    after = " and ".join(str([scores[i] for i in best]) for scores, best in CUT)
    return theme.describe(
        ax,
        "A chunk gives queries, keys and values. Attention takes them, with the cache's units, to the next layer; a "
        "retaining head beside it gives each unit a score. Two KV heads hold six kept units and four of a chunk, each "
        f"with a score. The cut leaves six, {after}: the best, and the last one, a stabilizer, whatever its score.",
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
    table = table.reindex(rows["case"].drop_duplicates()).rename(columns=round)
    return table.rename_axis(index=None, columns=None)


def space(rows, ax=None):
    """The peak of live memory while a prompt is read, by class of method: the section "space"."""
    table = by_case(rows, "live_kib").rename(index=SPACES) / 1024
    title = "4 layers of width 128, eager attention"
    return _lines(table, ax, "tokens of the prompt", "peak without the weights (MiB), ← better", title, log="xy")


def budget(rows, ax=None):
    """Accuracy by budget and scorer, with 95 % intervals over models: the section "budget"."""
    ax = theme.axes(ax, figsize=(8, 4.6))
    shares = 100 * rows.dropna(subset="x").groupby(["case", "x"], sort=False)["of_full"].agg(["mean", half_width])
    cases = styles(shares.index.unique("case"))
    ax.axhline(100, color=STYLES["full"]["color"], lw=1, zorder=1)
    ax.text(shares.index.unique("x").max(), 101, "full cache", ha="right", va="bottom", fontsize=10)
    for case, style in cases.items():
        points = shares.loc[case]
        if case == "oracle":  # another line lies on it, and its name stands there
            look = dict(lw=7, alpha=0.4, zorder=0, label="_oracle")
            ax.text(points.index[0], 102, "oracle: the wide, pale line", va="bottom", fontsize=10)
        else:
            look = dict(capsize=2, label=case)
        ax.errorbar(points.index, points["mean"], yerr=points["half_width"], **style | look)
    _powers_of_two(ax, sorted(shares.index.unique("x")))
    ax.set(
        xlabel="units that each KV head keeps, of 129",
        ylabel="values found\n(% of the full cache's), better →",
        ylim=(0, 107),
    )
    ax.set_title("128 prompts, chunks of 32; bars: 95 % over five models")
    theme.name_lines(ax)
    with_16 = shares["mean"].xs(16, level="x")
    said = "; ".join(f"{case} {value:.0f} %" for case, value in with_16.items())
    return theme.describe(ax, f"Accuracy against budget for {len(cases)} scorers. With 16 units: {said}.")


def asked(rows, ax=None):
    """Accuracy by chunk size where the prompt ends with a question that is asked again: the section "asked"."""
    table = 100 * by_case(rows)
    xlabel = f"tokens of a chunk ({table.columns[-1]}: the prompt at once)"
    title = f"pairs in noise, then a question: 16 units of {table.columns[-1]}"
    ax = _lines(table, ax, xlabel, FOUND, title, log="x")
    level = 100 * rows["accuracy"][rows["x"].isna()].item()
    ax.axhline(level, color=STYLES["full"]["color"], lw=1, zorder=1)
    ax.text(table.columns[1], level, "full cache", ha="center", va="top", fontsize=9)
    ax.set_ylim(0, 100)
    return theme.describe(ax, f"{ax.alt_text} A line across, the full cache: {level:.3g}.")


def lengths(rows, contracts, ax=None):
    """Accuracy by length: the section "length", and of "positions" the line where units stay where they stood."""
    table = by_case(rows)
    by_contract = by_case(contracts)
    table = table.reindex(columns=table.columns.union(by_contract.columns))
    table = table.drop(index="Locret, 16 units", errors="ignore")  # lies on the line of 32 units
    table.loc["Locret, where they stood"] = by_contract.loc["original"]
    title = "a model trained on up to 128 tokens; its full cache was run up to 4,096"
    return _lines(100 * table, ax, "tokens of noise in the prompt", FOUND, title, log="x", names=theme.name_lines)


def answers(rows, column: str = "right", ax=None):
    """Right answers by method and by the share of the units that is kept, at one length: ``retention_smollm2``.

    Parameters
    ----------
    rows
        With ``case``, ``share`` (of how many units one is kept) and ``column``, and its 95 % interval,
        ``…_half_width``.
    column
        The column with the share of right answers.
    """
    ax = theme.axes(ax, figsize=(8, 3.6))
    full = 100 * rows.loc[rows["share"] == 1, column].mean()
    cut = rows[rows["share"] > 1].sort_values(column, ascending=False)
    cases = list(cut["case"].drop_duplicates())
    said = []
    for offset, marker, (share, some) in zip((0.15, -0.15), "os", cut.groupby("share"), strict=False):
        heights = [len(cases) - 1 - cases.index(case) + offset for case in some["case"]]
        colours = [style["color"] for style in styles(some["case"]).values()]
        shares = 100 * some[column]
        bars = 100 * some[f"{column}_half_width"]
        for height, each, bar, colour in zip(heights, shares, bars, colours, strict=True):
            ax.errorbar(each, height, xerr=bar, fmt=marker, color=colour, capsize=2)
        ax.plot([], [], marker, color="0.3", label=f"one of {share:.0f} units kept")
        named = "; ".join(f"{case} {each:.0f} %" for case, each in zip(some["case"], shares, strict=True))
        said.append(f"one of {share:.0f} units: {named}")
    ax.axvline(full, color=STYLES["full"]["color"], lw=1, linestyle="--", label="full cache")
    ax.set(yticks=range(len(cases)), yticklabels=reversed(cases), xlim=(-3, 103))
    ax.set_xlabel("right answers (%), better →; bars: 95 % over ten texts")
    ax.legend(loc="lower right", bbox_to_anchor=(0.95, 0.02), fontsize=9)  # the best stand above, on the right
    return theme.describe(ax, f"Right answers by method. Full cache: {full:.0f} %; {'; '.join(said)}.")


def speed(rows, ax=None):
    """Tokens per second by length, full attention and Locret: the section "speed"."""
    names = {"full attention": "full attention, whole prompt", "Locret": "Locret, chunks of 512"}
    table = by_case(rows, "tokens_per_s").rename(index=names)
    title = "12 layers × 768, 2,048 units, one thread; from 8,192 on one run each"
    ax = _lines(table, ax, "tokens of the prompt", "tokens read per CPU second, better →", title, log="x")
    ax.set_ylim(bottom=0)
    return ax


def lookup(rows, b_of_k=None, ax=None):
    """Accuracy by budget, for the question after the text and before it: the section "lookup".

    ``b_of_k`` gives for a number of units the share found without the question if all KV heads keep the same facts.
    """
    table = 100 * by_case(rows).loc[list(LOOKUPS)].rename(index=LOOKUPS)
    ax = theme.axes(ax, figsize=(8, 4.6))
    xlabel = "units that each KV head keeps, of 33 or 35"
    title = "16 pairs, one asked for: last, or first"
    ax = _lines(table, ax, xlabel, FOUND, title, names=_name_lookups)
    ax.set_ylim(0, 105)
    if b_of_k:
        bound = [100 * b_of_k(units) for units in table.columns]
        ax.plot(table.columns, bound, color="0.55", lw=3, alpha=0.6, zorder=0)
        ax.text(16.3, 99, "b/k, and a guess", color="0.3", va="top", fontsize=10)
        shares = ", ".join(f"{share:.0f}" for share in bound)
        ax.alt_text += f" If all KV heads keep the same facts, without the question: {shares} %."
    return ax


def _name_lookups(ax) -> None:
    """Write each line's name beside one of its points, where the lines stand apart."""
    above = dict(ha="right", va="bottom", xytext=(-4, 4))
    below = dict(ha="left", va="top", xytext=(4, -4))
    points = {"random, last": 3, "random, first, protected": 3}
    for line in ax.lines:
        name = line.get_label()
        point = points.get(name, 2)
        x, height = line.get_xydata()[: point + 1][-1]  # the last one, if there are fewer
        side = above if name.startswith("Locret") else below
        if name == "random, last":  # along its line, as another runs close below it
            side = side | dict(rotation=20, rotation_mode="anchor", xytext=(10, -4))
        colour = "0.3" if name.startswith("random") else line.get_color()
        ax.annotate(name, (x, height), textcoords="offset points", color=colour, fontsize=10, **side)


def labels_and_scores(labels, predicted, ids, ax=None):
    """The worth of one head's units: the label, and the retaining head's prediction.

    Parameters
    ----------
    labels, predicted
        ``(seq,)`` each.
    ids
        ``(seq,)`` tokens; values that follow a key are marked.
    """
    ax = theme.axes(ax)
    ids = np.asarray(ids)
    labels = np.asarray(labels)
    predicted = np.asarray(predicted)
    keys = (ids >= FIRST_KEY) & (ids < FIRST_VALUE)
    values = np.roll(keys, 1)  # a value stands behind its key
    label_colour = STYLES["oracle"]["color"]
    ax.plot(labels, label="label", color=label_colour, lw=1)
    ax.plot(predicted, label="predicted", color=STYLES["Locret"]["color"], linestyle="--", lw=1)
    ax.plot(np.flatnonzero(values), labels[values], "o", color=label_colour, mfc="none", label="value of a pair")
    ax.set(
        xlabel="position in the prompt (tokens)",
        ylabel="attention logit, looked at more →",
        title="layer 0, KV head 0, one prompt",
    )
    ax.legend()
    gap = labels[values].mean() - labels[~values].mean()
    return theme.describe(
        ax,
        f"Labels and predictions over {len(ids)} positions: the labels of the {values.sum()} values of pairs are "
        f"{gap:.1f} above the others on average.",
    )


def kept(log, layer: int = 0, head: int = 0, row: int = 0, marked=(), ax=None):
    """The units that one head held after each chunk.

    Parameters
    ----------
    log
        The log of :func:`plpkg.retention.chunked_prefill`, with positions.
    layer, head, row
        The numbers of the layer, of the KV head, and of the row in the batch.
    marked
        Positions to mark in grey.
    """
    if any(step.kept is None for step in log):
        raise ValueError("this log has no positions: read with chunked_prefill(…, log_positions=True)")
    ax = theme.axes(ax)
    for position in marked:
        ax.axvspan(int(position) - 0.5, int(position) + 0.5, color="0.85")
    colour = STYLES["Locret"]["color"]
    for number, step in enumerate(log, start=1):
        ax.hlines(number, 0, step.stop - 1, color="0.6", lw=0.8, zorder=0.5)
        ax.plot(step.kept[layer, row, head], np.full(step.after, number), "s", ms=3, color=colour)
    ax.set(
        xlabel="position in the prompt (tokens; grey: values, line: read so far)",
        ylabel="after chunk number",
        ylim=(len(log) + 0.6, 0.4),
    )
    ax.set_title(f"layer {layer}, KV head {head}")
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


def _legend_below(ax, columns: int) -> None:
    ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=columns)


def _lines(table, ax, xlabel: str, ylabel: str, title: str = "", log: str = "", names=None):
    ax = theme.axes(ax)
    for case, style in styles(table.index).items():
        points = table.loc[case].dropna()
        ax.plot(points.index, points.values, label=case, **style)
    if "x" in log:
        _powers_of_two(ax, table.columns)
    if "y" in log:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:,g}")
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    if names:
        names(ax)
    elif len(table) > 4:
        _legend_below(ax, 3)
    else:
        ax.legend()
    said = "; ".join(
        f"{case} from {row.dropna().iloc[0]:.3g} to {row.dropna().iloc[-1]:.3g}" for case, row in table.iterrows()
    )
    return theme.describe(ax, f"{ylabel[0].upper()}{ylabel[1:]} against {xlabel}: {said}.")
