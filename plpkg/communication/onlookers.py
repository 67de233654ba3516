"""Who can know what: what each of five systems hands to each of four onlookers, and what follows from it.

What an onlooker can compute counts as seen (:func:`follows`): the nearest row of a public table is the word
(notebook 02), and pairs of A x and M A x are equations for M. Facts of the systems, not measurements; that an attack
is not listed does not mean that there is none.
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
"""What leaves your side, by system and onlooker. Ghost clipping is meant to train on a machine of yours, and nothing of
Locret's or AutLearn's has to leave it."""

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
"""What follows from what, together with what is public: the model, its tables, and how the system works."""


def follows(received: Collection[str], rules: Collection[tuple[Collection[str], str]] = RULES) -> set[str]:
    """All that can be known from what was received.

    Parameters
    ----------
    received
        What an onlooker has.
    rules
        Pairs: whoever knows all of the first can know the second.

    Returns
    -------
    set of str
        With what was received.
    """
    known = set(received)
    while True:
        more = {conclusion for needed, conclusion in rules if known.issuperset(needed)}
        if more <= known:
            return known
        known |= more


@dataclass(frozen=True)
class Sight:
    """What an onlooker of a system receives, and what follows from it."""

    system: str
    onlooker: str
    received: tuple[str, ...]
    conclusions: tuple[str, ...]


def compute(system: str, onlooker: str) -> Sight:
    """What somebody can know; ValueError where the system or the onlooker is none of these."""
    received = RECEIVED[one_of("system", system, tuple(RECEIVED))].get(one_of("onlooker", onlooker, ONLOOKERS), ())
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
"""Which onlookers stand at what is elsewhere, by their number in :data:`ONLOOKERS`, from 1."""


def draw(sight: Sight | None = None, ax=None):
    """Draw what crosses in each system, and where the four onlookers stand; of a sight, only its own in colour."""

    def watches(number: int) -> bool:
        return sight is None or sight.onlooker == ONLOOKERS[number - 1]

    ax = drawing.canvas(15, 10.2, ax)
    yours, others, watching = drawing.colours(3)
    drawing.lane(ax, 3.3, 0.1, 3.8, 8.6, "yours")
    drawing.lane(ax, 11.1, 0.1, 3.8, 8.6, "somebody else's")
    for place, (system, (left, right, there, back)) in enumerate(ROWS.items()):
        y = 0.95 + 1.55 * place
        coloured = sight is None or sight.system == system
        drawing.note(ax, 0.1, y + 0.6, system, 9.5, ha="left", fontweight="bold", color="black" if coloured else "0.6")
        drawing.box(ax, 3.5, y, 3.4, 1.2, left, yours if coloured else "0.7", 9)
        if right:
            drawing.box(ax, 11.3, y, 3.4, 1.2, right, others if coloured else "0.7", 9)
        else:
            drawing.note(ax, 9.1, y + 0.6, "nothing crosses")
        if there:
            drawing.arrow(ax, (6.9, y + 0.4), (11.3, y + 0.4), there)
        if back:
            drawing.arrow(ax, (11.3, y + 0.8), (6.9, y + 0.8), back, above=False)
        for k, number in enumerate(BADGES.get(system, ())):
            _badge(ax, 14.5 - 0.7 * k, y + 0.1, number, watching if coloured and watches(number) else "0.5")
        if WIRE in RECEIVED[system]:
            _badge(ax, 9.1, y + 0.6, 4, watching if coloured and watches(4) else "0.5")
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
