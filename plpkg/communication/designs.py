"""Seven designs of a private assistant for one person's notes: who has what, and what four onlookers can know.

The things that reach an onlooker are facts of the design; conclusions follow from them by rules, as in
:mod:`plpkg.communication.onlookers`. Results of attacks on the adapter's file are *measured, recorded*
(``benchmarks/assistant.py``): plpkg-small learnt half of the notes of three invented persons and of the diary's writer,
and the attacks told these notes from the other half.
"""

import math
import textwrap
from dataclasses import dataclass

from plpkg import catalog
from plpkg.communication.onlookers import follows
from plpkg.show import drawing, theme
from plpkg.validation import one_of

TRAINING = "the cloud while you learn"
LATER = "the cloud that answers"
FILE = "who gets the file"
ASKING = "who may ask it"
ATTACKS = ("difference", "ratio", "end", "start")
WITH_SHADOWS = ("LiRA, difference", "LiRA, end", "RMIA")
ONLOOKERS = (TRAINING, LATER, FILE, ASKING)


@dataclass(frozen=True)
class Design:
    """The things that a design keeps on either side, and those that cross.

    Attributes
    ----------
    home, cloud
        The things on your side, and those in a cloud; no cloud is "".
    up, down
        The things that cross.
    received
        The things that each onlooker receives; an onlooker who is missing receives nothing.
    recorded
        The name of its rows in ``assistant.csv``; "" where nothing is learnt.
    """

    home: str
    cloud: str
    up: str
    down: str
    received: dict[str, tuple[str, ...]]
    recorded: str = ""


BY_HEART = "answers by heart"
NOISY = "adapter with noise"
LEARNT = "a guess at which notes it has learnt"


def _served(recorded: str, file: str, answers: str) -> Design:
    """An adapter that was learnt at home, and is served beside a model in a cloud."""
    received = {LATER: ("questions", answers, file), FILE: (file, answers), ASKING: (answers,)}
    return Design("notes,\nlearning", "a model,\nyour adapter", f"{file}, questions", "answers", received, recorded)


CROSSING = ("embeddings", "A x", "M A x")
FOUND = ("notes that fit the question",)
DESIGNS = {
    "search, at home": Design("notes, search,\nmodel", "", "", "", {ASKING: FOUND}),
    "search, answered in a cloud": Design(
        "notes, search", "a model", "question, one note", "answer", {LATER: ("prompts", "answers"), ASKING: FOUND}
    ),
    "adapter, served": _served("device", "adapter", BY_HEART),
    "small adapter, served": _served("device, small", "adapter", "answers"),
    "small adapter, ε = 7": _served("device, ε=7", NOISY, "answers"),
    "small adapter, ε = 1": _served("device, ε=1", NOISY, "answers"),
    "M, over the wire": Design(
        "notes, M,\nembedding, head",
        "the layers",
        "embeddings, M A x",
        "A x, hidden states",
        {TRAINING: CROSSING, LATER: (*CROSSING, "last hidden states"), ASKING: (BY_HEART,)},
        "wire",
    ),
}
RULES = (
    (frozenset({"embeddings"}), "your words"),
    (frozenset({"prompts"}), "the question and the note in it"),
    (frozenset({"last hidden states"}), "the answer's words"),
    (frozenset({"A x", "M A x"}), "M, after a few dozen words"),
    (frozenset({"M, after a few dozen words"}), LEARNT),
    (frozenset({"adapter"}), LEARNT),
    (frozenset({NOISY}), f"{LEARNT}, at most as good as ε allows"),
    (frozenset({BY_HEART}), "the cards, for who knows their wording, and the notes below them"),
)


@dataclass(frozen=True)
class Attack:
    """An attack on a design's file: how well it tells learnt notes from others, in the mean of the persons.

    ``auc`` has a 95 % interval ``low`` to ``high``. Of the learnt ``notes``, ``found`` have a higher score than every
    note that was not learnt; with random scores it would be ``by_chance``.
    """

    name: str
    auc: float
    low: float
    high: float
    found: int
    notes: int
    by_chance: float


@dataclass(frozen=True)
class Attacks:
    """All attacks on a design's file, the worst first.

    ``bound`` is the highest mean AUC that ε allows, 1 without ε. ``shadows`` is the best AUC for one person's notes of
    an attacker who has trained eight adapters to compare with, and ``without_shadows`` the best of ``attacks`` for the
    same person; both are None if no shadows were tried.
    """

    attacks: tuple[Attack, ...]
    bound: float
    shadows: float | None
    without_shadows: float | None


@dataclass(frozen=True)
class View:
    """The things that an onlooker of a design receives, what follows from them, and what was measured.

    ``counts`` are learnt cards that are answered, and notes that come out word for word behind their card.
    """

    design: str
    onlooker: str
    received: tuple[str, ...]
    conclusions: tuple[str, ...]
    attacks: Attacks | None
    counts: dict[str, str]


def attacks(recorded: str, model: str = "plpkg-small") -> Attacks:
    """The results of the attacks on the file of a recorded design, in the mean of the persons.

    Parameters
    ----------
    recorded
        The design's name in ``assistant.csv``.
    model
        ``plpkg-small``, or ``smollm2``, which one person's notes were learnt with.

    Raises
    ------
    ValueError
        There are no such rows.
    """
    measured = catalog.measured("assistant")
    measured = measured[measured["model"] == model]
    attacked = measured[measured["attack"].isin(ATTACKS)]
    one_of("recorded", recorded, tuple(attacked["design"].unique()))
    of_design = attacked[attacked["design"] == recorded]
    found = [_attack(str(name), persons) for name, persons in of_design.groupby("attack")]
    worst_first = tuple(sorted(found, key=lambda each: -each.auc))
    bounds = _asked(recorded, model)["bound"].dropna()
    bound = float(bounds.iloc[0]) if len(bounds) else 1.0
    with_shadows = measured[(measured["design"] == recorded) & measured["attack"].isin(WITH_SHADOWS)]
    if with_shadows.empty:
        return Attacks(worst_first, bound, None, None)
    same_person = of_design[of_design["person"].isin(with_shadows["person"])]
    return Attacks(worst_first, bound, float(with_shadows["auc"].max()), float(same_person["auc"].max()))


def _attack(name: str, persons) -> Attack:
    """An attack from its recorded rows, one for each person."""
    auc = float(persons["auc"].mean())
    error = math.sqrt(float((persons["se"] ** 2).sum())) / len(persons)  # persons are independent
    learnt = persons["found_of"]
    # As many notes were held out as were learnt: of n learnt notes, n/(n+1) on average rank before all held-out ones.
    by_chance = float((learnt / (learnt + 1)).sum())
    return Attack(
        name=name,
        auc=auc,
        low=max(0.0, auc - 1.96 * error),
        high=min(1.0, auc + 1.96 * error),
        found=int(persons["found"].sum()),
        notes=int(learnt.sum()),
        by_chance=by_chance,
    )


def _asked(recorded: str, model: str):
    """The recorded rows about the questions that a design's adapter was asked, one for each person."""
    rows = catalog.measured("assistant")
    return rows[(rows["model"] == model) & (rows["design"] == recorded) & rows["card"].notna()]


def compute(design: str, onlooker: str) -> View:
    """An onlooker's view of a design; ValueError if the design or the onlooker is unknown."""
    chosen = DESIGNS[one_of("design", design, tuple(DESIGNS))]
    one_of("onlooker", onlooker, ONLOOKERS)
    received = chosen.received.get(onlooker, ())
    conclusions = tuple(sorted(follows(received, RULES).difference(received)))
    tried = None
    counts = {}
    if chosen.recorded and received:
        asked = _asked(chosen.recorded, "plpkg-small").sum(numeric_only=True)
        for kind in ("card", "came_out"):
            counts[kind] = f"{asked[kind]:.0f} of {asked[f'{kind}_of']:.0f}"
        if any(each.startswith(LEARNT) for each in conclusions):
            tried = attacks(chosen.recorded)
    return View(design, onlooker, received, conclusions, tried, counts)


def read_out(view: View) -> str:
    """The view in words."""
    if not view.received:
        return f"{view.design}: {view.onlooker} receives nothing."
    said = f"{view.design}: {view.onlooker} receives {', '.join(view.received)}"
    if view.conclusions:
        said += f"; from this follows: {', '.join(view.conclusions)}"
    if view.counts:
        said += (
            f". Recorded: it answers {view.counts['card']} learnt cards, and behind a card it writes "
            f"{view.counts['came_out']} notes word for word"
        )
    if view.attacks:
        worst = view.attacks.attacks[0]
        said += (
            f". Of a learnt note and another, the best attack picks the learnt one in {100 * worst.auc:.0f} % "
            f"({100 * worst.low:.0f} to {100 * worst.high:.0f}); for certain it finds {worst.found} of {worst.notes} "
            f"(by chance {worst.by_chance:.0f})"
        )
        shadows, without = view.attacks.shadows, view.attacks.without_shadows
        if shadows is not None and without is not None:
            said += (
                f". With eight adapters to compare with, for one person: {100 * shadows:.0f} %, and "
                f"{100 * without:.0f} without them"
            )
        if view.attacks.bound < 1:
            said += f". In the mean of trainings ε allows at most {100 * view.attacks.bound:.0f} %"
    return said + "."


def draw(view: View, ax=None):
    """Draw where everything is in a design, what crosses, and where the onlooker stands."""
    design = DESIGNS[view.design]
    ax = drawing.canvas(12, 4.4, ax)
    yours, others, watching = drawing.colours(3)
    drawing.lane(ax, 0.2, 0.2, 4.0, 4.0, "at home")
    drawing.lane(ax, 7.8, 0.2, 4.0, 4.0, "in a cloud")
    drawing.box(ax, 0.5, 1.4, 3.4, 1.6, design.home, yours)
    if design.cloud:
        drawing.box(ax, 8.1, 1.4, 3.4, 1.6, design.cloud, others)
        drawing.arrow(ax, (3.9, 1.8), (8.1, 1.8), design.up)
        drawing.arrow(ax, (8.1, 2.6), (3.9, 2.6), design.down, above=False)
    else:
        drawing.note(ax, 9.8, 2.2, "nothing")
    places = {TRAINING: (9.8, 3.6), LATER: (9.8, 3.6), FILE: (6.0, 0.7), ASKING: (6.0, 3.7)}
    x, y = places[view.onlooker]
    sees = "sees nothing"
    colour = "0.5"
    if view.received:
        sees = f"sees: {', '.join(view.received)}"
        colour = watching
    sign = dict(boxstyle="round", facecolor=colour, edgecolor="white")
    text = f"{view.onlooker}\n{textwrap.fill(sees, 30)}"
    drawing.note(ax, x, y, text, 8.5, color="white", bbox=sign, zorder=6)
    home = " ".join(design.home.split())  # the boxes' texts have line breaks
    cloud = " ".join(design.cloud.split()) or "nothing"
    return theme.describe(
        ax,
        f"At home: {home}. In a cloud: {cloud}. "
        f"Up: {design.up or 'nothing'}; down: {design.down or 'nothing'}. {read_out(view)}",
    )


def worst(ax=None):
    """For each design whose file leaves home, the AUC of the best attack that was tried, and the AUC that ε allows."""
    served = {name: design.recorded for name, design in DESIGNS.items() if FILE in design.received}
    found = {name: attacks(recorded) for name, recorded in served.items()}
    ax = theme.axes(ax, figsize=(7.2, 1.0 + 0.45 * len(found)))
    colour, allowed = drawing.colours(2)
    bar = dict(color=allowed, markersize=18, markeredgewidth=3, linestyle="none")
    said = []
    for place, (name, tried) in enumerate(found.items()):
        best = tried.attacks[0]
        ax.plot([best.low, best.high], [place, place], color=colour, linewidth=2)
        ax.plot(best.auc, place, "o", color=colour, label="best attack without shadows, 95 % interval")
        said.append(f"{name}: {best.auc:.2f} ({best.low:.2f} to {best.high:.2f})")
        if tried.bound < 1:
            ax.plot(tried.bound, place, "|", label="most that ε allows, in the mean", **bar)
            said[-1] += f", allowed {tried.bound:.2f}"
    ax.axvline(0.5, linestyle="--", color="gray")
    ax.set(yticks=range(len(found)), yticklabels=list(found), ylim=(len(found) - 0.5, -0.5), xlim=(0.4, 1.03))
    ax.set_xlabel("AUC of membership (0.5: guessing; ← better for the owner)")
    handles, labels = ax.get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))
    ax.legend(shown.values(), shown.keys(), loc="upper left")
    return theme.describe(ax, f"What the best attack tells of who was learnt, by design. {'; '.join(said)}.")


def explorer():
    """Sliders for design and onlooker."""
    import ipywidgets

    from plpkg.show.explorer import Explorer

    controls = {
        "design": ipywidgets.SelectionSlider(description="design", options=list(DESIGNS), value="adapter, served"),
        "onlooker": ipywidgets.SelectionSlider(description="onlooker", options=ONLOOKERS, value=FILE),
    }
    question = "Which designs give a note to nobody but those whom you let ask? And what do they answer?"
    return Explorer(controls, compute, read_out, draw, question)
