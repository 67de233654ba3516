"""The counting twin of :mod:`plpkg.communication.formulas`: walk the protocol, serialise every message.

A schedule lists the messages in the order in which they cross the network; messages that follow each other
in one direction are under way at once. :func:`count` makes a tensor for each, turns it into bytes, and adds
the bytes up. Nothing here uses a closed formula: the order of late residuals comes from a simulated clock.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Unpack

from plpkg.catalog import ModelShape, model as find_model
from plpkg.communication.formulas import folded_layers, ladder_run, projection_dims, ranks
from plpkg.communication.run import Run, RunSettings
from plpkg.communication.traffic import Traffic
from plpkg.validation import flag, keywords


@dataclass(frozen=True)
class Message:
    """One tensor on its way.

    Attributes
    ----------
    content
        The kind of tensor: ``"embedding"``, ``"A x"``, ``"M A x"``, ``"hidden"`` …
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
    **run: Unpack[RunSettings],
) -> Iterator[Message]:
    """The messages of low-rank residual transmission; parameters as in :func:`~plpkg.communication.low_rank`.

    The residuals of a layer's q, k and v travel in one message each way, ``(projections, batch, seq, rank)``.
    """
    model = find_model(model)
    r_c2d, r_d2c = ranks(model, rank, r_c2d, r_d2c)
    n = len(projection_dims(model, projections))
    described = Run(model, **run)
    endpoints = flag("endpoints", endpoints)
    late = flag("late", late)
    riding = folded_layers(described, projections, endpoints, folded)

    def shapes(batch: int, seq: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (n, batch, seq, r_c2d), (n, batch, seq, r_d2c)

    return _walk(described, endpoints, shapes, ("A x", "M A x", "Bᵀ g", "Mᵀ Bᵀ g"), riding, late)


@keywords(Run)
def ladder_messages(model: str | ModelShape, rank: int = 96, **run: Unpack[RunSettings]) -> Iterator[Message]:
    """The messages of a ladder; parameters as in :func:`~plpkg.communication.ladder`.

    All layers' values travel in one message a pass, ``(layers, batch, seq, rank)``.
    """
    model = find_model(model)
    rank, _ = ranks(model, rank)
    described = ladder_run(model, **run)
    layers = described.crossing_layers

    def shapes(batch: int, seq: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (layers, batch, seq, rank), ()

    return _walk(described, True, shapes, ("A x",), riding=layers)


def _walk(
    run: Run, endpoints: bool, shapes: Callable, names: tuple[str, ...], riding: int = 0, late: bool = False
) -> Iterator[Message]:
    """Play the protocol: one pass over all positions, or in ``decode`` one pass a token.

    ``shapes(batch, seq)`` gives the shapes of a layer's residuals down and up; ``names`` say what its messages hold:
    the residuals down and up, and in a backward pass the gradients down and up. The last ``riding`` layers wait for
    nothing: their residuals go down with the final hidden state.
    """
    layers = range(run.first_k, run.first_k + run.crossing_layers - riding)
    if run.phase == "decode":
        passes = run.tokens
        seq = 1
    else:
        passes = 1
        seq = run.tokens
    last_only = run.phase == "prefill" and run.final_hidden == "last" and run.last_k == 0
    final_seq = 1 if last_only else seq
    for _ in range(passes):
        if endpoints:
            content = "embedding" if run.first_k == 0 else "hidden at the cut"
            yield Message(content, "up", (run.batch, seq, run.model.hidden))
        for layer, direction in _exchanges(layers, late):
            down, up = shapes(run.batch, seq)
            if direction == "down":
                yield Message(names[0], "down", down, layer)
            else:
                yield Message(names[1], "up", up, layer)
        if riding:
            residual, _ = shapes(run.batch, final_seq)
            yield Message(names[0], "down", residual, _folded(layers, riding))
        if endpoints:
            yield Message("hidden", "down", (run.batch, final_seq, run.model.hidden))
        if run.phase == "training" and (layers or run.first_k):
            yield from _backward(run, layers, endpoints, shapes, names, riding, late)


def _backward(
    run: Run,
    layers: range,
    endpoints: bool,
    shapes: Callable,
    names: tuple[str, ...],
    riding: int,
    late: bool,
) -> Iterator[Message]:
    """The messages of a backward pass; arguments as in :func:`_walk`. A gradient has the shape of its residual."""
    hidden = (run.batch, run.tokens, run.model.hidden)
    if endpoints:
        yield Message("grad hidden", "up", hidden)
    if riding:  # the device has the gradient of M's output, so only that of its input crosses
        of_input, _ = shapes(run.batch, run.tokens)
        yield Message(names[3], "up", of_input, _folded(layers, riding))
    for layer in reversed(layers):
        of_input, of_output = shapes(run.batch, run.tokens)
        yield Message(names[2], "down", of_output, layer)
        if run.first_k or layer - late > layers.start:  # else nothing that learns has made its input
            yield Message(names[3], "up", of_input, layer)
    if endpoints and run.first_k > 0:
        yield Message("grad at the cut", "down", hidden)


def _folded(layers: range, riding: int) -> int | None:
    """The layer after ``layers`` if it alone is riding; None for several layers' residuals in one message."""
    return layers.stop if riding == 1 else None


def _exchanges(layers: range, late: bool) -> list[tuple[int, str]]:
    """A forward pass's ``(layer, direction)`` in the order of a clock that counts half round trips.

    A layer sends when it starts. The next starts once the answers up to its own have arrived, if ``late`` only those up
    to the layer before. Computing takes no time.
    """
    clock = 0
    answered = []  # by layer, when its answer arrives
    sent = []  # (time, layer, direction)
    for layer in layers:
        sent += [(clock, layer, "down"), (clock + 1, layer, "up")]
        answered.append(clock + 2)
        clock = max([clock, *answered[: len(answered) - late]])
    sent.sort(key=itemgetter(0))
    return [(layer, direction) for _, layer, direction in sent]


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

    ``tokens`` is the number of tokens that the messages were sent for; a schedule does not say it.

    Raises
    ------
    ValueError
        No tensor type has that many bits.
    """
    sent = [(message.direction, 8 * len(serialise(message, bits))) for message in messages]
    up = sum(size for direction, size in sent if direction == "up")
    down = sum(size for direction, size in sent if direction == "down")
    turns = sum(1 for _ in groupby(direction for direction, _ in sent))
    return Traffic(up, down, round_trips=turns // 2, tokens=tokens)
