"""The two parts of a cut model and what passes between them: exchanges on the cloud, every M on the device.

Between the two parts there is a :class:`Transport`; :class:`Direct` calls the device's functions in the same process,
so that the cut can be tested against the uncut model. The projections of one input (q, k, v) share one message each
way, and the cloud computes W x for them while the message is under way.

Training crosses the cut as well: the device holds labels and loss, the cloud goes back through its layers and
asks the device at each exchange, which adds to M's gradient and answers with the gradient of what it received.
"""

import copy
import threading
from dataclasses import dataclass
from typing import Protocol

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from plpkg.residual.adapter import PrivateLoraLayer


class Transport(Protocol):
    """How the cloud reaches the device, seen from the cloud. What comes back may be of another type or place.

    ``group`` numbers the exchanges: each happens once in a forward pass, layer by layer. Tensors are
    ``(messages, batch, seq, width)``: one message a projection, ``r_c2d`` or ``r_d2c`` wide.
    """

    def send(self, group: int, u: torch.Tensor) -> None:
        """Send A·x to the device; may return before it has arrived."""

    def receive(self, group: int) -> torch.Tensor:
        """Wait for M·(A·x)."""

    def backward(self, group: int, grad_v: torch.Tensor) -> torch.Tensor:
        """Send the gradient of what was received, and wait for the gradient of what was sent."""


class PerThread(threading.local):
    """Attributes that each thread has for itself; a copy, pickled or not, begins anew."""

    def __reduce__(self) -> tuple:
        return type(self), ()


class Here(PerThread):
    """What a thread has under way: each serves another device."""

    def __init__(self) -> None:
        self.transport: Transport | None = None
        self.outputs: dict[int, tuple[torch.Tensor, dict[int, torch.Tensor]]] = {}


class Exchange(nn.Module):
    """The adapted projections of one input, on the cloud: one message out, one back.

    Attributes
    ----------
    base_layers
        The projections as they were.
    """

    def __init__(self, group: int, base_layers: list[nn.Module], here: Here) -> None:
        super().__init__()
        self.group, self._here = group, here
        self.base_layers = nn.ModuleList(base_layers)

    def outgoing(self, x: torch.Tensor) -> torch.Tensor:
        """What the device gets for ``x`` ``(batch, seq, in_features)``: ``(messages, batch, seq, width)``."""
        raise NotImplementedError

    def residual(self, v: torch.Tensor, index: int) -> torch.Tensor:
        """What its answer adds to projection ``index``: ``(batch, seq, out_features)``."""
        raise NotImplementedError

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """What projection ``index`` gives for ``x``: the first call for an input computes all of them."""
        computed_for, outputs = self._here.outputs.pop(self.group, (None, {}))
        if computed_for is not x or index not in outputs:
            outputs = dict(enumerate(self._compute(x)))
        result = outputs.pop(index)
        if outputs:
            self._here.outputs[self.group] = x, outputs
        return result

    def _compute(self, x: torch.Tensor) -> list[torch.Tensor]:
        transport = self._here.transport
        if transport is None:
            raise RuntimeError(f"exchange {self.group} has no device to ask")
        u = self.outgoing(x)
        transport.send(self.group, u.detach())
        base = [layer(x) for layer in self.base_layers]  # while the message is under way
        if torch.is_grad_enabled():
            v = _Received.apply(u, torch.zeros((), requires_grad=True), transport, self.group)
        else:
            v = transport.receive(self.group).to(u)
        return [(y + self.residual(v, i)).to(y.dtype) for i, y in enumerate(base)]


class LowRank(Exchange):
    """PrivateLoRA's: A·x goes out, M·A·x comes back.

    Attributes
    ----------
    a, b_0, b_1, …
        ``(projections, r_c2d, in_features)``, and for each projection ``(out_features, r_d2c)``.
    """

    def __init__(self, group: int, projections: list[PrivateLoraLayer], adapter_name: str, here: Here) -> None:
        super().__init__(group, [projection.base_layer for projection in projections], here)
        self.register_buffer("a", torch.stack([p.privatelora_A[adapter_name] for p in projections]), persistent=False)
        for i, projection in enumerate(projections):
            self.register_buffer(f"b_{i}", projection.privatelora_B[adapter_name], persistent=False)

    def outgoing(self, x: torch.Tensor) -> torch.Tensor:
        u = nn.functional.linear(x.to(self.a.dtype), self.a.flatten(0, 1))  # all projections at once
        return u.unflatten(-1, self.a.shape[:2]).movedim(2, 0)  # (projections, batch, seq, r_c2d)

    def residual(self, v: torch.Tensor, index: int) -> torch.Tensor:
        return nn.functional.linear(v[index], getattr(self, f"b_{index}"))


class FullActivations(Exchange):
    """What PrivateLoRA is compared with: all of LoRA is on the device, x goes out, every B·A·x comes back."""

    def __init__(self, group: int, projections: list[LoraLayer], here: Here) -> None:
        super().__init__(group, [projection.base_layer for projection in projections], here)
        self.widths = [projection.out_features for projection in projections]

    def outgoing(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def residual(self, v: torch.Tensor, index: int) -> torch.Tensor:
        return v[0].split(self.widths, dim=-1)[index]


class LoraBranches(nn.Module):
    """The device's side of :class:`FullActivations`: every projection's B·A·x, side by side."""

    def __init__(self, projections: list[LoraLayer], adapter_name: str) -> None:
        super().__init__()
        self.a = nn.ModuleList(p.lora_A[adapter_name] for p in projections)
        self.b = nn.ModuleList(p.lora_B[adapter_name] for p in projections)
        self.scaling = [p.scaling[adapter_name] for p in projections]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([b(a(x)) * scale for a, b, scale in zip(self.a, self.b, self.scaling, strict=True)], dim=-1)


class _Received(torch.autograd.Function):
    """Receives v for u, and in the backward pass hands v's gradient over for u's.

    The second input is there to require a gradient: M learns even where nothing before it does.
    """

    @staticmethod
    def forward(ctx, u, _anchor, transport, group):
        ctx.transport, ctx.group = transport, group
        return transport.receive(group).to(u)

    @staticmethod
    def backward(ctx, grad_v):
        return ctx.transport.backward(ctx.group, grad_v).to(grad_v), None, None, None


class OwnInEachThread(nn.Module):
    """A module that every thread has a copy of: rotary embeddings may change with the length of what they last saw."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self._own = module, PerThread()

    def forward(self, *args, **options):
        if not hasattr(self._own, "module"):
            with torch.inference_mode(False):  # it may be trained through later
                self._own.module = copy.deepcopy(self.module)
        return self._own.module(*args, **options)

    def _apply(self, *args, **options) -> nn.Module:
        self._own = PerThread()  # the copies would stay where they are
        return super()._apply(*args, **options)


class Projection(nn.Module):
    """Stands where a projection stood, and asks its exchange."""

    def __init__(self, exchange: Exchange, index: int) -> None:
        super().__init__()
        self.index = index
        self._exchange = [exchange]  # in a list, so that its tensors are not this module's as well

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange[0].output(self.index, x)


class CloudPart(nn.Module):
    """The decoder layers that the device does not keep, frozen, with A and B.

    Attributes
    ----------
    decoder
        A Hugging Face decoder without embedding, which takes ``inputs_embeds``.
    exchanges
        By their number: layer by layer.
    """

    def __init__(self, decoder: nn.Module, exchanges: list[Exchange], here: Here) -> None:
        super().__init__()
        self.decoder, self._here = decoder, here
        self.exchanges = nn.ModuleList(exchanges)
        self.requires_grad_(False)

    def connect(self, transport: Transport | None) -> None:
        """Let what this thread computes from now on go through ``transport``: other threads have their own."""
        self._here.transport = transport
        self._here.outputs.clear()

    def new_cache(self) -> DynamicCache:
        """An empty KV cache for these layers.

        Raises
        ------
        ValueError
            Layers whose cache is overwritten in place, such as linear attention's: a step could not be taken back.
        """
        cache = DynamicCache(config=self.decoder.config)
        for layer in cache.layers:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise ValueError(f"a {type(layer).__name__} cannot be taken back to where it was before a step")
        return cache

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: DynamicCache | None = None,
    ) -> torch.Tensor:
        """Run the layers: ``(batch, seq, hidden)`` in and out."""
        return _run(self.decoder, hidden, attention_mask, position_ids, cache)


@dataclass
class DeviceCache:
    """What the device remembers of a sequence.

    Attributes
    ----------
    first, last
        The KV caches of its own layers.
    seen
        How many tokens it has seen.
    stacked
        Of each exchange its M as they were when the sequence began, ``(projections, 1, r_c2d, r_d2c)``, so that one
        product does for all; ``None`` where they are not plain matrices.
    """

    first: DynamicCache | None
    last: DynamicCache | None
    seen: int = 0
    stacked: tuple[torch.Tensor | None, ...] = ()


class DevicePart(nn.Module):
    """Embedding, LM head, every M, and the layers that the device keeps.

    Attributes
    ----------
    embedding, positions
        Token embedding, and GPT-2's position embedding (else ``None``).
    first, last
        Decoders of the layers before and after the cloud's, or ``None``.
    matrices
        For each exchange its M: ``nn.Linear(r_c2d, r_d2c, bias=False)``; or a :class:`LoraBranches`.
    ranks
        ``(r_c2d, r_d2c)``.
    lm_head
        From hidden states to logits.
    """

    def __init__(
        self, embedding, positions, first, last, matrices, ranks: tuple[int, int], lm_head, softcap: float | None
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.embedding, self.positions = embedding, positions
        self.first, self.last = first, last
        self.matrices = nn.ModuleList(nn.ModuleList(group) for group in matrices)
        self.lm_head = lm_head
        self.softcap = softcap
        self._asked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def new_cache(self) -> DeviceCache:
        """For a new sequence."""
        first, last = (part and DynamicCache(config=part.config) for part in (self.first, self.last))
        return DeviceCache(first, last, stacked=tuple(_stacked(group) for group in self.matrices))

    def embed(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: DeviceCache | None = None,
    ) -> torch.Tensor:
        """What goes to the cloud for ``(batch, seq)`` tokens: ``(batch, seq, hidden)``."""
        if cache is None:
            cache = DeviceCache(None, None)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None] + cache.seen
        cache.seen += input_ids.shape[1]
        hidden = self.embedding(input_ids)
        if self.positions is not None:
            hidden = hidden + self.positions(position_ids)
        if self.first is None:
            return hidden
        return _run(self.first, hidden, attention_mask, position_ids, cache.first)

    def residual(
        self, group: int, u: torch.Tensor, *, train: bool = False, cache: DeviceCache | None = None
    ) -> torch.Tensor:
        """M·u for each projection of an exchange: ``(projections, batch, seq, r_c2d)`` to ``(…, r_d2c)``.

        With ``train`` what :meth:`residual_backward` needs is kept until it is called; without, and with a ``cache``,
        M is as it was when the sequence began.
        """
        if not train and cache is not None and cache.stacked[group] is not None:
            return u.to(cache.stacked[group]) @ cache.stacked[group]
        if not train:
            return self._multiply(group, u)
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            v = self._multiply(group, u)
        self._asked[group] = u, v
        return v.detach()

    def _multiply(self, group: int, u: torch.Tensor) -> torch.Tensor:
        matrices = self.matrices[group]
        u = u.to(next(matrices.parameters()))
        return torch.stack([m(u_i) for m, u_i in zip(matrices, u, strict=True)])

    def residual_backward(self, group: int, grad_v: torch.Tensor) -> torch.Tensor:
        """Add to the gradient of M, and return that of u.

        Raises
        ------
        KeyError
            No forward pass of this exchange is waiting for its gradient.
        """
        u, v = self._asked.pop(group)
        v.backward(grad_v.to(v))
        return u.grad

    def logits(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: DeviceCache | None = None,
    ) -> torch.Tensor:
        """Logits ``(batch, seq, vocab)`` of what came from the cloud ``(batch, seq, hidden)``."""
        if self.last is not None:
            hidden = _run(self.last, hidden, attention_mask, position_ids, cache and cache.last)
        logits = self.lm_head(hidden)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class Direct:
    """A transport without a wire: the device's part in the same process."""

    def __init__(self, device: DevicePart) -> None:
        self.device = device
        self._answers: dict[int, torch.Tensor] = {}

    def send(self, group: int, u: torch.Tensor) -> None:
        self._answers[group] = self.device.residual(group, u, train=torch.is_grad_enabled())

    def receive(self, group: int) -> torch.Tensor:
        return self._answers.pop(group)

    def backward(self, group: int, grad_v: torch.Tensor) -> torch.Tensor:
        return self.device.residual_backward(group, grad_v)


def _stacked(matrices: nn.ModuleList) -> torch.Tensor | None:
    if any(type(m) is not nn.Linear or m.bias is not None for m in matrices):
        return None
    return torch.stack([m.weight.detach().mT for m in matrices])[:, None]


def _run(decoder: nn.Module, hidden, attention_mask, position_ids, cache) -> torch.Tensor:
    return decoder(
        inputs_embeds=hidden,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state
