r"""Closed formulas for the traffic between a device and the cloud that holds the decoder.

Three protocols, after PrivateLoRA (arXiv 2311.14030):

* :func:`full_activations`: adapters on the device, activations cross at full width.
* :func:`low_rank`: low-rank residual transmission. With :math:`\Delta W = A M B` the cloud keeps
  A and B, the device keeps M, and only :math:`r` numbers a projection cross each way.
* :func:`layer_cut`: no adapter crosses; the device runs the first layers itself.

Per pass over ``n`` positions and ``L`` adapted layers, forward:

====================  =======================================================
message               values
====================  =======================================================
embedding, up         ``n · hidden``, if the end points are counted
residual input, down  ``L · n · projections · r_c2d``
residual output, up   ``L · n · projections · r_d2c``
final hidden, down    ``hidden`` for the last position (all positions in training)
====================  =======================================================

Training adds the gradient of the final hidden state (up), and per layer the gradient
:math:`B^\top \partial L/\partial y` (down, ``r_d2c``) and its image under :math:`M^\top`
(up, ``r_c2d``). The lowest layer's return is counted although nothing needs it when the word
embedding stays frozen.

Left out: framing, headers, encryption, compression, and the shape of the cache, which the
published demo also sends.
"""

from plpkg.catalog import ModelShape, model as find_model
from plpkg.communication.traffic import PHASES, Traffic
from plpkg.validation import one_of, whole_number

BASELINES = ("published", "actual")
"""``published``: ``hidden`` down and up for each projection. ``actual``: the shared input down, each output up."""


def full_activations(
    model: str | ModelShape,
    projections: int = 1,
    endpoints: bool = False,
    bits: int = 16,
    baseline: str = "published",
    *,
    phase: str = "decode",
    tokens: int = 1,
    batch: int = 1,
    first_k: int = 0,
    last_k: int = 0,
    adapted_layers: int | None = None,
) -> Traffic:
    """Traffic when activations cross at full width, per token by default.

    Parameters
    ----------
    model
        A shape or its catalog name.
    projections
        1 (q) or 3 (q, k, v) adapted projections a layer.
    endpoints
        Count the word embedding going up and the final hidden state coming down.
    bits
        Bits of one transmitted value.
    baseline
        ``"published"``: the article's count, ``2·hidden`` values for each projection.
        ``"actual"``: what a split LoRA has to send: the input that the projections share goes
        down once, each projection's output comes up (narrower keys and values under
        grouped-query attention).
    phase
        ``"decode"``, ``"prefill"`` or ``"training"``: see :data:`~plpkg.communication.PHASES`.
    tokens, batch
        Tokens of each sequence, and sequences.
    first_k, last_k
        Layers at either end that run on the device and send nothing.
    adapted_layers
        How many of the cloud's layers carry adapters; all by default.

    Returns
    -------
    Traffic
        Seen from the device, for ``tokens · batch`` tokens.

    Raises
    ------
    ValueError
        An argument is out of range.
    """
    model = find_model(model)
    dims = _projection_dims(model, projections)
    if one_of("baseline", baseline, BASELINES) == "published":
        down = up = projections * model.hidden
    else:
        down, up = model.hidden, sum(dims)
    return _traffic(
        model, down, up, endpoints, bits, phase, tokens, batch, first_k, last_k, adapted_layers, final_hidden="last"
    )


def low_rank(
    model: str | ModelShape,
    rank: int = 32,
    projections: int = 3,
    endpoints: bool = True,
    bits: int = 16,
    *,
    r_c2d: int | None = None,
    r_d2c: int | None = None,
    phase: str = "decode",
    tokens: int = 1,
    batch: int = 1,
    first_k: int = 0,
    last_k: int = 0,
    adapted_layers: int | None = None,
    final_hidden: str = "last",
) -> Traffic:
    """Traffic of low-rank residual transmission, per token by default.

    Parameters
    ----------
    model, projections, endpoints, bits, phase, tokens, batch, first_k, last_k, adapted_layers
        As in :func:`full_activations`.
    rank
        Sets ``r_c2d`` and ``r_d2c`` together.
    r_c2d, r_d2c
        Values a projection sends from cloud to device and back, where they differ.
    final_hidden
        Which positions of the final hidden state come down in a prefill: ``"last"`` (enough to
        generate) or ``"all"`` (to verify drafted tokens, or to score a text).

    Returns
    -------
    Traffic
        Seen from the device, for ``tokens · batch`` tokens.

    Raises
    ------
    ValueError
        An argument is out of range: a rank below 1 or above ``hidden``, say.
    """
    model = find_model(model)
    r_c2d, r_d2c = ranks(model, rank, r_c2d, r_d2c)
    n = len(_projection_dims(model, projections))
    return _traffic(
        model,
        n * r_c2d,
        n * r_d2c,
        endpoints,
        bits,
        phase,
        tokens,
        batch,
        first_k,
        last_k,
        adapted_layers,
        final_hidden,
    )


def layer_cut(
    model: str | ModelShape,
    after_layer: int,
    bits: int = 16,
    *,
    phase: str = "decode",
    tokens: int = 1,
    batch: int = 1,
    final_hidden: str = "last",
) -> Traffic:
    """Traffic of a plain split: the device runs the first ``after_layer`` layers and the LM head.

    One round trip a pass, whatever the depth of the cut; ``after_layer=0`` leaves only the word
    embedding on the device, which is what :func:`low_rank` counts as its end points.

    Parameters and errors as in :func:`low_rank`.
    """
    model = find_model(model)
    whole_number("after_layer", after_layer, 0, model.num_layers, "num_layers")
    return _traffic(model, 0, 0, True, bits, phase, tokens, batch, after_layer, 0, 0, final_hidden)


def ranks(model: ModelShape, rank: int, r_c2d: int | None, r_d2c: int | None) -> tuple[int, int]:
    """``(r_c2d, r_d2c)``, each taken from ``rank`` where it is not given, both checked against ``hidden``."""
    given = {"rank": rank, "r_c2d": rank if r_c2d is None else r_c2d, "r_d2c": rank if r_d2c is None else r_d2c}
    checked = [whole_number(name, value, 1, model.hidden, "hidden") for name, value in given.items()]
    return checked[1], checked[2]


def _projection_dims(model: ModelShape, projections: int) -> tuple[int, ...]:
    one_of("projections", projections, (1, 3))
    return model.projection_dims[:projections]


def crossing_layers(model: ModelShape, first_k: int, last_k: int, adapted_layers: int | None) -> int:
    """How many layers exchange residuals: those on the cloud that carry adapters.

    Raises
    ------
    ValueError
        More layers are asked for than the model or the cloud has.
    """
    whole_number("first_k", first_k, 0, model.num_layers, "num_layers")
    on_cloud = model.num_layers - first_k
    on_cloud -= whole_number("last_k", last_k, 0, on_cloud, "num_layers-first_k")
    if adapted_layers is None:
        return on_cloud
    return whole_number("adapted_layers", adapted_layers, 0, on_cloud, "num_layers on the cloud")


def _traffic(
    model: ModelShape,
    down_values: int,
    up_values: int,
    endpoints: bool,
    bits: int,
    phase: str,
    tokens: int,
    batch: int,
    first_k: int,
    last_k: int,
    adapted_layers: int | None,
    final_hidden: str,
) -> Traffic:
    """Add the layers' values (each way, one position, one layer) and the end points."""
    layers = crossing_layers(model, first_k, last_k, adapted_layers)
    one_of("phase", phase, PHASES)
    one_of("final_hidden", final_hidden, ("last", "all"))
    whole_number("bits", bits, 1, 64)
    n = whole_number("tokens", tokens, 1) * whole_number("batch", batch, 1)

    up, down = layers * n * up_values, layers * n * down_values
    # Layers on the device after the cloud's need every position, to fill their own KV cache.
    whole_prompt = phase != "prefill" or final_hidden == "all" or last_k > 0
    if endpoints:
        up += n * model.hidden
        down += (n if whole_prompt else batch) * model.hidden
    round_trips = layers + endpoints

    if phase == "training":
        # The backward pass mirrors the forward one: gradients of outputs down, of inputs up.
        up, down = up + layers * n * down_values, down + layers * n * up_values
        round_trips += layers
        if endpoints:
            up += n * model.hidden
            if first_k > 0:  # the device's own layers need the gradient at the cut
                down += n * model.hidden
                round_trips += 1
    elif phase == "decode":
        round_trips *= tokens
    return Traffic(up * bits, down * bits, round_trips, n)
