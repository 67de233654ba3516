r"""Closed formulas for the traffic between a device and the cloud that holds the decoder.

Four protocols, after PrivateLoRA (arXiv 2311.14030):

* :func:`full_activations`: adapters on the device, activations cross at full width.
* :func:`low_rank`: low-rank residual transmission. With :math:`\Delta W = A M B` the cloud keeps
  A and B, the device keeps M, and only :math:`r` numbers a projection cross each way.
* :func:`ladder`: M is on the device, behind all layers (ladder side-tuning, arXiv 2206.06522, at
  this cut): every layer's :math:`A x` comes down with the final hidden state, nothing goes up.
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
(up, ``r_c2d``), and for layers on the device (``first_k``) the gradient at the cut (down). Without such
layers, nothing before the lowest layer learns, as the word embedding is frozen: the gradient of that layer's
input does not go up. With ``late``, nor does that of the layer above, whose input has no residual yet.

Two things make fewer round trips of :func:`low_rank`. ``folded``: the last layer's :math:`B M u` is
added to the final hidden state, so :math:`u` comes down with that, the device adds it, and ``L - 1``
exchanges are left. ``late``: what a layer receives, the next one adds, and the last also its own. Layer
``g`` sends :math:`u_g` before it waits for :math:`v_{g-1}`, so it starts once :math:`v_{g-2}` is there,
a round trip after layer ``g - 2``. The last of ``n`` exchanges starts after ``⌊(n-1)/2⌋`` round trips
and takes one more: ``⌈n/2⌉``. A backward pass waits for every answer.

Left out: headers (:func:`~plpkg.communication.on_the_wire`), compression, and the shape of the cache,
which the published demo also sends.
"""

from dataclasses import replace
from typing import Any, Unpack

from plpkg.catalog import ModelShape, model as find_model
from plpkg.communication.run import Run, RunSettings
from plpkg.communication.traffic import Traffic
from plpkg.validation import flag, keywords, one_of, whole_number

BASELINES = ("published", "actual")
"""``published``: ``hidden`` down and up for each projection. ``actual``: the shared input down, each output up."""


@keywords(Run)
def full_activations(
    model: str | ModelShape,
    projections: int = 3,
    endpoints: bool = True,
    bits: int = 16,
    baseline: str = "published",
    **run: Unpack[RunSettings],
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
        ``"published"``: the article's count, ``2·hidden`` values for each projection; its own
        figures are of ``projections=1`` without ``endpoints``.
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
        down = projections * model.hidden
        up = projections * model.hidden
    else:
        down = model.hidden
        up = sum(dims)
    return _traffic(Run(model, **run), down, up, endpoints, bits)


@keywords(Run)
def low_rank(
    model: str | ModelShape,
    rank: int = 64,
    projections: int = 3,
    endpoints: bool = True,
    bits: int = 16,
    *,
    r_c2d: int | None = None,
    r_d2c: int | None = None,
    late: bool = False,
    folded: bool = False,
    **run: Unpack[RunSettings],
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
    late
        Each layer adds what the one before it has received: two exchanges are under way at once.
    folded
        The last layer's residual input comes down with the final hidden state, for the same positions,
        and is added to it on the device. Only an adapter of the last layer's last projection
        (``projections=1``: ``down_proj``) can do that, and ``endpoints`` must count.

    Returns
    -------
    Traffic
        Seen from the device, for ``tokens · batch`` tokens.

    Raises
    ------
    ValueError
        An argument is out of range: a rank below 1 or above ``hidden``, say; or nothing can be folded.
    """
    model = find_model(model)
    r_c2d, r_d2c = ranks(model, rank, r_c2d, r_d2c)
    n = len(projection_dims(model, projections))
    described = Run(model, **run)
    riding = folded_layers(described, projections, endpoints, folded)
    return _traffic(described, n * r_c2d, n * r_d2c, endpoints, bits, riding, flag("late", late))


@keywords(Run)
def ladder(model: str | ModelShape, rank: int = 96, bits: int = 16, **run: Unpack[RunSettings]) -> Traffic:
    """Traffic of a ladder, end points included: every adapted layer's ``rank`` numbers come down at the end of a pass.

    One round trip a pass. Nothing on the cloud depends on M, so ``phase="training"`` is a forward
    pass whose every position comes down. Parameters and errors as in :func:`low_rank`; ``first_k``
    and ``last_k`` must be 0.
    """
    model = find_model(model)
    rank, _ = ranks(model, rank)
    described = ladder_run(model, **run)
    return _traffic(described, rank, 0, True, bits, riding=described.crossing_layers)


@keywords(Run, without=("first_k", "adapted_layers"))
def layer_cut(model: str | ModelShape, after_layer: int, bits: int = 16, **run: Any) -> Traffic:
    """Traffic of a plain split: the device runs the first ``after_layer`` layers and the LM head.

    One round trip a pass, whatever the depth of the cut; ``after_layer=0`` leaves only the word
    embedding on the device, which is what :func:`low_rank` counts as its end points.

    Parameters and errors as in :func:`low_rank`.
    """
    model = find_model(model)
    whole_number("after_layer", after_layer, 0, model.num_layers - 1, "num_layers-1")
    return _traffic(Run(model, first_k=after_layer, adapted_layers=0, **run), 0, 0, True, bits)


def ranks(model: ModelShape, rank: int, r_c2d: int | None = None, r_d2c: int | None = None) -> tuple[int, int]:
    """``(r_c2d, r_d2c)``, each taken from ``rank`` where it is not given, and checked against ``hidden``."""
    rank_is_used = r_c2d is None or r_d2c is None
    highest = model.hidden if rank_is_used else None
    rank = whole_number("rank", rank, 1, highest, "hidden")
    if r_c2d is None:
        r_c2d = rank
    if r_d2c is None:
        r_d2c = rank
    r_c2d = whole_number("r_c2d", r_c2d, 1, model.hidden, "hidden")
    r_d2c = whole_number("r_d2c", r_d2c, 1, model.hidden, "hidden")
    return r_c2d, r_d2c


def projection_dims(model: ModelShape, projections: int) -> tuple[int, ...]:
    """Output widths of the adapted projections: q alone, or q, k and v."""
    return model.projection_dims[: one_of("projections", projections, (1, 3))]


def folded_layers(run: Run, projections: int, endpoints: bool, folded: bool) -> int:
    """1 if the last layer is folded, else 0; ValueError if its residual cannot be added to a final hidden state."""
    if flag("folded", folded):
        whole_number("adapted_layers of a folded split", run.crossing_layers, 1)
        one_of("last_k of a folded split", run.last_k, (0,))
        one_of("projections of a folded split", projections, (1,))
        one_of("endpoints of a folded split", endpoints, (True,))
    return int(folded)


def ladder_run(model: ModelShape, **run: Unpack[RunSettings]) -> Run:
    """The run of a ladder: all layers are on the cloud, and training crosses no more than a forward pass."""
    described = Run(model, **run)
    one_of("first_k of a ladder", described.first_k, (0,))
    one_of("last_k of a ladder", described.last_k, (0,))
    if described.phase == "training":
        return replace(described, phase="prefill", final_hidden="all")
    return described


def _traffic(
    run: Run, down_values: int, up_values: int, endpoints: bool, bits: int, riding: int = 0, late: bool = False
) -> Traffic:
    """Add up the layers' values (each way, one position, one layer) and the end points.

    The values that ``riding`` of the layers send down come with the final hidden state, and nothing goes up for them.
    """
    bits = whole_number("bits", bits, 1, 64)
    endpoints = flag("endpoints", endpoints)
    layers = run.crossing_layers - riding
    positions = run.tokens * run.batch
    # Layers on the device after the cloud's need every position, to fill their own KV cache.
    last_only = run.phase == "prefill" and run.final_hidden == "last" and run.last_k == 0
    final_positions = run.batch if last_only else positions
    up = layers * positions * up_values
    down = (layers * positions + riding * final_positions) * down_values
    round_trips = (layers + 1) // 2 if late else layers
    if endpoints:
        up += positions * run.model.hidden
        down += final_positions * run.model.hidden
        round_trips += 1

    if run.phase == "training" and (layers or run.first_k):
        gradients_up, gradients_down, more_trips = _backward(run, down_values, up_values, endpoints, riding, late)
        up += gradients_up
        down += gradients_down
        round_trips += more_trips
    elif run.phase == "decode":
        round_trips *= run.tokens
    return Traffic(up * bits, down * bits, round_trips, positions)


def _backward(
    run: Run, down_values: int, up_values: int, endpoints: bool, riding: int, late: bool
) -> tuple[int, int, int]:
    """Values up, values down and round trips of a backward pass.

    It mirrors the forward one: gradients of outputs come down, those of inputs go up.
    """
    layers = run.crossing_layers - riding
    positions = run.tokens * run.batch
    at_end_point = positions * run.model.hidden
    # The lowest layers send no gradient of their input up where nothing before them learns.
    unanswered = 0 if run.first_k else min(layers, 1 + late)
    up = (layers - unanswered + riding) * positions * down_values
    down = layers * positions * up_values
    round_trips = layers - max(0, unanswered - 1)  # those of late layers come down together
    if endpoints:
        up += at_end_point
    if endpoints and run.first_k > 0:  # the device's own layers need the gradient at the cut
        down += at_end_point
        round_trips += 1
    if not endpoints and unanswered:
        round_trips -= 1  # the cloud waits for no answer to the last message
    return up, down, round_trips
