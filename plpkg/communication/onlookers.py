"""Onlookers: the things that each of five systems hands to each of four onlookers, and what follows from them.

Whatever an onlooker can compute counts as seen (:func:`follows`): the nearest row of a public table is the word
(notebook 02), and pairs of A x and M A x are equations for M. These are facts of the systems, not measurements; there
may be attacks that are not listed.
"""

from collections.abc import Collection
from dataclasses import dataclass

from plpkg.show import drawing, theme
from plpkg.validation import one_of

CLOUD = "the cloud that computes"
LATER = "who gets the trained weights later"
CUSTOMER = "another customer of the service"
WIRE = "someone on the wire"
ONLOOKERS = (CLOUD, LATER, CUSTOMER, WIRE)

RECEIVED: dict[str, dict[str, tuple[str, ...]]] = {
    "PrivateLoRA": {
        CLOUD: ("embeddings", "A x", "M A x", "last hidden states"),
        WIRE: ("sizes and times",),
    },
    "Locret": {},
    "Ghost clipping": {LATER: ("weights with noise",)},
    "Multi-tenant LoRA": {
        CLOUD: ("prompts", "answers", "adapter"),
        CUSTOMER: ("how long they wait",),
        WIRE: ("sizes and times",),
    },
    "AutLearn": {},
}
"""The things that leave your side, by system and onlooker.

Ghost clipping is meant to train on a machine of yours; nothing of Locret's or AutLearn's has to leave it.
"""

RULES: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"embeddings"}), "your words"),
    (frozenset({"prompts"}), "your words"),
    (frozenset({"last hidden states"}), "the answer's words"),
    (frozenset({"answers"}), "the answer's words"),
    (frozenset({"A x", "M A x"}), "M"),
    (frozenset({"M"}), "what the personal part has learnt"),
    (frozenset({"adapter"}), "what the personal part has learnt"),
    (frozenset({"sizes and times"}), "the lengths of prompt and answer"),
    (frozenset({"how long they wait"}), "how busy the service is"),
    (frozenset({"weights with noise"}), "a little of each example, at most what ε allows"),
)
"""Pairs of things and what follows from them, given what is public: the model, its tables, how the system works."""


def follows(received: Collection[str], rules: Collection[tuple[Collection[str], str]] = RULES) -> set[str]:
    """All that can be known from what was received.

    Parameters
    ----------
    received
        The things that an onlooker has.
    rules
        Pairs: whoever knows all of the first can know the second.

    Returns
    -------
    set of str
        ``received`` and everything that follows from it.
    """
    known = set(received)
    while True:
        more = {conclusion for needed, conclusion in rules if known.issuperset(needed)}
        if more <= known:
            return known
        known |= more


@dataclass(frozen=True)
class Sight:
    """The things that an onlooker of a system receives, and what follows from them."""

    system: str
    onlooker: str
    received: tuple[str, ...]
    conclusions: tuple[str, ...]


def compute(system: str, onlooker: str) -> Sight:
    """An onlooker's sight of a system; ValueError if the system or the onlooker is unknown."""
    one_of("system", system, tuple(RECEIVED))
    one_of("onlooker", onlooker, ONLOOKERS)
    received = RECEIVED[system].get(onlooker, ())
    conclusions = follows(received).difference(received)
    return Sight(system, onlooker, received, tuple(sorted(conclusions)))


def read_out(sight: Sight) -> str:
    """The result in words."""
    if not sight.received:
        return f"{sight.system}: {sight.onlooker} receives nothing of yours."
    received = ", ".join(sight.received)
    return f"{sight.system}: {sight.onlooker} receives {received}; from this follows: {', '.join(sight.conclusions)}."


ROWS = {  # system: what is on your side, what is elsewhere, what goes there and back
    "PrivateLoRA": ("embedding, M,\nhead", "the layers", "embeddings, M A x", "A x, hidden states"),
    "Locret": ("a long text, and\na small cache", "", "", ""),
    "Ghost clipping": ("gradients, clipped,\nand noise", "trained weights", "weights", ""),
    "Multi-tenant LoRA": ("prompt; once,\nyour adapter", "one model,\nmany adapters", "all of it", "the answer"),
    "AutLearn": ("the last layer\nlearns", "a public model", "", "the model"),
}
BADGES = {"PrivateLoRA": (1,), "Multi-tenant LoRA": (1, 3), "Ghost clipping": (2,)}
"""The numbers, from 1 in the order of :data:`ONLOOKERS`, of those who stand at a system's part on the other side."""


def draw(sight: Sight | None = None, ax=None):
    """Draw what crosses in each system, and where the four onlookers stand; of a sight, only its own in colour."""
    ax = drawing.canvas(15, 10.2, ax)
    drawing.lane(ax, 3.3, 0.1, 3.8, 8.6, "yours")
    drawing.lane(ax, 11.1, 0.1, 3.8, 8.6, "somebody else's")
    for place, system in enumerate(ROWS):
        _draw_system(ax, 0.95 + 1.55 * place, system, sight)
    names = [f"{number} {name}" for number, name in enumerate(ONLOOKERS, start=1)]
    drawing.note(ax, 7.5, 9.2, ", ".join(names[:2]))
    drawing.note(ax, 7.5, 9.8, ", ".join(names[2:]))
    seen = f" {read_out(sight)}" if sight else ""
    return theme.describe(
        ax,
        "Five rows, one for each system, with your side and somebody else's, and what crosses between them. "
        "PrivateLoRA: embeddings and M A x go up, A x and hidden states come down. Locret: nothing crosses. Ghost "
        "clipping: trained weights leave. Multi-tenant LoRA: prompt and adapter go up, the answer comes down. "
        f"AutLearn: a public model comes down. Numbers show where four onlookers stand.{seen}",
    )


def _draw_system(ax, y: float, system: str, sight: Sight | None) -> None:
    """Draw a system's row with its upper edge at ``y``; in colour if there is no sight or if it is of this system."""
    left, right, there, back = ROWS[system]
    coloured = sight is None or sight.system == system
    if coloured:
        yours, others, watching = drawing.colours(3)
        title_colour = "black"
    else:
        yours = others = "0.7"
        watching = "0.5"
        title_colour = "0.6"
    drawing.note(ax, 0.1, y + 0.6, system, 9.5, ha="left", fontweight="bold", color=title_colour)
    drawing.box(ax, 3.5, y, 3.4, 1.2, left, yours, 9)
    if right:
        drawing.box(ax, 11.3, y, 3.4, 1.2, right, others, 9)
    else:
        drawing.note(ax, 9.1, y + 0.6, "nothing crosses")
    if there:
        drawing.arrow(ax, (6.9, y + 0.4), (11.3, y + 0.4), there)
    if back:
        drawing.arrow(ax, (11.3, y + 0.8), (6.9, y + 0.8), back, above=False)

    badges = [(14.5 - 0.7 * k, y + 0.1, number) for k, number in enumerate(BADGES.get(system, ()))]
    if WIRE in RECEIVED[system]:
        badges.append((9.1, y + 0.6, ONLOOKERS.index(WIRE) + 1))
    for x, badge_y, number in badges:
        watches = sight is None or sight.onlooker == ONLOOKERS[number - 1]
        _badge(ax, x, badge_y, number, watching if watches else "0.5")


def _badge(ax, x: float, y: float, number: int, colour) -> None:
    circle = dict(boxstyle="circle", facecolor=colour, edgecolor="white")
    drawing.note(ax, x, y, str(number), color="white", fontweight="bold", bbox=circle, zorder=6)


def explorer():
    """Sliders for system and onlooker."""
    import ipywidgets

    from plpkg.show.explorer import Explorer

    controls = {
        "system": ipywidgets.SelectionSlider(description="system", options=list(RECEIVED), value="PrivateLoRA"),
        "onlooker": ipywidgets.SelectionSlider(description="onlooker", options=ONLOOKERS, value=CLOUD),
    }
    question = "In which systems can somebody else know your words, and who is it?"
    return Explorer(controls, compute, read_out, draw, question)
