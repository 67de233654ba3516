"""One training step, there and back: the gradients of what learns on the device."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from plpkg.residual.cut.device_part import DevicePart, Gradients
from plpkg.residual.wire.remote_layers import RemoteLayers
from plpkg.residual.wire.tensors import pack, unpack
from plpkg.residual.wire.wire_pb2 import Part


class Learner:
    """Gradients of every M, and of what else learns on the device.

    Parameters
    ----------
    layers
        The cloud's.
    """

    def __init__(self, layers: RemoteLayers) -> None:
        self._layers = layers

    def gradients(
        self, ids: torch.Tensor, targets: torch.Tensor, items: Sequence[int], trainable: Iterable[torch.nn.Parameter]
    ) -> tuple[list[float], list[Gradients]]:
        """The losses and the gradients of as many equal chunks of a batch as there are ``items``.

        A chunk's loss is the sum over its targets, divided by its ``items``. Nothing of a chunk depends on another one.

        Parameters
        ----------
        ids, targets
            ``(batch, seq)`` and ``(batch, seq - 1)``: token ids, and what follows each but the last; -100 is nothing.
        trainable
            The parameters that learn.

        Raises
        ------
        FloatingPointError
            A loss is not finite.
        """
        every_m = set(self._layers.part.matrices.parameters())
        beside_m = [parameter for parameter in trainable if parameter not in every_m]
        return self._layers.wire.step(self._there_and_back, ids, targets, items, beside_m)

    def _there_and_back(
        self, ids: torch.Tensor, targets: torch.Tensor, items: Sequence[int], beside_m: list[torch.nn.Parameter]
    ) -> tuple[list[float], list[Gradients]]:
        """:meth:`gradients` in one go: begun again, with nothing kept, if the stream breaks."""
        device = self._layers.part
        wire = self._layers.wire
        dtype = self._layers.dtype

        # 1. Up: the embeddings of all chunks, as one batch.
        embedded = [device.embed(chunk) for chunk in ids.chunk(len(items))]
        learns_below = embedded[0].requires_grad  # layers that the device keeps, before the cloud's
        hidden = torch.cat(embedded).detach()  # (batch, seq, hidden)

        # 2. Every M: the cloud's layers ask the device for each M·u, and give the final hidden states.
        final = self._layers(hidden, ids.shape[1], train=len(items), input_gradient=learns_below)

        # 3. Loss: each chunk's own, down to the final hidden states.
        losses = _losses(device, final, targets, items, beside_m)
        values = [loss.value for loss in losses]
        gradients = [loss.gradients for loss in losses]
        if not (device.matrices or learns_below):
            return values, gradients  # nothing that learns is before the cloud's final hidden states

        # 4. Back: the cloud goes back through its layers, and asks for the gradient of each u.
        scales = [loss.scale for loss in losses]
        wire.send(grad_hidden=pack(torch.cat([loss.grad_final for loss in losses]), dtype))
        self._back_through_every_m(ids.shape, gradients, scales)

        # 5. Embedding: the gradient of what went up, for what learns before it.
        if learns_below:
            grad_hidden = unpack(wire.receive("grad_hidden"), tuple(hidden.shape), dtype).to(hidden)
            grads = grad_hidden.chunk(len(items))
            for vectors, grad, scale, found in zip(embedded, grads, scales, gradients, strict=True):
                of_chunk = torch.autograd.grad(vectors, beside_m, grad / scale, allow_unused=True)
                _add(found, beside_m, of_chunk)
        return values, gradients

    def _back_through_every_m(
        self, batch_and_seq: tuple[int, ...], gradients: list[Gradients], scales: list[float]
    ) -> None:
        """Answer each exchange of the way back, and add each chunk's gradients of M to ``gradients``."""
        device = self._layers.part
        wire = self._layers.wire
        due = set(range(len(device.matrices)))
        answered = True  # what was sent last asks for an answer: that is a round trip
        while due:
            exchange = wire.receive("grad_output", round_trips=int(answered))
            grad_v = self._layers.unpacked(exchange, due, batch_and_seq, wire.terms.r_d2c)
            grad_u, by_chunk = device.residual_backward(exchange.group, grad_v)
            for of_m, scale, found in zip(by_chunk, scales, gradients, strict=True):
                _add(found, of_m, [gradient / scale for gradient in of_m.values()])
            answered = not exchange.unanswered  # nothing needs the gradient of the lowest layer's u
            if answered:
                wire.send(grad_input=Part(group=exchange.group, data=pack(grad_u, self._layers.dtype)))


class _Loss(NamedTuple):
    """A chunk's loss, and its gradients on this side of the cloud's layers.

    ``grad_final (rows, seq, width)`` is the gradient of the final hidden states times ``scale``; ``gradients`` are
    those of what learns beside M, and as they are.
    """

    value: float
    grad_final: torch.Tensor
    scale: float
    gradients: Gradients


def _losses(
    device: DevicePart,
    final: torch.Tensor,
    targets: torch.Tensor,
    items: Sequence[int],
    beside_m: list[torch.nn.Parameter],
) -> list[_Loss]:
    """Each chunk's loss, of the final hidden states ``(batch, seq, width)`` and of targets ``(batch, seq - 1)``."""
    losses = []
    for states, labels, count in zip(final.chunk(len(items)), targets.chunk(len(items)), items, strict=True):
        states.requires_grad_()
        logits = device.logits(states)[:, :-1].flatten(0, 1).float()  # (rows · (seq - 1), vocab)
        total = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
        loss = total / count
        if not loss.isfinite():
            raise FloatingPointError(f"the loss is {loss.item()}")
        grad_final, *others = torch.autograd.grad(loss, [states, *beside_m], allow_unused=True)
        scale = _scale(grad_final)
        gradients: Gradients = {}
        _add(gradients, beside_m, others)
        losses.append(_Loss(loss.item(), grad_final * scale, scale, gradients))
    return losses


def _scale(gradient: torch.Tensor) -> float:
    """A power of two that brings a gradient to where the wire's precision is good; the way back is linear."""
    _, exponent = math.frexp(gradient.abs().max().item())
    return 2.0 ** min(126, -exponent)  # float32 has no larger one


def _add(gradients: Gradients, parameters: Iterable[torch.nn.Parameter], found: Iterable[torch.Tensor | None]) -> None:
    """Add to each parameter's gradient; ``None`` where nothing depends on it."""
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is not None:
            gradients[parameter] = gradients.get(parameter, 0) + gradient
