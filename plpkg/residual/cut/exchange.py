"""Exchanges between the two parts of a divided model: the projections of one input ask the device, once each pass.

Between the two parts there is a :class:`Transport`. The projections of one input (q, k, v) share one message each
way, and the cloud computes W x for them while the message is under way. What an adapter adds one layer late is waited
for there, so that two exchanges are under way at once. A :class:`Rider` asks nothing: its A·x goes down with the final
hidden state.
"""

from typing import Any, Protocol

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from plpkg.residual.adapter import PerThread, PrivateLoraLayer, as_places


class Transport(Protocol):
    """How the cloud reaches the device, seen from the cloud. What comes back may be of another type or place.

    ``group`` numbers the exchanges: each happens once in a forward pass, layer by layer. Tensors are
    ``(messages, batch, seq, width)``: one message a projection, ``r_c2d`` or ``r_d2c`` wide.
    """

    def send(self, group: int, u: torch.Tensor) -> None:
        """Send A·x to the device; may return before it has arrived."""

    def receive(self, group: int) -> torch.Tensor:
        """Wait for M·(A·x)."""
        ...

    def backward(self, group: int, grad_v: torch.Tensor, wanted: bool) -> torch.Tensor | None:
        """Send the gradient of what was received; where it is ``wanted``, wait for the gradient of what was sent."""


class Here(PerThread):
    """State of a pass, of each thread its own: each serves another device.

    Attributes
    ----------
    transport
        The way to the device.
    shape
        ``(batch, seq)`` of this pass. A module may see them otherwise, a shared expert as ``(batch · seq,)``.
    outputs, sent, riding
        Of this pass: projections that are not asked for yet, what exchanges have sent, and what riders have.
    """

    def __init__(self) -> None:
        self.transport: Transport | None = None
        self.shape: tuple[int, ...] = ()
        self.outputs: dict[int, tuple[torch.Tensor, dict[int, torch.Tensor]]] = {}
        self.sent: dict[int, torch.Tensor] = {}
        self.riding: dict[int, torch.Tensor] = {}


class Exchange(nn.Module):
    """The adapted projections of one input, on the cloud: one message out, one back.

    Attributes
    ----------
    base_layers
        The projections as they were.
    added
        The exchanges whose answers are added here: its own; of a late adapter that of the layer before
        (both in the last late layer).
    """

    def __init__(self, group: int, base_layers: list[nn.Module], here: Here) -> None:
        super().__init__()
        self.group = group
        self._here = here
        self.base_layers = nn.ModuleList(base_layers)
        self.added: tuple[Exchange, ...] = (self,)

    def outgoing(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor ``(messages, …, width)`` that the device gets for ``x`` ``(…, in_features)``."""
        raise NotImplementedError

    def residual(self, v: torch.Tensor, index: int) -> torch.Tensor:
        """The part of its answer ``(messages, …, width)`` for projection ``index``: ``(…, out_features)``."""
        raise NotImplementedError

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The output of projection ``index`` for ``x``: the first call for an input computes all of them."""
        computed_for, outputs = self._here.outputs.pop(self.group, (None, {}))
        if computed_for is not x or index not in outputs:
            outputs = dict(enumerate(self._compute(x)))
        result = outputs.pop(index)
        if outputs:  # the others are asked for the same input
            self._here.outputs[self.group] = (x, outputs)
        return result

    def _compute(self, x: torch.Tensor) -> list[torch.Tensor]:
        """All projections' outputs ``(…, out_features)``."""
        if self._here.transport is None:
            raise RuntimeError(f"exchange {self.group} has no device to ask")
        places = x.shape[:-1]
        is_reshaped = places != self._here.shape  # this module sees the text's places in other dimensions
        u = self.outgoing(x)
        if is_reshaped:
            u = as_places(u, self._here.shape, first=1)
        self._here.sent[self.group] = u
        self._here.transport.send(self.group, u.detach())
        result = [layer(x) for layer in self.base_layers]  # while the message is under way
        for exchange in self.added:
            v = exchange.received()
            if is_reshaped:
                v = as_places(v, places, first=1)
            result = [(y + exchange.residual(v, i)).to(y.dtype) for i, y in enumerate(result)]
        return result

    def received(self) -> torch.Tensor:
        """The device's answer to what was sent in this pass."""
        u = self._here.sent.pop(self.group)
        transport = self._here.transport
        assert transport is not None, "u was sent"
        if torch.is_grad_enabled():
            anchor = torch.zeros((), requires_grad=True)
            return _Received.apply(u, anchor, transport, self.group)
        return transport.receive(self.group).to(u)


class LowRank(Exchange):
    """PrivateLoRA's: A·x goes out, M·A·x comes back.

    Attributes
    ----------
    a, b_0, b_1, …
        ``(projections, r_c2d, in_features)``, and for each projection ``(out_features, r_d2c)``.
    """

    a: torch.Tensor

    def __init__(self, group: int, projections: list[PrivateLoraLayer], adapter_name: str, here: Here) -> None:
        super().__init__(group, [projection.base_layer for projection in projections], here)
        a = torch.stack([projection.privatelora_A[adapter_name] for projection in projections])
        self.register_buffer("a", a, persistent=False)
        for i, projection in enumerate(projections):
            self.register_buffer(f"b_{i}", projection.privatelora_B[adapter_name], persistent=False)

    def outgoing(self, x: torch.Tensor) -> torch.Tensor:
        u = nn.functional.linear(x.to(self.a.dtype), self.a.flatten(0, 1))  # all projections at once
        return u.unflatten(-1, self.a.shape[:2]).movedim(-2, 0)  # (projections, …, r_c2d)

    def residual(self, v: torch.Tensor, index: int) -> torch.Tensor:
        return nn.functional.linear(v[index], getattr(self, f"b_{index}"))


class FullActivations(Exchange):
    """LoRA's, for comparison with PrivateLoRA: all of it is on the device, x goes out, every B·A·x comes back."""

    def __init__(self, group: int, projections: list[LoraLayer], here: Here) -> None:
        super().__init__(group, [projection.base_layer for projection in projections], here)
        self.widths: list[Any] = [projection.out_features for projection in projections]  # whole numbers

    def outgoing(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def residual(self, v: torch.Tensor, index: int) -> torch.Tensor:
        return v[0].split(self.widths, dim=-1)[index]


class _Received(torch.autograd.Function):
    """Forward: send u, receive v. Backward: send the gradient of v, receive the gradient of u.

    The second input is there to require a gradient: M learns even where nothing before it does, and asks for u's
    gradient, as in the lowest layer.
    """

    @staticmethod
    def forward(ctx, u, _anchor, transport, group):
        ctx.transport = transport
        ctx.group = group
        return transport.receive(group).to(u)

    @staticmethod
    def backward(ctx, grad_v):
        wanted = ctx.needs_input_grad[0]
        grad_u = ctx.transport.backward(ctx.group, grad_v, wanted)
        if wanted:
            grad_u = grad_u.to(grad_v)
        return grad_u, None, None, None  # none of the anchor, the transport and the number


class Projection(nn.Module):
    """Stands where a projection stood, and asks its exchange."""

    def __init__(self, exchange: Exchange, index: int) -> None:
        super().__init__()
        self.index = index
        self._exchange = [exchange]  # in a list, so that its tensors are not this module's as well

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange[0].output(self.index, x)


class Rider(nn.Module):
    """Stands where a projection stood whose A·x goes down with the final hidden state.

    Attributes
    ----------
    base_layer, a
        The projection as it was, and ``(rank, in_features)``.
    added
        The exchanges whose answers are added here: of a late adapter that of the layer before.
    """

    a: torch.Tensor

    def __init__(self, seat: int, base_layer: nn.Module, a: torch.Tensor, here: Here) -> None:
        super().__init__()
        self.seat = seat
        self.base_layer = base_layer
        self._here = here
        self.added: tuple[Exchange, ...] = ()
        self.register_buffer("a", a, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        riding = nn.functional.linear(x.to(self.a.dtype), self.a)
        self._here.riding[self.seat] = as_places(riding, self._here.shape)  # (batch, seq, rank)
        result = self.base_layer(x)
        for exchange in self.added:
            v = as_places(exchange.received(), x.shape[:-1], first=1)
            result = (result + exchange.residual(v, 0)).to(result.dtype)
        return result
