"""The effect of the round-trip time on the speed, and the choice of a rank for a target speed.

The article's formula has no propagation delay. With one, a token costs ``1 + num_layers`` round
trips, and that term soon outweighs all the others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from plpkg.catalog import ModelShape, model as find_model
from plpkg.communication.formulas import projection_dims
from plpkg.throughput.estimate import decode
from plpkg.validation import keywords, number


@keywords(decode, without=("model",))
def against_rtt(models: Sequence[str | ModelShape], rtts_ms: Sequence[float] = (0, 1, 5, 10, 20, 33), **settings: Any):
    """Tokens per second of each model (rows) at each round-trip time in milliseconds (columns).

    ``**settings`` goes to :func:`~plpkg.throughput.decode`, without ``rtt_s``. Returns a
    ``pandas.DataFrame``.

    Raises
    ------
    ValueError
        Two models share a name, or the GPU speeds of some are published and of others rooflines:
        such rows cannot be compared.
    """
    runs = {shape.name: settings | {"model": shape} for shape in distinct(models)}
    return _speeds("model", runs, rtts_ms)


@keywords(decode)
def schemes_against_rtt(
    schemes: Mapping[str, Mapping[str, Any]], rtts_ms: Sequence[float] = (0, 5, 20, 33), **settings: Any
):
    """Tokens per second of each scheme of running a model (rows) at each round-trip time in milliseconds (columns).

    A scheme is a name with settings of :func:`~plpkg.throughput.decode`; ``**settings``, the ``model`` among them, are
    those that a scheme does not set itself. Returns a ``pandas.DataFrame``; raises as :func:`against_rtt` does.
    """
    if not schemes:
        raise ValueError(f"schemes must hold at least one scheme of running a model, got {schemes!r}")
    runs = {name: settings | dict(scheme) for name, scheme in schemes.items()}
    return _speeds("scheme", runs, rtts_ms)


def _speeds(index: str, runs: dict[str, dict], rtts_ms: Sequence[float]):
    """A frame of tokens per second: a row for the settings of each run, a column for each round-trip time."""
    import pandas as pd

    for run in runs.values():
        _refuse(run, "rtt_s")
    sources = {name: decode(**run).gpu for name, run in runs.items()}
    if len(set(sources.values())) > 1:
        kinds = ", ".join(f"{name} {source}" for name, source in sources.items())
        raise ValueError(f"these GPU speeds cannot be compared: {kinds}; pass gpu='roofline' or a number")
    rtts_s = {rtt: number("each of rtts_ms", rtt) / 1e3 for rtt in rtts_ms}
    speeds = {}
    for name, run in runs.items():
        speeds[name] = {rtt: decode(rtt_s=rtt_s, **run).tokens_per_s for rtt, rtt_s in rtts_s.items()}
    return pd.DataFrame(speeds).T.rename_axis(index=index, columns="rtt_ms")


@keywords(decode)
def break_even_rtt_s(model: str | ModelShape, phone_only_tokens_per_s: float, rank: int = 64, **settings: Any) -> float:
    """The round-trip time at which splitting is no faster than the phone alone.

    Parameters
    ----------
    model, rank
        As in :func:`~plpkg.throughput.decode`.
    phone_only_tokens_per_s
        The speed of the phone by itself.
    **settings
        Anything else that :func:`~plpkg.throughput.decode` takes, except ``rtt_s``.

    Returns
    -------
    float
        Seconds; negative where the phone wins even at zero delay.
    """
    _refuse(settings, "rtt_s")
    phone_only_tokens_per_s = number("phone_only_tokens_per_s", phone_only_tokens_per_s, open_low=True)
    without = decode(model, rank, rtt_s=0.0, **settings)
    one_second = decode(model, rank, rtt_s=1.0, **settings)
    round_trips_per_token = one_second.breakdown()["round_trips"]
    return (1 / phone_only_tokens_per_s - 1 / without.tokens_per_s) / round_trips_per_token


@keywords(decode)
def best_rank(model: str | ModelShape, tokens_per_s: float, **settings: Any) -> int:
    """The largest rank that still reaches a target speed, up to the width of the narrowest projection.

    Parameters
    ----------
    model
        A shape or its catalog name.
    tokens_per_s
        The target.
    **settings
        Anything that :func:`~plpkg.throughput.decode` takes, except the ranks.

    Raises
    ------
    ValueError
        Not even rank 1 is fast enough; the message says how fast it is. Or ``settings`` fix the
        ranks, or leave no adapted layer, so that there is nothing to choose.
    """
    model = find_model(model)
    _refuse(settings, "rank", "r_c2d", "r_d2c")
    if settings.get("adapted_layers") == 0:
        raise ValueError("adapted_layers must be at least 1 for the rank to matter, got 0")
    tokens_per_s = number("tokens_per_s", tokens_per_s, open_low=True)
    lowest = decode(model, 1, **settings).tokens_per_s
    if lowest < tokens_per_s:
        raise ValueError(f"no rank of {model.name} reaches {tokens_per_s:g} tokens/s: rank 1 gives {lowest:.2f}")
    widths = projection_dims(model, settings.get("projections", 3))
    low = 1
    high = min(model.hidden, *widths)
    while low < high:  # the speed falls with the rank; low is fast enough throughout
        middle = (low + high + 1) // 2
        if decode(model, middle, **settings).tokens_per_s >= tokens_per_s:
            low = middle
        else:
            high = middle - 1
    return low


def distinct(models: Sequence[str | ModelShape]) -> list[ModelShape]:
    """The shapes of several models, whose names must differ: they label the rows.

    Raises
    ------
    ValueError
        Two share a name, or the models came as one string.
    """
    if isinstance(models, str):
        raise ValueError(f"models must be a list of models, got the string {models!r}")
    shapes = [find_model(model) for model in models]
    names = [shape.name for shape in shapes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"models must have different names, got {', '.join(twice)} more than once")
    return shapes


def _refuse(settings: dict, *names: str) -> None:
    for name in names:
        if name in settings:
            raise ValueError(f"{name} is what is being varied here; it cannot be set as well (got {settings[name]!r})")
