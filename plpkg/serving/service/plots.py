"""Figures of notebook 07. What takes ``rows`` takes those of a recorded section of that name."""

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType

from plpkg import drawing, theme
from plpkg.serving.service.simulation import Simulation

PAUSE_S = 0.2  # between two tokens, from which on a figure shades it


def service(tenants=("ann", "bob", "cem", "dee", "eva"), ax=None):
    """Where adapters are and who waits where: each step nearer holds fewer; only what has a slot is in the batch."""
    count = len(tenants)
    ax, colours = drawing.canvas(10, count + 2, ax), drawing.colours(count)
    places = {"store": count, "disk": count - 1, "memory": count - 2, "slots": count - 3}
    for k in range(2 * (count - 3)):
        drawing.box(ax, 8.2, 1 + 0.6 * k, 1.8, 0.5, f"{tenants[k // 2]}: next token", colours[k // 2], 9)
    for x, held in enumerate(places.values()):
        for k in range(held):
            drawing.box(ax, 2 * x + 0.1, 1 + k, 1.1, 0.8, f"{tenants[k]}'s", colours[k], 9)
        drawing.arrow(ax, (2 * x + 1.25, 1.4), (2 * x + (2.05 if x < 3 else 2.15), 1.4))
        if x < 3:  # the way that the last one there has before it
            drawing.arrow(ax, (2 * x + 1.25, held + 0.4), (2 * x + 2.05, held + 0.4), dashed=True)
    for x, place in enumerate((*places, "one batch")):
        drawing.note(ax, 2 * x + (0.65 if x < 4 else 1.1), 0.8, place, size=11, va="bottom")
    waits = [f"{tenants[k]} waits\nfor {what}" for k, what in ((-1, "the store"), (-2, "the disk"), (-3, "a slot"))]
    for k, text in enumerate(waits):
        drawing.note(ax, 2 * k + 0.65, count + 1, text, va="top", color=colours[-1 - k], fontweight="bold")
    held = "; ".join(f"{place}: {', '.join(tenants[:k])}" for place, k in places.items())
    said = ", ".join(text.replace("\n", " ") for text in waits)
    return theme.describe(ax, f"Whose adapters are where, {held}. {said}; the others write, in one batch.")


def timeline(result: Simulation, ax=None, slots=0):
    """A bar for each request: its adapter is fetched (a diamond when it is here), it waits, it runs.

    Below are the ``slots``, if given, each with a bar for an adapter in it.
    """
    ax, rows = theme.axes(ax), result.rows()
    moments = pairwise(("arrived_s", "fetched_s", "started_s", "ended_s"))
    for step, (begin, end), fill in zip(("fetching", "waiting", "running"), moments, theme.fills(3), strict=True):
        widths = [row[end] - row[begin] for row in rows]
        ax.barh(range(len(rows)), widths, left=[row[begin] for row in rows], label=step, **fill)
    come = [(row["fetched_s"], y) for y, row in enumerate(rows) if row["fetched_s"] > row["arrived_s"]]
    ax.plot(
        [x for x, _ in come], [y for _, y in come], "D", color="black", markeredgecolor="white", label="adapter is here"
    )
    names = [row["adapter"] for row in rows]
    labels = [f"{name}, no. {names[: k + 1].count(name)}" for k, name in enumerate(names)]
    used = [[] for _ in range(slots)]  # of each slot: its adapters, from when to when
    for row in sorted(rows if slots else [], key=lambda row: row["started_s"]):
        own = [spans for spans in used if spans and spans[-1][0] == row["adapter"]]
        idle = [spans for spans in used if not spans or spans[-1][2] <= row["started_s"]]
        spans = min(own or idle, key=len)
        _, begin, end = spans.pop() if own else (None, row["started_s"], 0)
        spans.append((row["adapter"], begin, max(end, row["ended_s"])))
    for k, spans in enumerate(used):
        for name, begin, end in spans:
            ax.bar_label(
                ax.barh(len(rows) + k, end - begin, left=begin, color="0.9", ec="0.3"), [name], label_type="center"
            )
    labels += [f"slot {k + 1}" for k in range(slots)]
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set(xlabel="time (s, simulated)", ylabel="request for the adapter of")
    ax.legend()
    said = "; ".join(
        "{adapter} from {arrived_s:.1f}, runs {started_s:.1f} to {ended_s:.1f}".format(**row) for row in rows
    )
    return theme.describe(ax, f"When each of {len(rows)} requests waits and runs (s): {said}.")


def first_tokens(parts: Mapping[str, Simulation], ax=None, earlier: Mapping[str, Simulation] = MappingProxyType({})):
    """Which share of some requests has its first token by when, named; ``earlier`` ones are grey."""
    ax, said = theme.axes(ax), []
    styles = dict(zip(parts, theme.styles(len(parts)), strict=True))
    for some, grey in ((earlier, {"color": "0.7", "linewidth": 1.2}), (parts, {})):
        for name, part in some.items():
            times = sorted(row["first_token_s"] - row["arrived_s"] for row in part.rows())
            shares = [100 * (k + 1) / len(times) for k in range(len(times))]
            label = "the setting before" if grey and name == next(iter(earlier)) else None
            label = label if grey else f"{name} ({len(times):,} requests)"
            ax.step(times, shares, where="post", label=label, **styles[name] | {"marker": None} | grey)
            said += [] if grey else [f"{name}: half within {part.first_token_s():.2f} s, all in {times[-1]:.2f} s"]
    ax.set(xlabel="← better    time to the first token (s, simulated)", ylabel="of the requests (%)", ylim=(0, 102))
    ax.set_xscale("log")
    ax.set_xlim(0.02, 100)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    return theme.describe(ax, f"Time to the first token; {'; '.join(said)}.")


def hit_rates(rows, ax=None, best: Mapping[int, float] = MappingProxyType({})):
    """How many find their adapter in a slot, by slots; ``best`` are the shares of the best fixed choice, by slots."""
    ax = _by_slots(rows, 100 * rows["hit_rate"], "in a slot (% of requests)    better →", ax)
    if best:
        ax.lines[0].set_label("least recently used")
        shares = [100 * share for share in best.values()]
        ax.plot(list(best), shares, "--", color="black", label="best fixed choice (computed)")
        ax.legend(loc="upper left")
    ax.set(ylim=(0, 100))
    values = zip(rows["slots"], rows["hit_rate"], strict=True)
    said = "; ".join(f"{slots} slots: {100 * hit:.0f} %" for slots, hit in values)
    return theme.describe(ax, f"Requests with their adapter in a slot: {said}.")


def slowest(rows, ax=None, marked: Mapping[int, str] = MappingProxyType({})):
    """How long the slowest hundredth waits for a first token, by slots; a line for each number of slots ``marked``."""
    ax = _by_slots(rows, rows["first_token_p99_s"], "first token, p99 (s, log scale)\n← better", ax)
    for slots, label in marked.items():
        ax.axvline(slots, color="0.6", linestyle=":", zorder=0)
        ax.text(slots, 0.98, label, transform=ax.get_xaxis_transform(), rotation=90, ha="right", va="top")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    said = "; ".join(f"{k} slots: {p99:.2f} s" for k, p99 in zip(rows["slots"], rows["first_token_p99_s"], strict=True))
    return theme.describe(ax, f"99th percentile of the time to the first token: {said}.")


def _by_slots(rows, values, label, ax):
    ax = theme.axes(ax)
    ax.plot(rows["slots"], values, **theme.styles(1)[0])
    ax.set_xscale("log", base=2)
    ax.set_xticks(rows["slots"], rows["slots"])
    ax.set(xlabel="slots (simulated)", ylabel=label)
    return ax


def cold_start(rows, ax=None):
    """When the tokens of each request came; a circle where a newcomer did, grey where the first request pauses."""
    ax, names = theme.axes(ax), rows["request"].unique()
    (how,), (style, other) = rows["what"].unique(), theme.styles(2)
    for y, name in enumerate(names):
        times = rows["token_s"][rows["request"] == name]
        if name.startswith("cold"):
            ax.plot(times[:1], [y], **other | {"marker": "o", "linestyle": "", "label": "a newcomer's coming"})
            times = times[1:]
        ax.plot(times, [y] * len(times), **style | {"marker": "|", "linestyle": "", "label": "a token"})
    first = rows["token_s"][rows["request"] == names[0]].tolist()
    for begin, end in pairwise(first):
        if end - begin > PAUSE_S:
            ax.axvspan(begin, end, color="0.85", zorder=0, label="a pause of everybody")
    ax.set_yticks(
        range(len(names)),
        [f"newcomer {y}" if name.startswith("cold") else "one of the six" for y, name in enumerate(names)],
    )
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set(xlabel="time (s)", title=how)
    ax.label_outer()
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    ax.legend(unique.values(), unique, loc="center left", bbox_to_anchor=(1, 0.5))
    gap = 1e3 * max(end - begin for begin, end in pairwise(first))
    return theme.describe(ax, f"When tokens came, {how}: the first request's longest pause is {gap:.0f} ms.")
