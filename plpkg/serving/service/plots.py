"""Figures of notebook 07. What takes ``rows`` takes those of a recorded section of that name."""

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType

from plpkg.serving.service.simulation import Simulation
from plpkg.show import drawing, theme

PAUSE_S = 0.2  # between two tokens, from which on a figure shades it


def service(tenants=("ann", "bob", "cem", "dee", "eva"), ax=None):
    """Where adapters are and who waits where: each step nearer holds fewer; only what has a slot is in the batch."""
    count = len(tenants)
    ax = drawing.canvas(10, count + 2, ax)
    colours = drawing.colours(count)
    places = {"store": count, "disk": count - 1, "memory": count - 2, "slots": count - 3}
    for k in range(2 * (count - 3)):
        drawing.box(ax, 8.2, 1 + 0.6 * k, 1.8, 0.5, f"{tenants[k // 2]}: next token", colours[k // 2], 9)
    for column, (place, held) in enumerate(places.items()):
        x = 2 * column
        is_last = place == "slots"
        for k in range(held):
            drawing.box(ax, x + 0.1, 1 + k, 1.1, 0.8, f"{tenants[k]}'s", colours[k], 9)
        drawing.arrow(ax, (x + 1.25, 1.4), (x + (2.15 if is_last else 2.05), 1.4))
        if not is_last:  # the way that the last one there has before it
            drawing.arrow(ax, (x + 1.25, held + 0.4), (x + 2.05, held + 0.4), dashed=True)
        drawing.note(ax, x + 0.65, 0.8, place, size=11, va="bottom")
    drawing.note(ax, 9.1, 0.8, "one batch", size=11, va="bottom")
    waits = [
        f"{tenants[-1]} waits\nfor the store",
        f"{tenants[-2]} waits\nfor the disk",
        f"{tenants[-3]} waits\nfor a slot",
    ]
    for k, text in enumerate(waits):
        drawing.note(ax, 2 * k + 0.65, count + 1, text, va="top", color=colours[-1 - k], fontweight="bold")
    held = "; ".join(f"{place}: {', '.join(tenants[:k])}" for place, k in places.items())
    said = ", ".join(text.replace("\n", " ") for text in waits)
    return theme.describe(ax, f"Whose adapters are where, {held}. {said}; the others write, in one batch.")


def timeline(result: Simulation, ax=None, slots=0):
    """A bar for each request: its adapter is fetched (a diamond when it is here), it waits, it runs.

    Below are the ``slots``, if given, each with a bar for an adapter in it.
    """
    ax = theme.axes(ax)
    rows = result.rows()
    moments = pairwise(("arrived_s", "fetched_s", "started_s", "ended_s"))
    for step, (begin, end), fill in zip(("fetching", "waiting", "running"), moments, theme.fills(3), strict=True):
        widths = [row[end] - row[begin] for row in rows]
        ax.barh(range(len(rows)), widths, left=[row[begin] for row in rows], label=step, **fill)
    waited = [y for y, row in enumerate(rows) if row["fetched_s"] > row["arrived_s"]]
    here_s = [rows[y]["fetched_s"] for y in waited]
    ax.plot(here_s, waited, "D", color="black", markeredgecolor="white", label="adapter is here")
    names = [row["adapter"] for row in rows]
    labels = [f"{name}, no. {names[: k + 1].count(name)}" for k, name in enumerate(names)]
    for k, spans in enumerate(_used(rows, slots)):
        for name, begin, end in spans:
            bar = ax.barh(len(rows) + k, end - begin, left=begin, color="0.9", ec="0.3")
            ax.bar_label(bar, [name], label_type="center")
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


def _used(rows: list[dict], slots: int) -> list[list[tuple[str, float, float]]]:
    """Each slot's adapters, from when to when, as requests that start may take them."""
    used: list[list[tuple[str, float, float]]] = [[] for _ in range(slots)]
    if not slots:
        return used
    for row in sorted(rows, key=lambda row: row["started_s"]):
        own = [spans for spans in used if spans and spans[-1][0] == row["adapter"]]
        if own:
            spans = min(own, key=len)
            _, begin, end = spans.pop()
            spans.append((row["adapter"], begin, max(end, row["ended_s"])))
        else:
            idle = [spans for spans in used if not spans or spans[-1][2] <= row["started_s"]]
            min(idle, key=len).append((row["adapter"], row["started_s"], row["ended_s"]))
    return used


def first_tokens(parts: Mapping[str, Simulation], ax=None, earlier: Mapping[str, Simulation] = MappingProxyType({})):
    """Which share of some requests has its first token by when, named; ``earlier`` ones are grey."""
    ax = theme.axes(ax)
    styles = dict(zip(parts, theme.styles(len(parts)), strict=True))

    def step(name: str, part: Simulation, label: str | None, **style) -> float:
        times = sorted(row["first_token_s"] - row["arrived_s"] for row in part.rows())
        shares = [100 * (k + 1) / len(times) for k in range(len(times))]
        ax.step(times, shares, where="post", label=label, **styles[name] | {"marker": None} | style)
        return times[-1]

    label = "the setting before"  # once, for all of them
    for name, part in earlier.items():
        step(name, part, label, color="0.7", linewidth=1.2)
        label = None
    said: list[str] = []
    for name, part in parts.items():
        longest = step(name, part, f"{name} ({len(part.rows()):,} requests)")
        said.append(f"{name}: half within {part.first_token_s():.2f} s, all in {longest:.2f} s")
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
    ax = theme.axes(ax)
    names = rows["request"].unique()
    (how,) = rows["what"].unique()
    style, other = theme.styles(2)
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
