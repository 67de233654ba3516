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
final hidden, down    ``hidden`` for the last position; for all positions in training, when
                      ``final_hidden="all"``, or when layers on the device follow (``last_k``)
====================  =======================================================

Training adds the gradient of the final hidden state (up), and per layer the gradient
:math:`B^\top \partial L/\partial y` (down, ``r_d2c``) and its image under :math:`M^\top`
(up, ``r_c2d``), and for layers on the device (``first_k``) the gradient at the cut (down). The
lowest layer's return is counted although nothing needs it when the word
embedding stays frozen.

Left out: framing, headers, encryption, compression, and the shape of the cache, which the
published demo also sends.
"""

from plpkg.catalog import ModelShape, model as find_model
from plpkg.communication.run import Run
from plpkg.communication.traffic import Traffic
from plpkg.validation import flag, one_of, whole_number

BASELINES = ("published", "actual")
"""``published``: ``hidden`` down and up for each projection. ``actual``: the shared input down, each output up."""


def full_activations(
    model: str | ModelShape,
    projections: int = 1,
    endpoints: bool = False,
    bits: int = 16,
    baseline: str = "published",
    **run,
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
    **run
        Fields of :class:`~plpkg.communication.Run`: ``phase``, ``tokens``, ``batch`` …

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
    dims = projection_dims(model, projections)
    if one_of("baseline", baseline, BASELINES) == "published":
        down = up = projections * model.hidden
    else:
        down, up = model.hidden, sum(dims)
    return _traffic(Run(model, **run), down, up, endpoints, bits)


def low_rank(
    model: str | ModelShape,
    rank: int = 32,
    projections: int = 3,
    endpoints: bool = True,
    bits: int = 16,
    *,
    r_c2d: int | None = None,
    r_d2c: int | None = None,
    **run,
) -> Traffic:
    """Traffic of low-rank residual transmission, per token by default.

    Parameters
    ----------
    model, projections, endpoints, bits, **run
        The same as in :func:`full_activations`.
    rank
        Sets ``r_c2d`` and ``r_d2c`` together. Any rank up to ``hidden`` is counted, though one above
        the width of keys and values sends more than their whole output.
    r_c2d, r_d2c
        Values a projection sends from cloud to device and back, where they differ.

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
    n = len(projection_dims(model, projections))
    return _traffic(Run(model, **run), n * r_c2d, n * r_d2c, endpoints, bits)


def layer_cut(model: str | ModelShape, after_layer: int, bits: int = 16, **run) -> Traffic:
    """Traffic of a plain split: the device runs the first ``after_layer`` layers and the LM head.

    One round trip a pass, whatever the depth of the cut; ``after_layer=0`` leaves only the word
    embedding on the device, which is what :func:`low_rank` counts as its end points.

    Parameters and errors as in :func:`low_rank`.
    """
    model = find_model(model)
    whole_number("after_layer", after_layer, 0, model.num_layers - 1, "num_layers-1")
    return _traffic(Run(model, first_k=after_layer, adapted_layers=0, **run), 0, 0, True, bits)


def ranks(model: ModelShape, rank: int, r_c2d: int | None = None, r_d2c: int | None = None) -> tuple[int, int]:
    """``(r_c2d, r_d2c)``, each taken from ``rank`` where it is not given, both checked against ``hidden``."""
    given = {"rank": rank, "r_c2d": rank if r_c2d is None else r_c2d, "r_d2c": rank if r_d2c is None else r_d2c}
    checked = [whole_number(name, value, 1, model.hidden, "hidden") for name, value in given.items()]
    return checked[1], checked[2]


def projection_dims(model: ModelShape, projections: int) -> tuple[int, ...]:
    """Output widths of the adapted projections: q alone, or q, k and v."""
    return model.projection_dims[: one_of("projections", projections, (1, 3))]


def _traffic(run: Run, down_values: int, up_values: int, endpoints: bool, bits: int) -> Traffic:
    """Add up the layers' values (each way, one position, one layer) and the end points."""
    bits, endpoints = whole_number("bits", bits, 1, 64), flag("endpoints", endpoints)
    layers, n, hidden = run.crossing_layers, run.tokens * run.batch, run.model.hidden
    up, down = layers * n * up_values, layers * n * down_values
    # Layers on the device after the cloud's need every position, to fill their own KV cache.
    last_only = run.phase == "prefill" and run.final_hidden == "last" and run.last_k == 0
    if endpoints:
        up += n * hidden
        down += (run.batch if last_only else n) * hidden
    round_trips = layers + endpoints

    if run.phase == "training":
        # The backward pass mirrors the forward one: gradients of outputs down, of inputs up.
        up, down = up + layers * n * down_values, down + layers * n * up_values
        round_trips += layers
        if endpoints:
            up += n * hidden
            if run.first_k > 0:  # the device's own layers need the gradient at the cut
                down += n * hidden
                round_trips += 1
    elif run.phase == "decode":
        round_trips *= run.tokens
    return Traffic(up * bits, down * bits, round_trips, n)
