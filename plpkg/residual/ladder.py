r"""A ladder: every layer's A·x is added up behind the last one, where M is, and nowhere before.

A linear layer with input x_l (``down_proj`` of every decoder layer) stays as it is; beside it, u_l = A_l x_l of ``r``
numbers goes past all later layers to the final hidden state h, before the final norm:

.. math:: h' = h + M([u_1, \dots, u_L])

M is one matrix, or has a hidden layer as well (``width``). It starts at zero, so that the model starts as it was. The
decoder does not depend on M, so learning needs no backward pass through it, and a cloud that runs it can write on
without the device's answer (:mod:`plpkg.residual.wire`): one round trip a token, and nothing of M or of what it
answers crosses. The price: M corrects what the model says, not how it reads.

This is ladder side-tuning (arXiv 2206.06522) at PrivateLoRA's cut (arXiv 2311.14030); between a device and a cloud
its nearest relative is SPA (arXiv 2403.07088). Left out: a ladder with layers of its own, and merging, which cannot be.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from plpkg.residual.adapter import (
    PerThread,
    as_places,
    features,
    gaussian_projections,
    keep_projections,
    rows_of,
    weight_of,
)
from plpkg.residual.config import LadderConfig

NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
"""Names of the final norm in Hugging Face's decoders."""


class GatedM(nn.Module):
    """An M with a hidden layer beside its matrix: ``W u + D (silu(G ũ) * (U ũ))``, ũ being u at a mean square of 1.

    Attributes
    ----------
    linear, up, gate, down
        W ``(hidden, numbers)``, zero at first; U and G ``(width, numbers)`` with a bias; D ``(hidden, width)``, zero.
    """

    def __init__(self, numbers: int, hidden: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(numbers, hidden, bias=False)
        self.up = nn.Linear(numbers, width)
        self.gate = nn.Linear(numbers, width)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        even = u / (u.square().mean(-1, keepdim=True).sqrt() + 1e-3)  # (…, numbers)
        return self.linear(u) + self.down(nn.functional.silu(self.gate(even)) * self.up(even))


def new_m(numbers: int, hidden: int, width: int | None) -> nn.Linear | GatedM:
    """An M for ``numbers`` of all layers."""
    if width is None:
        return nn.Linear(numbers, hidden, bias=False)
    return GatedM(numbers, hidden, width)


class Rungs(PerThread):
    """The A·x that the layers of this thread's forward pass have sent to the final norm, by adapter and layer."""

    def __init__(self) -> None:
        self.sent: dict[tuple[str, str], torch.Tensor] = {}


class LadderLayer(nn.Module, BaseTunerLayer):
    """A part of a ladder."""

    rungs: Rungs
    cast_input_dtype_enabled = True  # which peft.helpers.disable_input_dtype_casting sets

    def rows_by_adapter(
        self, x: torch.Tensor, adapter_names: Sequence[str] | None
    ) -> Mapping[str, torch.Tensor | None]:
        """The rows of ``x`` that each adapter reads: ``None`` is all of them, where no names are given."""
        if self.disable_adapters:
            return {}
        if adapter_names is None:
            return dict.fromkeys(self.active_adapters)
        return rows_of(adapter_names, x)

    def unmerge(self) -> None:
        """Nothing is merged."""


class LadderTap(LadderLayer):
    """A linear layer as it was, that sends A·x of its input to the final norm.

    Attributes
    ----------
    base_layer
        ``nn.Linear``, or GPT-2's ``Conv1D``.
    ladder_A
        By adapter ``(r, in_features)``, frozen, float32.
    """

    adapter_layer_names = ()
    other_param_names = ("ladder_A",)

    def __init__(self, base_layer: nn.Module, module: str, rungs: Rungs) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.module = module
        self.rungs = rungs
        self.in_features, self.out_features = features(module, self.get_base_layer())
        self.ladder_A: Any = BufferDict(persistent=False)  # which does not say what it holds
        self._disable_adapters = False
        self.merged_adapters = []

    def update_layer(self, adapter_name: str, config: LadderConfig) -> None:
        """Add an adapter: A as configured."""
        a, _ = gaussian_projections(config.projection_seed, self.module, self.in_features, 1, config.r, 1)
        keep_projections(self.module, adapter_name, config, (self.ladder_A, a.to(weight_of(self).device)))

    def rung(self, x: torch.Tensor, adapter_name: str) -> torch.Tensor:
        """u ``(…, r)`` for x ``(…, in_features)``."""
        a = self.ladder_A[adapter_name]
        return nn.functional.linear(x.to(a.dtype), a)

    def forward(self, x: torch.Tensor, adapter_names: Sequence[str] | None = None) -> torch.Tensor:
        for adapter_name, rows in self.rows_by_adapter(x, adapter_names).items():
            if adapter_name in self.ladder_A:
                read = x if rows is None else x[rows]
                self.rungs.sent[adapter_name, self.module] = self.rung(read, adapter_name)
        return self.base_layer(x)


class LadderNorm(LadderLayer):
    """The final norm, with one M for each adapter before it.

    Attributes
    ----------
    base_layer
        The norm as it was.
    ladder_M
        By adapter: ``nn.Linear(layers · r, hidden, bias=False)``, or a :class:`GatedM`.
    taps
        By adapter the names of its :class:`LadderTap`, in the order of their layers.
    """

    adapter_layer_names = ("ladder_M",)
    other_param_names = ("taps",)

    def __init__(self, base_layer: nn.Module, rungs: Rungs) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.rungs = rungs
        self.ladder_M: Any = nn.ModuleDict()  # which does not say what it holds
        self.taps: dict[str, list[str]] = {}
        self._disable_adapters = False
        self.merged_adapters = []

    def update_layer(self, adapter_name: str, config: LadderConfig, taps: list[LadderTap], hidden: int) -> None:
        """Add an adapter: M adds nothing."""
        self.taps[adapter_name] = [tap.module for tap in taps]
        m = new_m(len(taps) * config.r, hidden, config.width)
        outputs = [m] if isinstance(m, nn.Linear) else [m.linear, m.down]
        for output in outputs:
            nn.init.zeros_(output.weight)
        self.ladder_M[adapter_name] = m
        self._move_adapter_to_device_of_base_layer(adapter_name, weight_of(taps[-1]).device)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, hidden: torch.Tensor, adapter_names: Sequence[str] | None = None) -> torch.Tensor:
        for adapter_name, rows in self.rows_by_adapter(hidden, adapter_names).items():
            if adapter_name not in self.ladder_M:
                continue
            num_rows = len(hidden) if rows is None else len(rows)
            sent = self._sent(adapter_name, (num_rows, *hidden.shape[1:-1]))
            added = answer(self.ladder_M[adapter_name], sent).to(hidden.dtype)
            hidden = hidden + added if rows is None else hidden.index_add(0, rows, added)
        return self.base_layer(hidden)

    def _sent(self, adapter_name: str, places: tuple[int, ...]) -> torch.Tensor:
        """u ``(*places, layers · r)`` of the pass that ends here."""
        modules = self.taps[adapter_name]
        for module in modules:
            if (adapter_name, module) not in self.rungs.sent:
                raise RuntimeError(f"nothing has come from {module}: a ladder's norm is the end of a pass, never alone")
        return torch.cat([as_places(self.rungs.sent.pop((adapter_name, module)), places) for module in modules], -1)


def answer(m: nn.Module, u: torch.Tensor) -> torch.Tensor:
    """M(u) ``(…, hidden)`` for u ``(…, layers · r)``, in M's own type."""
    return m(u.to(next(m.parameters()).dtype))


def taps(model: nn.Module, adapter_name: str = "default") -> list[LadderTap]:
    """The layers that send A·x to this adapter's M, in their order; none if there is no such adapter."""
    every = [module for module in model.modules() if isinstance(module, LadderTap)]
    return [tap for tap in every if adapter_name in tap.ladder_A]


def decoder_of(model: nn.Module) -> Any:
    """The module that has a causal model's layers: its base model, or a part of that, as OPT's."""
    base = getattr(model, "base_model", model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return base
    return getattr(base, "decoder", base)


def named(decoder: nn.Module, names: tuple[str, ...]) -> str:
    """The first of some names that a decoder has.

    Raises
    ------
    ValueError
        It has none of them.
    """
    for name in names:
        if getattr(decoder, name, None) is not None:  # OPT-350m's final norm is None
            return name
    raise ValueError(f"{type(decoder).__name__} has none of {', '.join(names)}: not a decoder that can be cut here")
