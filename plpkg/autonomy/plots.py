"""Figures of notebook 08. What takes ``rows`` takes those of a recorded section of that name."""

from collections.abc import Mapping, Sequence

import torch

from plpkg.autonomy.online import OnlineLearner
from plpkg.autonomy.personal import Transfer
from plpkg.results import shown
from plpkg.show import drawing, theme
from plpkg.validation import number


def devices(people: Sequence[str] = ("ann", "bob", "cem"), ax=None):
    """Who holds what: one public model comes down to all devices; data, labels and what is learnt stay on each."""
    ax = drawing.canvas(9, len(people) + 0.6, ax)
    public, *own = drawing.colours(len(people) + 1)
    top = len(people)  # each device is 1 high
    middle = top / 2
    drawing.box(ax, 0, middle - 1, 2.3, 2, "cloud\n\npublic data\npre-training\npruning\ncompiling", public)
    for k, (name, colour) in enumerate(zip(people, own, strict=True)):
        text = f"{name}'s device: {name}'s data and labels,\nfrozen body, {name}'s own head"
        drawing.box(ax, 4.4, k + 0.08, 4.5, 0.84, text, colour)
        drawing.arrow(ax, (2.35, middle), (4.35, k + 0.5))
    drawing.note(ax, 3.3, 0, "the same model\nfor everybody", va="top")
    drawing.arrow(ax, (6.65, top - 0.06), (6.65, top + 0.28))
    drawing.note(ax, 6.65, top + 0.32, "suggestions: whoever sees the screen", va="top")
    drawing.arrow(ax, (4.35, top - 0.15), (2.35, middle + 0.8), dashed=True)
    crossing = (top + middle + 0.65) / 2
    ax.plot(3.35, crossing, "x", color="black", markersize=16, markeredgewidth=3, zorder=6)
    drawing.note(ax, 3.35, top + 0.1, "nothing goes back", size=11, va="top", fontweight="bold")
    said = f"A cloud sends one public model, pruned and compiled, to the devices of {', '.join(people)}."
    said += " Each keeps data, labels and a head of its own; the arrow back is crossed out."
    return theme.describe(ax, f"{said} A small arrow: who sees the screen sees suggestions.")


def pictures(images: Mapping[str, torch.Tensor], ax=None):
    """Images ``(height, width)`` beside each other, each under its name, each from its least to its largest value."""
    ax = theme.axes(ax, figsize=(7.2, 0.5 + 7.2 / len(images)))
    for k, image in enumerate(images.values()):
        image = image.numpy()
        low = image.min()
        high = image.max()
        darkness = (image - low) / (high - low)
        left = 1.1 * k
        ax.imshow(1 - darkness, cmap="gray", extent=(left, left + 1, 0, 1), vmin=0, vmax=1)
    ax.set_xticks([1.1 * k + 0.5 for k in range(len(images))], images)
    ax.set(xlim=(-0.05, 1.1 * len(images)), ylim=(-0.02, 1.02), yticks=[])
    ax.grid(False)
    ax.spines[:].set_visible(False)
    return theme.describe(ax, f"Images beside each other: {', '.join(images)}.")


def learning(transfers: Mapping[str, Transfer], ax=None):
    """The loss on a person's own validation data, step by step; a ring where learning should have stopped."""
    ax = theme.axes(ax)
    said = []
    for (name, transfer), style in zip(transfers.items(), theme.styles(len(transfers)), strict=True):
        steps = [row["step"] for row in transfer.log]
        losses = [row["loss"] for row in transfer.log]
        best = losses.index(min(losses))
        ax.plot(steps, losses, label=name, markersize=4, **style)
        ax.plot(steps[best], losses[best], "o", markersize=12, fillstyle="none", color=style["color"])
        said.append(
            f"{name} from {losses[0]:.2f} to {losses[best]:.2f} at step {steps[best]}, {losses[-1]:.2f} at last"
        )
    ax.set(xlabel="steps of the night", ylabel="validation loss (nats a word), ← better")
    ax.legend()
    return theme.describe(ax, f"Loss on the person's validation text: {'; '.join(said)}.")


def schemes(rows, value: str, label: str, ax=None, low: float | None = None):
    """The mean of each scheme with its 95 % interval; ``rows`` have case, ``value`` and half_width.

    The axis begins at ``low``; a mean below it is written there.
    """
    ax = theme.axes(ax)
    places = range(len(rows))
    ax.errorbar(rows[value], places, xerr=rows["half_width"], fmt="o", capsize=4, color=theme.styles(1)[0]["color"])
    ax.axvline(0, color="0.4", linestyle="--")
    ax.set_yticks(places, rows["case"])
    ax.invert_yaxis()
    ax.set(xlabel=label)
    if low is not None:
        ax.set_xlim(left=low)
        for place, mean in enumerate(rows[value]):
            if mean < low:
                ax.text(
                    low, place, f" ← {mean:.2f}", va="center", bbox=dict(facecolor="white", edgecolor="none", pad=1)
                )
    said = "; ".join(f"{r['case']} {r[value]:.2f} ± {r['half_width']:.2f}" for _, r in rows.iterrows())
    return theme.describe(ax, f"{label}: {said}.")


def few(rows, label: str, ax=None):
    """The mean gain by how many examples a person has, a line for each way to learn; small dots are the writers'."""
    ax = theme.axes(ax)
    said = []
    means = rows.pivot_table(index="examples", columns="case", values="gain")
    for case, style in zip(means, theme.styles(len(means.columns)), strict=True):
        ax.plot(means.index, means[case], label=case, **style)
        own = rows[rows["case"] == case]
        of_line = {"color": style["color"], "marker": style["marker"]}
        ax.scatter(own["examples"], own["gain"], s=12, alpha=0.6, **of_line)
        said.append(f"{case}: " + ", ".join(f"{gain:.2f} from {count:,}" for count, gain in means[case].items()))
    ax.axhline(0, color="0.4", linewidth=1)
    ax.set_xscale("log")
    ax.set_xticks(means.index, [f"{count:,}" for count in means.index])
    ax.minorticks_off()
    ax.set(xlabel="words that a person has; small marks: each writer", ylabel=label)
    ax.legend()
    return theme.describe(ax, f"{label}; {'; '.join(said)}.")


def stream(learners: Mapping[str, OnlineLearner], ax=None):
    """Along a stream, how many errors fewer than the public model's; a cross where a guard's allowance is spent."""
    ax = theme.axes(ax)
    said = []
    for (name, learner), style in zip(learners.items(), theme.styles(len(learners)), strict=True):
        saved = [0]
        for row in learner.rows():
            saved.append(saved[-1] + row["shown"] - row["public"])
        ax.plot(saved, label=name, **style | {"marker": None})
        if learner.allowance is not None and -learner.allowance in saved:
            spent_at = saved.index(-learner.allowance)
            ax.scatter(spent_at, -learner.allowance, marker="X", s=90, color="black", zorder=5)
        said.append(f"{name}: {saved[-1]} at the end, {min(saved)} at the worst")
    ax.axhline(0, color="0.4", linewidth=1)
    ax.set(xlabel="labels (words) so far", ylabel="errors fewer than public, better →")
    ax.legend()
    return theme.describe(ax, f"Errors fewer than the public model's: {'; '.join(said)}.")


def pareto(rows, ax=None):
    """Accuracy by the share of multiplications that is left; each seed a point."""
    ax = theme.axes(ax)
    by_case = rows.groupby("case", sort=False)
    for (case, group), style in zip(by_case, theme.styles(len(by_case)), strict=True):
        points = style | {"linestyle": "", "markerfacecolor": "none"}
        ax.plot(100 * group["macs_share"], 100 * group["accuracy"], label=case, **points)
    ax.set(xlabel="multiplications left (%), ← cheaper", ylabel="accuracy (%), better →")
    ax.legend()
    means = by_case[["macs_share", "accuracy"]].mean()
    said = "; ".join(
        f"{case} {100 * r.macs_share:.0f} % of the work, {100 * r.accuracy:.2f} %" for case, r in means.iterrows()
    )
    return theme.describe(ax, f"Accuracy by work left, means: {said}.")


def joules(cycles: float, ghz: float, static_watts: float, watts_at_1ghz: float = 0.5) -> float:
    """A model of a processor's energy, E(f) = (P_static + c f³) cycles / f, not a measurement.

    Power that switches grows with the cube of the frequency f (voltage grows with it), and ``watts_at_1ghz`` is c;
    static power flows as long as the work takes.
    """
    ghz = number("ghz", ghz, open_low=True)
    watts = number("static_watts", static_watts) + watts_at_1ghz * ghz**3
    seconds = cycles / (1e9 * ghz)
    return watts * seconds


def plans(rows: Sequence[Mapping], ax=None):
    """How long each way to learn works, and what it spends; ``rows`` have learning, minutes, days and joules."""
    ax = theme.axes(ax)
    for k, (row, fill) in enumerate(zip(rows, theme.fills(len(rows)), strict=True)):
        ax.barh(k, row["minutes"], **fill)
        taken = f" {shown(row['minutes'])} minutes in {shown(row['days'])} days, {shown(row['joules'] / 1e3)} kJ"
        ax.text(row["minutes"], k, taken, va="center")
    ax.set_yticks(range(len(rows)), [row["learning"] for row in rows])
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    longest = max(row["minutes"] for row in rows)
    ax.set(xlabel="minutes of one core to a personal model (computed), ← better", xlim=(0, 1.9 * longest))
    said = "; ".join(f"{row['learning']}: {row['minutes']:.3g} minutes, {row['joules'] / 1e3:.3g} kJ" for row in rows)
    return theme.describe(ax, f"Minutes of work to a personal model and energy, computed: {said}.")
