"""The sum of clipped per-sample gradients of any model, in several executions that give the same numbers.

* ``loop``: one sample at a time through autograd: the definition, and the oracle of all others.
* ``per_sample``: every sample's gradient is built and kept: what DP-SGD's name says. Memory grows with batch × weights.
* ``fast``: fast gradient clipping (Lee & Kifer, arXiv 2009.03106): gradients are built layer by layer for their
  norms, and dropped; a second backward pass adds them up.
* ``ghost``: the same with norms from Gram matrices (Li et al., arXiv 2110.05679): nothing of a weight's size is built.
* ``book_keeping``: one pass (Bu et al., arXiv 2210.00038). Gradients are kept, or factors where those are much smaller.
* ``auto``: what :func:`plpkg.clipping.plan` finds fastest within a memory budget.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from plpkg.clipping.clip import Clip, check_finite, clip_dense
from plpkg.clipping.execution import EXECUTIONS, Execution
from plpkg.clipping.planner import Plan, cheapest, watch
from plpkg.clipping.recorder import Recorder
from plpkg.validation import one_of


def clipped_gradients(
    model: torch.nn.Module,
    loss_per_sample: Callable,
    batch,
    max_grad_norm: float,
    execution: str | Plan | Execution = "book_keeping",
    *,
    clipping: str = "flat",
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Clip each sample's gradient and add them up.

    Parameters
    ----------
    model
        Its parameters with ``requires_grad`` are those whose gradients are wanted. Their ``.grad`` stay as they are.
    loss_per_sample
        ``loss_per_sample(model, batch)`` gives one loss a sample, ``(batch,)``; a sample's loss depends on that
        sample alone. Of three samples that is checked whenever the function is another object than before.
    batch
        A tensor, or tensors in tuples, lists and mappings; the first dimension of each is the batch.
    max_grad_norm
        C, the L2 norm beyond which a sample's gradient is scaled down.
    execution
        A name of the module's list, or what :func:`plan` found. ``auto`` makes a plan for ghost clipping's memory in
        its first step with a batch of this shape, which is slow, and remembers it.
    clipping
        ``flat``, ``automatic`` or ``per_layer``: see :mod:`plpkg.clipping.clip`.

    Returns
    -------
    (gradients, norms)
        By parameter name the sum over samples of clipped gradients, in the parameter's shape and at least float32;
        the norms before clipping, ``(batch,)``.

    Raises
    ------
    ValueError
        Bad arguments, a loss that is not one a sample, a layer that mixes samples, a layer without the batch first.
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
            return _loop(model, loss_per_sample, batch, clip, recorder)
        if execution == "auto":
            return _auto(model, loss_per_sample, batch, clip, recorder)
        chosen = EXECUTIONS[execution] if isinstance(execution, str) else execution
        return _recorded(model, loss_per_sample, batch, clip, recorder, chosen)
    finally:
        recorder.remove()


def plan(model: torch.nn.Module, loss_per_sample: Callable, batch, *, memory_bytes: int | None = None) -> Plan:
    """Find the fastest execution that fits a memory budget, from one watched step.

    Parameters
    ----------
    model, loss_per_sample, batch
        As for :func:`clipped_gradients`; the batch as large as it will be.
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
        return cheapest(_watched(model, loss_per_sample, batch, Clip(1.0), recorder)[1], memory_bytes)
    finally:
        recorder.remove()


def _recorded(model, loss_per_sample, batch, clip: Clip, recorder: Recorder, execution: Execution):
    count = batch_size(batch)
    if count == 0:  # many models cannot run on no samples
        zeros = {name: zeros_for(p) for name, p in recorder.parameters.items()}
        return zeros, next(iter(zeros.values())).new_zeros(0)
    with _remembered(recorder, loss_per_sample), recorder.watch(count):
        losses = loss_per_sample(model, batch)
        check_losses(losses, count)
        sums, norms = recorder.clipped_sums(losses, clip, execution)
    return {key: zeros_for(p) if sums[key] is None else sums[key] for key, p in recorder.parameters.items()}, norms


def _watched(model, loss_per_sample, batch, clip: Clip, recorder: Recorder):
    with _remembered(recorder, loss_per_sample), recorder.watch(batch_size(batch)):  # its passes are not the step's
        losses = loss_per_sample(model, batch)
        check_losses(losses, batch_size(batch))
        recorder.verify(losses)
        del losses
    return watch(model, lambda execution: _recorded(model, loss_per_sample, batch, clip, recorder, execution))


@contextmanager
def _remembered(recorder: Recorder, loss_per_sample: Callable) -> Iterator[None]:
    """What was verified last with a model, its trainable parameters and a loss is not verified again."""
    parts = getattr(loss_per_sample, "__func__", loss_per_sample), getattr(loss_per_sample, "__self__", None)
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


def _auto(model, loss_per_sample, batch, clip: Clip, recorder: Recorder):
    """The first step with a model, its trainable parameters and a batch's shape is the one that is watched."""
    if clip.local or batch_size(batch) == 0:  # nothing is kept beyond a layer: there is nothing to plan
        return _recorded(model, loss_per_sample, batch, clip, recorder, EXECUTIONS["per_sample"])
    plans = _PLANS.setdefault(model, {})
    key = tuple(recorder.parameters), tuple(tuple(leaf.shape) for leaf in leaves(batch))
    if key not in plans:
        result, watched = _watched(model, loss_per_sample, batch, clip, recorder)
        plans[key] = cheapest(watched)
        return result
    return _recorded(model, loss_per_sample, batch, clip, recorder, plans[key].execution)


def _loop(model, loss_per_sample, batch, clip: Clip, recorder: Recorder):
    parameters = recorder.parameters
    before = {name: p.grad for name, p in parameters.items()}
    totals, norms = {name: zeros_for(p) for name, p in parameters.items()}, []
    try:
        for place in range(batch_size(batch)):
            for p in parameters.values():
                p.grad = None
            losses = loss_per_sample(model, samples(batch, slice(place, place + 1)))
            check_losses(losses, 1)
            losses.sum().backward()
            own = {
                n: (zeros_for(p) if p.grad is None else p.grad.to(totals[n].dtype))[None] for n, p in parameters.items()
            }
            sums, norm = clip_dense(own, recorder.layers, clip)
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
    """One loss a sample, or a sentence.

    Raises
    ------
    ValueError
        Another shape, no gradient, or not a tensor.
    """
    if not isinstance(losses, torch.Tensor):
        raise ValueError(f"the losses must be a tensor with one loss a sample, got {type(losses).__name__}")
    if losses.shape != (count,):
        hint = " (a reduced loss? take reduction='none' and each sample's own mean)" if losses.ndim == 0 else ""
        raise ValueError(f"the losses must be one a sample, of shape ({count},), got {tuple(losses.shape)}{hint}")
    if not losses.requires_grad:
        raise ValueError("the losses do not depend on any parameter that learns")


def leaves(batch) -> list[torch.Tensor]:
    """The tensors of a batch, also inside of mappings that are not dictionaries (transformers' BatchEncoding)."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [leaf for value in batch.values() for leaf in leaves(value)]
    if isinstance(batch, (tuple, list)):
        return [leaf for value in batch for leaf in leaves(value)]
    return []


def samples(batch, index):
    """The batch of some of its samples: every tensor's first dimension indexed alike."""
    if isinstance(batch, torch.Tensor):
        return batch[index]
    if isinstance(batch, Mapping):
        return {key: samples(value, index) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(samples(value, index) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(samples(value, index) for value in batch)
    return batch


def batch_size(batch) -> int:
    """How many samples a batch has.

    Raises
    ------
    ValueError
        No tensors, or tensors that do not agree.
    """
    shapes = [tuple(leaf.shape) for leaf in leaves(batch)]
    counts = {shape[0] if shape else None for shape in shapes}
    if len(counts) != 1 or None in counts:
        found = f"shapes {shapes}" if shapes else f"no tensor in a {type(batch).__name__}"
        raise ValueError(f"the tensors of a batch must have one first dimension in common, got {found}")
    return counts.pop()
