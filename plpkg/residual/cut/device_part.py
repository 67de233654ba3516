"""The device's part of a divided model: embedding, LM head, every M, and the layers that it keeps.

Where A·x rides down with the final hidden state (a ladder, or a last layer that is folded), the device has the final
norm as well, and what M makes of it is added before: a :class:`Tail`.

Training crosses the cut as well: the device holds labels and loss, the cloud goes back through its layers and
asks the device at each exchange, which adds to M's gradient and answers with the gradient of what it received, but in
the lowest layer, where nothing needs it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import DynamicCache

from plpkg.residual.adapter import PrivateLoraLayer
from plpkg.residual.cut.cloud_part import cut_back, new_cache, run_layers
from plpkg.residual.ladder import answer

Gradients = dict[nn.Parameter, torch.Tensor]
"""By parameter that learns."""


class LoraBranches(nn.Module):
    """The device's side of :class:`.FullActivations`: every projection's B·A·x, side by side."""

    def __init__(self, projections: list[LoraLayer], adapter_name: str) -> None:
        super().__init__()
        self.a = nn.ModuleList(p.lora_A[adapter_name] for p in projections)
        self.b = nn.ModuleList(p.lora_B[adapter_name] for p in projections)
        self.scaling = [p.scaling[adapter_name] for p in projections]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branches = zip(self.a, self.b, self.scaling, strict=True)
        return torch.cat([b(a(x)) * scale for a, b, scale in branches], dim=-1)


class Folded(nn.Module):
    """The last layer's B·M, on the device: its residual is added where the layer's own output is."""

    b: torch.Tensor

    def __init__(self, projection: PrivateLoraLayer, adapter_name: str) -> None:
        super().__init__()
        self.m = projection.privatelora_M[adapter_name]
        self.register_buffer("b", projection.privatelora_B[adapter_name], persistent=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.m(u), self.b.to(self.m.weight.dtype))


class Tail(nn.Module):
    """Final norm between the cloud's layers and the LM head: ``norm(h + m(u))``.

    Attributes
    ----------
    norm
        The final norm.
    m
        A ladder's M, or a :class:`Folded`; ``None`` adds nothing.
    hidden, numbers
        The widths of h and u.
    """

    def __init__(self, norm: nn.Module, m: nn.Module | None, hidden: int, numbers: int) -> None:
        super().__init__()
        self.norm = norm
        self.m = m
        self.hidden = hidden
        self.numbers = numbers

    def forward(self, final: torch.Tensor) -> torch.Tensor:
        """``(batch, seq, hidden + numbers)`` to ``(batch, seq, hidden)``."""
        h, u = final.split([self.hidden, self.numbers], dim=-1)
        if self.m is not None:
            h = h + answer(self.m, u).to(h.dtype)
        return self.norm(h)


@dataclass
class DeviceCache:
    """Memory that the device has of a sequence.

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

    def cut_back(self, keep: int) -> None:
        """Forget all but the first ``keep`` tokens, at least one."""
        for cache in (self.first, self.last):
            if cache is not None:
                cut_back(cache, keep)
        self.seen = keep


class DevicePart(nn.Module):
    """Embedding, LM head, every M, and the layers that the device keeps.

    Attributes
    ----------
    embedding, positions
        Token embedding, and GPT-2's or OPT's position embedding (else ``None``).
    first, last
        Decoders of the layers before and after the cloud's, or ``None``.
    matrices
        For each exchange its M: ``nn.Linear(r_c2d, r_d2c, bias=False)``; or a :class:`LoraBranches`.
    ranks
        ``(r_c2d, r_d2c)``.
    tail
        What the final hidden state goes through where A·x rides with it, else ``None``.
    lm_head
        The layer that turns hidden states into logits.
    scale, softcap
        The factor of the logits (Cohere, Granite), and Gemma-2's bound on them.
    """

    def __init__(
        self, embedding, positions, first, last, matrices, ranks: tuple[int, int], tail: Tail | None, lm_head,
        softcap: float | None, scale: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tail = tail
        self.ranks = ranks
        self.embedding = embedding
        self.positions = positions
        self.first = first
        self.last = last
        self.matrices: Any = nn.ModuleList(nn.ModuleList(group) for group in matrices)
        self.lm_head = lm_head
        self.softcap = softcap
        self.scale = scale
        self._asked: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by exchange, u and M·u of each chunk

    @property
    def width(self) -> int:
        """Of what comes from the cloud at the end of a pass, each position."""
        hidden = self.embedding.embedding_dim
        return hidden if self.tail is None else hidden + self.tail.numbers

    def new_cache(self) -> DeviceCache:
        """For a new sequence."""
        return DeviceCache(
            first=None if self.first is None else new_cache(self.first),
            last=None if self.last is None else new_cache(self.last),
            stacked=tuple(_stacked(group) for group in self.matrices),
        )

    def embed(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: DeviceCache | None = None,
    ) -> torch.Tensor:
        """Hidden states ``(batch, seq, hidden)`` that go to the cloud for ``(batch, seq)`` tokens."""
        if cache is None:
            cache = DeviceCache(None, None)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None] + cache.seen
        cache.seen += input_ids.shape[1]
        hidden = self.embedding(input_ids)
        if self.positions is not None:
            if hasattr(self.positions, "offset"):  # OPT's takes a mask, the length before, and then positions
                hidden = hidden + self.positions(None, 0, position_ids)
            else:  # GPT-2's
                hidden = hidden + self.positions(position_ids)
        if self.first is None:
            return hidden
        return run_layers(self.first, hidden, attention_mask, position_ids, cache.first)

    def residual(
        self, group: int, u: torch.Tensor, *, train: int = 0, cache: DeviceCache | None = None
    ) -> torch.Tensor:
        """M·u for each projection of an exchange: ``(projections, batch, seq, r_c2d)`` to ``(…, r_d2c)``.

        With ``train`` what :meth:`residual_backward` needs is kept until it is called, of so many equal chunks of the
        batch; without, and with a ``cache``, M is as it was when the sequence began.
        """
        if train:
            chunks = [chunk.detach().requires_grad_() for chunk in u.chunk(int(train), dim=1)]
            with torch.enable_grad():
                self._asked[group] = [(chunk, self._multiply(group, chunk)) for chunk in chunks]
            return torch.cat([v.detach() for _, v in self._asked[group]], dim=1)
        stacked = None if cache is None else cache.stacked[group]
        if stacked is None:
            return self._multiply(group, u)
        return u.to(stacked) @ stacked

    def _multiply(self, group: int, u: torch.Tensor) -> torch.Tensor:
        matrices = self.matrices[group]
        u = u.to(next(matrices.parameters()))
        return torch.stack([m(u_i) for m, u_i in zip(matrices, u, strict=True)])

    def residual_backward(self, group: int, grad_v: torch.Tensor) -> tuple[torch.Tensor, list[Gradients]]:
        """The gradient of u, and of each chunk of the batch the gradients of M.

        Raises
        ------
        KeyError
            No forward pass of this exchange is waiting for its gradient.
        """
        asked = self._asked.pop(group)
        learning = [parameter for parameter in self.matrices[group].parameters() if parameter.requires_grad]
        grads_u: list[torch.Tensor] = []
        gradients: list[Gradients] = []
        for (u, v), grad in zip(asked, grad_v.chunk(len(asked), dim=1), strict=True):
            grad_u, *of_m = torch.autograd.grad(v, [u, *learning], grad.to(v))
            grads_u.append(grad_u)
            gradients.append(dict(zip(learning, of_m, strict=True)))
        return torch.cat(grads_u, dim=1), gradients

    def logits(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: DeviceCache | None = None,
    ) -> torch.Tensor:
        """Logits ``(batch, seq, vocab)`` of what came from the cloud, ``(batch, seq, width)``."""
        if self.last is not None:
            past = None if cache is None else cache.last
            hidden = run_layers(self.last, hidden, attention_mask, position_ids, past)
        if self.tail is not None:
            hidden = self.tail(hidden)
        return self.head(hidden)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits that the model makes of its decoder's states: its LM head, scaled or capped."""
        logits = self.lm_head(hidden)
        if self.scale != 1:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def _stacked(matrices: Iterable[Any]) -> torch.Tensor | None:
    """The M of an exchange, ``(projections, 1, r_c2d, r_d2c)``; ``None`` if one is no plain matrix."""
    for m in matrices:
        if type(m) is not nn.Linear or m.bias is not None:
            return None
    return torch.stack([m.weight.detach().mT for m in matrices])[:, None]
