"""The sum of clipped per-sample gradients of any model, in several executions that give the same numbers.

* ``loop``: one example at a time through autograd: the definition, and the oracle of all others.
* ``per_sample``: every example's gradient is built and kept, as DP-SGD says. Memory grows with batch × weights.
* ``fast``: fast gradient clipping (Lee & Kifer, arXiv 2009.03106): gradients are built layer by layer for their
  norms, and dropped; a second backward pass adds them up.
* ``ghost``: the same with norms from Gram matrices (Li et al., arXiv 2110.05679): nothing of a weight's size is built.
* ``book_keeping``: one pass (Bu et al., arXiv 2210.00038). Gradients are kept, or factors where those are much smaller.
* ``auto``: what :func:`plpkg.clipping.plan` finds fastest within a memory budget.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from plpkg.clipping.batches import batch_size, examples, leaves
from plpkg.clipping.clip import Clip, check_finite, clip_dense
from plpkg.clipping.execution import EXECUTIONS, Execution
from plpkg.clipping.planner import Plan, cheapest, watch
from plpkg.clipping.recorder import Recorder
from plpkg.validation import one_of


def clipped_gradients(
    model: torch.nn.Module,
    loss_per_example: Callable,
    batch,
    max_grad_norm: float,
    execution: str | Plan | Execution = "book_keeping",
    *,
    clipping: str = "flat",
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Clip each example's gradient and add them up.

    Parameters
    ----------
    model
        Its parameters with ``requires_grad`` are those whose gradients are wanted. Their ``.grad`` stay as they are.
    loss_per_example
        ``loss_per_example(model, batch)`` gives one loss an example, ``(batch,)``; an example's loss depends on that
        example alone. Of three examples that is checked whenever the function is another object than before.
    batch
        A tensor, or tensors in tuples, lists and mappings; the first dimension of each is the batch.
    max_grad_norm
        C, the L2 norm beyond which an example's gradient is scaled down.
    execution
        A name of the module's list, or a :class:`Plan`. ``auto`` makes a plan for ghost clipping's memory in
        its first step with a batch of this shape, which is slow, and remembers it.
    clipping
        ``flat``, ``automatic`` or ``per_layer``: see :mod:`plpkg.clipping.clip`.

    Returns
    -------
    (gradients, norms)
        By parameter name the sum over examples of clipped gradients, in the parameter's shape and at least float32;
        the norms before clipping, ``(batch,)``.

    Raises
    ------
    ValueError
        Bad arguments, a loss that is not one an example, a layer that mixes examples, a layer without the batch first.
    NotImplementedError
        A gradient that cannot be taken apart; the message names the parameter or the layer.
    FloatingPointError
        A gradient that is not finite.
    """
    clip = Clip(max_grad_norm, clipping)
    if isinstance(execution, Plan):
        execution = execution.execution
    if not isinstance(execution, Execution):
        one_of("execution", execution, ("loop", "auto", *EXECUTIONS))
    recorder = Recorder(model)
    try:
        if execution == "loop":
            return _loop(model, loss_per_example, batch, clip, recorder)
        if execution == "auto":
            return _auto(model, loss_per_example, batch, clip, recorder)
        chosen = EXECUTIONS[execution] if isinstance(execution, str) else execution
        return _recorded(model, loss_per_example, batch, clip, recorder, chosen)
    finally:
        recorder.remove()


def plan(model: torch.nn.Module, loss_per_example: Callable, batch, *, memory_bytes: int | None = None) -> Plan:
    """Find the fastest execution that fits a memory budget, from one watched step.

    Parameters
    ----------
    model, loss_per_example, batch
        What :func:`clipped_gradients` takes; the batch is as large as it will be.
    memory_bytes
        Live bytes at the peak of a step, parameters and gradients included; by default what ghost clipping needs.

    Returns
    -------
    Plan
        To be given as ``execution``.

    Raises
    ------
    ValueError
        Nothing fits in ``memory_bytes``; and what :func:`clipped_gradients` raises.
    """
    recorder = Recorder(model)
    try:
        return cheapest(_watched(model, loss_per_example, batch, Clip(1.0), recorder)[1], memory_bytes)
    finally:
        recorder.remove()


def _recorded(model, loss_per_example, batch, clip: Clip, recorder: Recorder, execution: Execution):
    count = batch_size(batch)
    if count == 0:  # many models cannot run on no examples
        zeros = {name: zeros_for(p) for name, p in recorder.parameters.items()}
        return zeros, next(iter(zeros.values())).new_zeros(0)
    with _remembered(recorder, loss_per_example), recorder.watch(count):
        losses = loss_per_example(model, batch)
        check_losses(losses, count)
        sums, norms = recorder.clipped_sums(losses, clip, execution)
    return {key: zeros_for(p) if sums[key] is None else sums[key] for key, p in recorder.parameters.items()}, norms


def _watched(model, loss_per_example, batch, clip: Clip, recorder: Recorder):
    with _remembered(recorder, loss_per_example), recorder.watch(batch_size(batch)):  # its passes are not the step's
        losses = loss_per_example(model, batch)
        check_losses(losses, batch_size(batch))
        recorder.verify(losses)
        del losses
    return watch(model, lambda execution: _recorded(model, loss_per_example, batch, clip, recorder, execution))


@contextmanager
def _remembered(recorder: Recorder, loss_per_example: Callable) -> Iterator[None]:
    """What was verified last with a model, its trainable parameters and a loss is not verified again."""
    parts = getattr(loss_per_example, "__func__", loss_per_example), getattr(loss_per_example, "__self__", None)
    try:  # the objects, not their code: two closures of the same code may compute different things
        case = tuple(recorder.parameters), tuple(part if part is None else weakref.ref(part) for part in parts)
    except TypeError:  # an object that no weak reference may point to
        case = None
    recorder.verified = case is not None and _VERIFIED.get(recorder.model) == case
    yield
    if recorder.verified and case is not None:
        _VERIFIED[recorder.model] = case


_VERIFIED: weakref.WeakKeyDictionary[torch.nn.Module, tuple] = weakref.WeakKeyDictionary()
_PLANS: weakref.WeakKeyDictionary[torch.nn.Module, dict] = weakref.WeakKeyDictionary()


def _auto(model, loss_per_example, batch, clip: Clip, recorder: Recorder):
    """The first step with a model, its trainable parameters and a batch's shape is the one that is watched."""
    if clip.local or batch_size(batch) == 0:  # nothing is kept beyond a layer: there is nothing to plan
        return _recorded(model, loss_per_example, batch, clip, recorder, EXECUTIONS["per_sample"])
    plans = _PLANS.setdefault(model, {})
    key = tuple(recorder.parameters), tuple(tuple(leaf.shape) for leaf in leaves(batch))
    if key not in plans:
        result, watched = _watched(model, loss_per_example, batch, clip, recorder)
        plans[key] = cheapest(watched)
        return result
    return _recorded(model, loss_per_example, batch, clip, recorder, plans[key].execution)


def _loop(model, loss_per_example, batch, clip: Clip, recorder: Recorder):
    parameters = recorder.parameters
    before = {name: p.grad for name, p in parameters.items()}
    totals, norms = {name: zeros_for(p) for name, p in parameters.items()}, []
    try:
        for place in range(batch_size(batch)):
            for p in parameters.values():
                p.grad = None
            losses = loss_per_example(model, examples(batch, slice(place, place + 1)))
            check_losses(losses, 1)
            losses.sum().backward()
            dense = {
                n: (zeros_for(p) if p.grad is None else p.grad.to(totals[n].dtype))[None] for n, p in parameters.items()
            }
            sums, norm = clip_dense(dense, recorder.layers, clip)
            norms.append(norm)
            check_finite(norm, place, batch_size(batch))
            for name, part in sums.items():
                totals[name] += part
    finally:
        for name, p in parameters.items():
            p.grad = before[name]
    return totals, torch.cat(norms) if norms else next(iter(totals.values())).new_zeros(0)


def zeros_for(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros of a parameter's shape, at least float32."""
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))


def check_losses(losses: object, count: int) -> None:
    """One loss an example, or a sentence.

    Raises
    ------
    ValueError
        Another shape, no gradient, or not a tensor.
    """
    if not isinstance(losses, torch.Tensor):
        raise ValueError(f"the losses must be a tensor with one loss an example, got {type(losses).__name__}")
    if losses.shape != (count,):
        hint = " (a reduced loss? take reduction='none' and each example's own mean)" if losses.ndim == 0 else ""
        raise ValueError(f"the losses must be one an example, of shape ({count},), got {tuple(losses.shape)}{hint}")
    if not losses.requires_grad:
        raise ValueError("the losses do not depend on any parameter that learns")
