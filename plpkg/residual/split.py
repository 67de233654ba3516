"""One model cut in two: the device keeps embedding, LM head and every M, the cloud the decoder layers, A and B.

The device may also keep the first and the last decoder layers whole. Between the two parts there is a
:class:`Transport`; the one here calls the device's functions directly, so that the cut can be tested against
the uncut model. A layer's projections of the same input (q, k, v) share one message each way, and the cloud
computes W x for them while the message is under way.

Training crosses the cut as well: the device holds labels and loss, the cloud goes back through its layers and
asks the device at each exchange, which adds to M's gradient and answers with the gradient of what it received.

Left out: layers whose input is not one hidden state (encoder-decoders), and adapters other than PrivateLoRA's.
"""

import copy
import threading
from dataclasses import dataclass
from typing import Protocol

import torch
from peft import PeftModel
from torch import nn
from transformers import DynamicCache

from plpkg.residual.adapter import PrivateLoraConfig, PrivateLoraLayer
from plpkg.validation import whole_number

LAYERS, NORMS = ("layers", "h"), ("norm", "ln_f")
"""What Hugging Face's decoders call their list of layers and their final norm."""


class Transport(Protocol):
    """How the cloud reaches the device, seen from the cloud. What comes back may be of another type or place.

    ``group`` numbers the exchanges of a forward pass in the order in which they happen. Tensors are
    ``(projections, batch, seq, rank)``.
    """

    def send(self, group: int, u: torch.Tensor) -> None:
        """Send A·x to the device; may return before it has arrived."""

    def receive(self, group: int) -> torch.Tensor:
        """Wait for M·(A·x)."""

    def backward(self, group: int, grad_v: torch.Tensor) -> torch.Tensor:
        """Send the gradient of what was received, and wait for the gradient of what was sent."""


class _Here(threading.local):
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
    a, b
        ``(projections, r_c2d, in_features)``, and for each projection ``(out_features, r_d2c)``.
    """

    def __init__(self, group: int, projections: list[PrivateLoraLayer], adapter_name: str, here: _Here) -> None:
        super().__init__()
        self.group, self._here = group, here
        self.base_layers = nn.ModuleList(projection.base_layer for projection in projections)
        self.register_buffer("a", torch.stack([p.privatelora_A[adapter_name] for p in projections]), persistent=False)
        for i, projection in enumerate(projections):
            self.register_buffer(f"b_{i}", projection.privatelora_B[adapter_name], persistent=False)

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
        narrowed = x.to(self.a.dtype)
        u = torch.stack([nn.functional.linear(narrowed, a) for a in self.a])  # (projections, batch, seq, r_c2d)
        transport.send(self.group, u.detach())
        base = [layer(x) for layer in self.base_layers]  # while the message is under way
        if torch.is_grad_enabled():
            v = _Received.apply(u, torch.zeros((), requires_grad=True), transport, self.group)
        else:
            v = transport.receive(self.group).to(u)  # (projections, batch, seq, r_d2c)
        b = (getattr(self, f"b_{i}") for i in range(len(base)))
        return [(y + nn.functional.linear(v_i, b_i)).to(y.dtype) for y, v_i, b_i in zip(base, v, b, strict=True)]


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


class _Projection(nn.Module):
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
        In the order in which they happen.
    """

    def __init__(self, decoder: nn.Module, exchanges: list[Exchange], here: _Here) -> None:
        super().__init__()
        self.decoder, self._here = decoder, here
        self.exchanges = nn.ModuleList(exchanges)
        self.requires_grad_(False)

    def connect(self, transport: Transport | None) -> None:
        """Let what this thread computes from now on go through ``transport``: other threads have their own."""
        self._here.transport = transport
        self._here.outputs.clear()

    def new_cache(self) -> DynamicCache:
        """An empty KV cache for these layers."""
        return DynamicCache(config=self.decoder.config)

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
    """What the device remembers of a sequence: the KV caches of its own layers, and how many tokens it has seen."""

    first: DynamicCache | None
    last: DynamicCache | None
    seen: int = 0


class DevicePart(nn.Module):
    """Embedding, LM head, every M, and the layers that the device keeps.

    Attributes
    ----------
    embedding, positions
        Token embedding, and GPT-2's position embedding (else ``None``).
    first, last
        Decoders of the layers before and after the cloud's, or ``None``.
    matrices
        For each exchange its M: ``nn.Linear(r_c2d, r_d2c, bias=False)``.
    lm_head
        From hidden states to logits.
    """

    def __init__(self, embedding, positions, first, last, matrices, lm_head, softcap: float | None) -> None:
        super().__init__()
        self.embedding, self.positions = embedding, positions
        self.first, self.last = first, last
        self.matrices = nn.ModuleList(nn.ModuleList(group) for group in matrices)
        self.lm_head = lm_head
        self.softcap = softcap
        self._asked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def new_cache(self) -> DeviceCache:
        """For a new sequence."""
        return DeviceCache(*(part and DynamicCache(config=part.config) for part in (self.first, self.last)))

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

    def residual(self, group: int, u: torch.Tensor, *, train: bool = False) -> torch.Tensor:
        """M·u for each projection of an exchange: ``(projections, batch, seq, r_c2d)`` to ``(…, r_d2c)``.

        With ``train`` what :meth:`residual_backward` needs is kept until it is called.
        """
        if not train:
            return self._multiply(group, u)
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            v = self._multiply(group, u)
        self._asked[group] = u, v
        return v.detach()

    def _multiply(self, group: int, u: torch.Tensor) -> torch.Tensor:
        return torch.stack([m(u_i.to(m.weight.dtype)) for m, u_i in zip(self.matrices[group], u, strict=True)])

    def residual_backward(self, group: int, grad_v: torch.Tensor) -> torch.Tensor:
        """Add to the gradient of M, and return that of u.

        Raises
        ------
        KeyError
            No forward pass of this exchange is waiting for its gradient.
        """
        u, v = self._asked.pop(group)
        v.backward(grad_v.to(v.dtype))
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


def split(
    model: PeftModel, first_k: int = 0, last_k: int = 0, *, adapter_name: str = "default"
) -> tuple[DevicePart, CloudPart]:
    """Cut a model with a PrivateLoRA adapter into the device's part and the cloud's.

    The parts share the model's tensors; the model itself stays usable.

    Parameters
    ----------
    model
        What ``get_peft_model(model, PrivateLoraConfig(...))`` gave.
    first_k, last_k
        How many decoder layers the device keeps at either end. Adapters in them stay whole on the device.
    adapter_name
        Which adapter.

    Returns
    -------
    device, cloud
        ``device.logits(cloud(device.embed(ids)))`` are the model's logits, once the cloud is connected.

    Raises
    ------
    ValueError
        No such adapter, one merged into the weights, nothing left for the cloud, or an architecture that has not
        the parts of a Hugging Face decoder.
    """
    config = getattr(model, "peft_config", {}).get(adapter_name)
    if not isinstance(config, PrivateLoraConfig):
        raise ValueError(f"{type(model).__name__} has no PrivateLoRA adapter {adapter_name!r}")
    if any(isinstance(module, PrivateLoraLayer) and module.merged for module in model.modules()):
        raise ValueError("an adapter is merged into the weights: unmerge it first")
    whole = model.get_base_model()
    decoder = whole.base_model
    layers_name, norm_name = (_named(decoder, names) for names in (LAYERS, NORMS))
    count = len(getattr(decoder, layers_name))
    whole_number("first_k", first_k, 0, count - 1, "num_hidden_layers - 1")
    whole_number("last_k", last_k, 0, count - 1 - first_k, "num_hidden_layers - 1 - first_k")

    def section(start: int, stop: int, *, norm: bool) -> nn.Module | None:
        return _section(decoder, layers_name, norm_name, range(start, stop), norm=norm) if start < stop else None

    middle = section(first_k, count - last_k, norm=last_k == 0)
    exchanges, matrices, here = [], [], _Here()
    for layer in getattr(middle, layers_name):
        for parent, names in _shared_inputs(layer):
            projections = [getattr(parent, name) for name in names]
            exchange = Exchange(len(exchanges), projections, adapter_name, here)
            exchanges.append(exchange)
            matrices.append([projection.privatelora_M[adapter_name] for projection in projections])
            for index, name in enumerate(names):
                setattr(parent, name, _Projection(exchange, index))
    device = DevicePart(
        decoder.get_input_embeddings(),
        getattr(decoder, "wpe", None),
        section(0, first_k, norm=False),
        section(count - last_k, count, norm=True),
        matrices,
        whole.get_output_embeddings(),
        getattr(whole.config, "final_logit_softcapping", None),
    )
    return device, CloudPart(middle, exchanges, here)


def _named(decoder: nn.Module, names: tuple[str, ...]) -> str:
    for name in names:
        if hasattr(decoder, name):
            return name
    raise ValueError(f"{type(decoder).__name__} has none of {', '.join(names)}: not a decoder that can be cut here")


def _section(decoder: nn.Module, layers_name: str, norm_name: str, layers: range, *, norm: bool) -> nn.Module:
    """A decoder of the same class with some of the layers, without embedding, sharing the tensors."""
    config = copy.deepcopy(decoder.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[i] for i in layers]
    # The same tensors in new modules: their numbers within the KV cache change.
    shared = {id(t): t for t in (*decoder.parameters(), *decoder.buffers())}
    with torch.device("meta"):
        part = type(decoder)(config)
    chosen = nn.ModuleList(copy.deepcopy(getattr(decoder, layers_name)[i], dict(shared)) for i in layers)
    for number, layer in enumerate(chosen):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
    setattr(part, layers_name, chosen)
    setattr(part, norm_name, copy.deepcopy(getattr(decoder, norm_name), dict(shared)) if norm else nn.Identity())
    if hasattr(decoder, "rotary_emb"):
        part.rotary_emb = copy.deepcopy(decoder.rotary_emb)
    part.set_input_embeddings(None)
    if hasattr(decoder, "wpe"):
        part.wpe = _Nothing()
    return part.train(decoder.training)


class _Nothing(nn.Module):
    """Adds nothing where a decoder adds its position embedding: the device has done so."""

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, device=position_ids.device)


def _shared_inputs(layer: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """The adapted projections of a layer by the input that they share, in the order of computation."""
    groups = []
    for parent in layer.modules():
        adapted = [name for name, child in parent.named_children() if isinstance(child, PrivateLoraLayer)]
        for together in (["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]):
            if chosen := [name for name in together if name in adapted]:
                groups.append((parent, chosen))
        groups += [(parent, [name]) for name in adapted if not any((parent is p and name in n) for p, n in groups)]
    return groups


def _run(decoder: nn.Module, hidden, attention_mask, position_ids, cache) -> torch.Tensor:
    return decoder(
        inputs_embeds=hidden,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state
