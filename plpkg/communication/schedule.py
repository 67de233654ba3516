"""The counting twin of :mod:`plpkg.communication.formulas`: walk the protocol, serialise every message.

A schedule lists the messages in the order in which they cross the network. :func:`count` makes a
tensor for each, turns it into bytes, and adds the bytes up. Nothing here knows a closed formula.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from plpkg.catalog import ModelShape, model as find_model
from plpkg.communication.formulas import BASELINES, projection_dims, ranks
from plpkg.communication.run import Run
from plpkg.communication.traffic import Traffic
from plpkg.validation import flag, one_of, whole_number


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
        The decoder layer it belongs to; ``None`` for the end points.
    """

    content: str
    direction: str
    shape: tuple[int, ...]
    layer: int | None = None


def low_rank_messages(
    model: str | ModelShape,
    rank: int = 32,
    projections: int = 3,
    endpoints: bool = True,
    *,
    r_c2d: int | None = None,
    r_d2c: int | None = None,
    **run,
) -> Iterator[Message]:
    """The messages of low-rank residual transmission; parameters as in :func:`~plpkg.communication.low_rank`.

    The residuals of a layer's q, k and v travel in one message each way, ``(projections, batch, seq, rank)``.
    """
    model = find_model(model)
    r_c2d, r_d2c = ranks(model, rank, r_c2d, r_d2c)
    n = len(projection_dims(model, projections))
    names = ("A x", "M A x", "Bᵀ g", "Mᵀ Bᵀ g")
    return _walk(
        Run(model, **run), flag("endpoints", endpoints), lambda b, s: ((n, b, s, r_c2d), (n, b, s, r_d2c)), names
    )


def full_activation_messages(
    model: str | ModelShape, projections: int = 1, endpoints: bool = False, baseline: str = "published", **run
) -> Iterator[Message]:
    """The messages at full width; parameters as in :func:`~plpkg.communication.full_activations`."""
    model = find_model(model)
    widths = projection_dims(model, projections)
    one_of("baseline", baseline, BASELINES)

    def shapes(batch: int, seq: int):
        if baseline == "published":
            return ((projections, batch, seq, model.hidden),) * 2
        return (batch, seq, model.hidden), (batch, seq, sum(widths))  # x; q, k and v side by side

    return _walk(
        Run(model, **run), flag("endpoints", endpoints), shapes, ("x", "residuals", "grad residuals", "grad x")
    )


def layer_cut_messages(model: str | ModelShape, after_layer: int, **run) -> Iterator[Message]:
    """The messages of a plain split; parameters as in :func:`~plpkg.communication.layer_cut`."""
    model = find_model(model)
    whole_number("after_layer", after_layer, 0, model.num_layers - 1, "num_layers-1")
    return _walk(Run(model, first_k=after_layer, adapted_layers=0, **run), True, None, ())


def _walk(run: Run, endpoints: bool, shapes: Callable | None, names: tuple[str, ...]) -> Iterator[Message]:
    """Play the protocol: one pass over all positions, or in ``decode`` one pass a token."""
    layers = range(run.first_k, run.first_k + run.crossing_layers)
    passes, seq = (run.tokens, 1) if run.phase == "decode" else (1, run.tokens)
    hidden = (run.batch, seq, run.model.hidden)
    final = hidden
    if run.phase == "prefill" and run.final_hidden == "last" and run.last_k == 0:
        final = (run.batch, 1, run.model.hidden)
    for _ in range(passes):
        if endpoints:
            yield Message("embedding" if run.first_k == 0 else "hidden at the cut", "up", hidden)
        for layer in layers:
            down, up = shapes(run.batch, seq)
            yield Message(names[0], "down", down, layer)
            yield Message(names[1], "up", up, layer)
        if endpoints:
            yield Message("hidden", "down", final)
        if run.phase == "training":
            if endpoints:
                yield Message("grad hidden", "up", hidden)
            for layer in reversed(layers):
                down, up = shapes(run.batch, seq)
                yield Message(names[2], "down", up, layer)  # the gradient of an output has its shape
                yield Message(names[3], "up", down, layer)
            if endpoints and run.first_k > 0:
                yield Message("grad at the cut", "down", hidden)


def serialise(message: Message, bits: int = 16) -> bytes:
    """The message's tensor as raw bytes, for 8, 16, 32 or 64 bits a value."""
    import torch

    dtypes = {8: torch.int8, 16: torch.float16, 32: torch.float32, 64: torch.float64}
    if bits not in dtypes:
        raise ValueError(f"bits must be one of {', '.join(map(str, dtypes))} to be serialised, got {bits!r}")
    return torch.zeros(message.shape, dtype=dtypes[bits]).numpy().tobytes()


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
