"""A training step that goes there and back: the gradients of what learns on the device."""

import math
from collections.abc import Iterable, Sequence

import torch

from plpkg.residual.cut.device_part import Gradients
from plpkg.residual.wire.layers import RemoteLayers
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
        """The losses and the gradients of as many equal parts of a batch as there are ``items``.

        A part's loss is the sum over its targets, divided by its ``items``. Nothing of a part depends on another one.

        Parameters
        ----------
        ids, targets
            ``(batch, seq)`` and ``(batch, seq - 1)``: token ids, and what follows each but the last; -100 is nothing.
        trainable
            What learns.

        Raises
        ------
        FloatingPointError
            A loss is not finite.
        """
        of_m = set(self._layers.part.matrices.parameters())
        here = [parameter for parameter in trainable if parameter not in of_m]
        return self._layers.wire.step(self._there_and_back, ids, targets, items, here)

    def _there_and_back(
        self, ids: torch.Tensor, targets: torch.Tensor, items: Sequence[int], here: list[torch.nn.Parameter]
    ) -> tuple[list[float], list[Gradients]]:
        """``here`` learns beside M."""
        part, wire, dtype = self._layers.part, self._layers.wire, self._layers.dtype
        gradients: list[Gradients] = [{} for _ in items]
        embedded = [part.embed(some) for some in ids.chunk(len(items))]
        hidden, input_gradient = torch.cat(embedded).detach(), embedded[0].requires_grad
        final = self._layers(hidden, ids.shape[1], train=len(items), input_gradient=input_gradient)
        losses, back, scales = [], [], []
        of_parts = zip(final.chunk(len(items)), targets.chunk(len(items)), items, gradients, strict=True)
        for arrived, labels, count, found in of_parts:
            arrived.requires_grad_()
            logits = part.logits(arrived)[:, :-1].flatten(0, 1).float()
            loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
            loss = loss / count
            if not loss.isfinite():
                raise FloatingPointError(f"the loss is {loss.item()}")
            grad, *others = torch.autograd.grad(loss, [arrived, *here], allow_unused=True)
            _add(found, here, others)
            # A power of two brings the gradients to where the wire's precision is good; the way back is linear.
            scales.append(2.0 ** min(126, -math.frexp(grad.abs().max().item())[1]))  # float32 has no larger one
            back.append(grad * scales[-1])
            losses.append(loss.item())
        if not (part.matrices or input_gradient):
            return losses, gradients  # nothing that learns is before the cloud's layers
        wire.send(grad_hidden=pack(torch.cat(back), dtype))
        due, sent = set(range(len(part.matrices))), True
        while due:
            exchange = wire.receive("grad_output", round_trips=int(sent))
            grad_v = self._layers.of(exchange, due, ids.shape, wire.terms.r_d2c)
            grad_u, each = part.residual_backward(exchange.group, grad_v)
            for found, scaled, scale in zip(gradients, each, scales, strict=True):
                _add(found, scaled, [gradient / scale for gradient in scaled.values()])
            if sent := not exchange.unanswered:
                wire.send(grad_input=Part(group=exchange.group, data=pack(grad_u, dtype)))
        if input_gradient:
            grad = unpack(wire.receive("grad_hidden"), tuple(hidden.shape), dtype).to(hidden)
            for found, sent_up, some, scale in zip(gradients, embedded, grad.chunk(len(items)), scales, strict=True):
                _add(found, here, torch.autograd.grad(sent_up, here, some / scale, allow_unused=True))
        return losses, gradients


def _add(gradients: Gradients, parameters: Iterable[torch.nn.Parameter], found: Iterable[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is not None:
            gradients[parameter] = gradients.get(parameter, 0) + gradient
