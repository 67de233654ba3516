"""The counting twin of :mod:`plpkg.communication.formulas`: walk the protocol, serialise every message.

A schedule lists the messages in the order in which they cross the network; what follows each other in
one direction is under way at once. :func:`count` makes a tensor for each, turns it into bytes, and adds
the bytes up. Nothing here knows a closed formula: in which order late residuals cross, a clock says.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from plpkg.catalog import ModelShape, model as find_model
from plpkg.communication.formulas import folded_layers, ladder_run, projection_dims, ranks
from plpkg.communication.run import Run
from plpkg.communication.traffic import Traffic
from plpkg.validation import flag, keywords


@dataclass(frozen=True)
class Message:
    """One tensor on its way.

    Attributes
    ----------
    content
        What it carries: ``"embedding"``, ``"A x"``, ``"M A x"``, ``"hidden"`` …
    direction
        ``"up"`` (device to cloud) or ``"down"``.
    shape
        The tensor's, ``(…, batch, seq, width)``.
    layer
        The decoder layer it belongs to; ``None`` for the end points, and for several layers' together.
    """

    content: str
    direction: str
    shape: tuple[int, ...]
    layer: int | None = None


@keywords(Run)
def low_rank_messages(
    model: str | ModelShape,
    rank: int = 64,
    projections: int = 3,
    endpoints: bool = True,
    *,
    r_c2d: int | None = None,
    r_d2c: int | None = None,
    late: bool = False,
    folded: bool = False,
    **run,
) -> Iterator[Message]:
    """The messages of low-rank residual transmission; parameters as in :func:`~plpkg.communication.low_rank`.

    The residuals of a layer's q, k and v travel in one message each way, ``(projections, batch, seq, rank)``.
    """
    model = find_model(model)
    r_c2d, r_d2c = ranks(model, rank, r_c2d, r_d2c)
    n, run = len(projection_dims(model, projections)), Run(model, **run)
    names = ("A x", "M A x", "Bᵀ g", "Mᵀ Bᵀ g")
    endpoints, late = flag("endpoints", endpoints), flag("late", late)
    riding = folded_layers(run, projections, endpoints, folded)
    return _walk(run, endpoints, lambda b, s: ((n, b, s, r_c2d), (n, b, s, r_d2c)), names, riding, late)


@keywords(Run)
def ladder_messages(model: str | ModelShape, rank: int = 96, **run) -> Iterator[Message]:
    """The messages of a ladder; parameters as in :func:`~plpkg.communication.ladder`.

    What the layers send travels in one message a pass, ``(layers, batch, seq, rank)``.
    """
    model = find_model(model)
    (rank, _), run = ranks(model, rank), ladder_run(model, **run)
    layers = run.crossing_layers
    return _walk(run, True, lambda b, s: ((layers, b, s, rank), ()), ("A x",), riding=layers)


def _walk(
    run: Run, endpoints: bool, shapes: Callable | None, names: tuple[str, ...], riding: int = 0, late: bool = False
) -> Iterator[Message]:
    """Play the protocol: one pass over all positions, or in ``decode`` one pass a token.

    The last ``riding`` layers wait for nothing: what they send goes down with the final hidden state.
    """
    layers = range(run.first_k, run.first_k + run.crossing_layers - riding)
    folded = layers.stop if riding == 1 else None
    passes, seq = (run.tokens, 1) if run.phase == "decode" else (1, run.tokens)
    hidden = (run.batch, seq, run.model.hidden)
    final = hidden
    if run.phase == "prefill" and run.final_hidden == "last" and run.last_k == 0:
        final = (run.batch, 1, run.model.hidden)
    for _ in range(passes):
        if endpoints:
            yield Message("embedding" if run.first_k == 0 else "hidden at the cut", "up", hidden)
        for layer, way in _exchanges(layers, late):
            yield Message(names[way], ("down", "up")[way], shapes(run.batch, seq)[way], layer)
        if riding:
            yield Message(names[0], "down", shapes(*final[:2])[0], folded)
        if endpoints:
            yield Message("hidden", "down", final)
        if run.phase == "training" and (layers or run.first_k):
            if endpoints:
                yield Message("grad hidden", "up", hidden)
            if riding:  # the device has the gradient of M's output, so only that of its input crosses
                yield Message(names[3], "up", shapes(*final[:2])[0], folded)
            for layer in reversed(layers):
                down, up = shapes(run.batch, seq)
                yield Message(names[2], "down", up, layer)  # the gradient of an output has its shape
                if run.first_k or layer - late > layers.start:  # else nothing that learns has made its input
                    yield Message(names[3], "up", down, layer)
            if endpoints and run.first_k > 0:
                yield Message("grad at the cut", "down", hidden)


def _exchanges(layers: range, late: bool) -> list[tuple[int, int]]:
    """A forward pass's ``(layer, 0 down or 1 up)`` in the order of a clock of half round trips.

    A layer sends when it starts; the next starts once the answers up to its own, if ``late`` only up to
    the one before, have arrived. Computing takes no time.
    """
    clock, answered, sent = 0, [], []
    for layer in layers:
        sent += [(clock, layer, 0), (clock + 1, layer, 1)]
        answered.append(clock + 2)
        clock = max([clock, *answered[: len(answered) - late]])
    return [(layer, way) for _, layer, way in sorted(sent, key=itemgetter(0))]


def serialise(message: Message, bits: int = 16) -> bytes:
    """The message's tensor as raw bytes, for 8, 16, 32 or 64 bits a value."""
    import torch

    dtypes = {8: torch.int8, 16: torch.float16, 32: torch.float32, 64: torch.float64}
    if bits not in dtypes:
        raise ValueError(f"bits must be one of {', '.join(map(str, dtypes))} to be serialised, got {bits!r}")
    return torch.zeros(message.shape, dtype=dtypes[bits]).numpy().tobytes()


@keywords()
def count(messages: Iterable[Message], bits: int = 16, tokens: int = 1) -> Traffic:
    """Serialise every message and add up the bytes each way; count round trips by the turns of direction.

    ``tokens`` is what the messages were for; a schedule does not say it.

    Raises
    ------
    ValueError
        No tensor type has that many bits.
    """
    sent = [(message.direction, len(serialise(message, bits))) for message in messages]
    total = {which: 8 * sum(size for direction, size in sent if direction == which) for which in ("up", "down")}
    turns = sum(1 for _ in groupby(direction for direction, _ in sent))
    return Traffic(total["up"], total["down"], round_trips=turns // 2, tokens=tokens)
