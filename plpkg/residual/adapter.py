"""ΔW = B·M·A: a projection's frozen A and B, and between them one small trainable M.

A projection with input x gives ``W x + B (M (A x))``: A brings ``(in_features)`` down to ``r_c2d``, the
rank that the cloud sends to the device, M maps it to ``r_d2c``, the rank that comes back, and B brings that
up to ``(out_features)``. Only M learns; it starts at zero, so that the model starts as it was. A and B come
from a seed and each module's name, so that the cloud can have them without the device, and a saved adapter
is M and a few numbers. (Wang et al. 2023, arXiv 2311.14030.)

:mod:`plpkg.residual.config` has the settings, :mod:`plpkg.residual.tuners` puts the layers into a model, and
:mod:`plpkg.residual.methods` tells PEFT of the method.

Left out: quantised base layers, dropout, and LoRA's scaling ``alpha / r``, which the publication does not have.
A fused projection (Phi-3's ``qkv_proj``, GPT-2's ``c_attn``) is one projection with one M.
"""

import hashlib
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn
from transformers.pytorch_utils import Conv1D

from plpkg.residual.config import PrivateLoraConfig, ProjectionConfig

NO_ADAPTER = "__base__"
"""PEFT's name for the adapter of a row that has none."""


class PrivateLoraLayer(nn.Module, BaseTunerLayer):
    """A linear layer with one M for each adapter.

    Attributes
    ----------
    base_layer
        The layer as it was: ``nn.Linear``, or GPT-2's ``Conv1D``.
    privatelora_M
        By adapter: ``nn.Linear(r_c2d, r_d2c, bias=False)``.
    privatelora_A, privatelora_B
        By adapter: ``(r_c2d, in_features)`` and ``(out_features, r_d2c)``, frozen, float32 whatever the base layer is:
        the same on both sides of a wire.
    """

    adapter_layer_names = ("privatelora_M",)
    other_param_names = ("privatelora_A", "privatelora_B", "late")

    def __init__(self, base_layer: nn.Module, module: str) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.module = module
        self.in_features, self.out_features = features(module, self.get_base_layer())
        self.privatelora_M: Any = nn.ModuleDict()  # these three do not say what they hold
        self.privatelora_A: Any = BufferDict(persistent=False)
        self.privatelora_B: Any = BufferDict(persistent=False)
        self.late: dict[str, tuple[UnderWay, bool, bool]] = {}  # of each late adapter: whether first, whether last
        self._disable_adapters = False
        self.merged_adapters = []
        self.cast_input_dtype_enabled = True  # which peft.helpers.disable_input_dtype_casting sets

    def residual(self, x: torch.Tensor, adapter_name: str) -> torch.Tensor:
        """B(M(A x)), added to the output for ``x`` ``(..., in_features)``: ``(..., out_features)``."""
        m = self.privatelora_M[adapter_name]
        dtype = m.weight.dtype
        a = self.privatelora_A[adapter_name].to(dtype)
        b = self.privatelora_B[adapter_name].to(dtype)
        u = nn.functional.linear(self._cast_input_dtype(x, dtype), a)  # (..., r_c2d), goes to the device
        v = m(u)  # (..., r_d2c), comes back
        return nn.functional.linear(v, b)

    def forward(self, x: torch.Tensor, *args, adapter_names: Sequence[str] | None = None, **kwargs) -> torch.Tensor:
        if self.disable_adapters and self.merged:
            self.unmerge()
        if self.merged and adapter_names is not None:
            raise ValueError(f"adapter_names: {self.module} has {self.merged_adapters} merged into it, unmerge first")
        result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        dtype = result.dtype
        if adapter_names is not None:
            for adapter_name, rows in rows_of(adapter_names, x).items():
                if adapter_name in self.privatelora_M:
                    added = self._arriving(self.residual(x[rows], adapter_name), adapter_name)
                    result = result.index_copy(0, rows, (result[rows] + added).to(dtype))
            return result
        for adapter_name in self.active_adapters:
            if adapter_name in self.privatelora_M:
                result = result + self._arriving(self.residual(x, adapter_name), adapter_name)
        return result.to(dtype)

    def _arriving(self, residual: torch.Tensor, adapter_name: str) -> torch.Tensor | int:
        """The residual that an adapter adds here: its own; if it is late, that of the layer before."""
        if adapter_name not in self.late:
            return residual
        under_way, is_first, is_last = self.late[adapter_name]
        before = 0 if is_first else under_way.residual
        if before is None:
            raise RuntimeError(f"nothing has reached {self.module}: a late adapter takes no gradient checkpointing")
        if is_last:  # no layer comes to add its own
            under_way.residual = None
            return before + residual
        under_way.residual = residual
        return before

    def update_layer(self, adapter_name: str, config: PrivateLoraConfig) -> None:
        """Add an adapter: A and B as configured, M zero."""
        a, b = gaussian_projections(
            config.projection_seed, self.module, self.in_features, self.out_features, config.r_c2d, config.r_d2c
        )
        self.privatelora_M[adapter_name] = nn.Linear(config.r_c2d, config.r_d2c, bias=False)
        nn.init.zeros_(self.privatelora_M[adapter_name].weight)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        here = weight_of(self).device
        keep_projections(  # after the move, which rounds
            self.module, adapter_name, config, (self.privatelora_A, a.to(here)), (self.privatelora_B, b.to(here))
        )
        self.late.pop(adapter_name, None)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def get_delta_weight(self, adapter_name: str) -> torch.Tensor:
        """B·M·A in the shape of the base layer's weight."""
        if adapter_name in self.late:
            raise ValueError(f"{adapter_name!r} is late: what {self.module} adds is no part of its own weight")
        m = self.privatelora_M[adapter_name].weight
        a = self.privatelora_A[adapter_name].to(m.dtype)
        b = self.privatelora_B[adapter_name].to(m.dtype)
        delta = b @ m @ a  # (out_features, in_features)
        if isinstance(self.get_base_layer(), Conv1D):
            return delta.T
        return delta

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the active adapters' B·M·A to the base weight; with ``safe_merge`` only if all stays finite."""
        for adapter_name in check_adapters_to_merge(self, adapter_names):
            if adapter_name not in self.privatelora_M:
                continue
            weight = plain(self.module, self.get_base_weight())
            merged = (weight + self.get_delta_weight(adapter_name)).to(weight.dtype)
            if safe_merge and not torch.isfinite(merged).all():
                raise ValueError(f"merging {adapter_name!r} into {self.module} gives values that are not finite")
            self.set_base_weight(merged)
            self.merged_adapters.append(adapter_name)

    def unmerge(self) -> None:
        """Take the merged adapters out again, up to rounding."""
        while self.merged_adapters:
            weight = self.get_base_weight()
            delta = self.get_delta_weight(self.merged_adapters.pop())
            self.set_base_weight((weight - delta).to(weight.dtype))

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        return adapter_name not in self.late

    def __repr__(self) -> str:
        return f"privatelora.{super().__repr__()}"


def gaussian_projections(
    seed: int, module: str, in_features: int, out_features: int, r_c2d: int, r_d2c: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of one projection, the same wherever they are drawn.

    Parameters
    ----------
    seed
        The configuration's ``projection_seed``.
    module
        The projection's name in the model, ``model.layers.0.self_attn.q_proj``.
    in_features, out_features, r_c2d, r_d2c
        Dimensions.

    Returns
    -------
    A, B
        ``(r_c2d, in_features)`` of variance ``1 / in_features`` and ``(out_features, r_d2c)`` of variance
        ``1 / r_d2c``, float32, so that A keeps the size of its input's entries, and B of M's.
    """
    digest = hashlib.sha256(f"{seed} {module}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    a = torch.randn(r_c2d, in_features, generator=generator, device="cpu") / in_features**0.5
    b = torch.randn(out_features, r_d2c, generator=generator, device="cpu") / r_d2c**0.5
    return a, b


def as_places(tensor: torch.Tensor, places: tuple[int, ...], first: int = 0) -> torch.Tensor:
    """A tensor ``(…, places, width)`` whose places are counted in other dimensions, after the ``first`` ones.

    Raises
    ------
    ValueError
        There are not as many.
    """
    read = tensor.shape[first:-1]
    if read.numel() != math.prod(places):
        raise ValueError(
            f"an adapted module reads {tuple(read)} places where the text has {places}, as one that "
            "reads its cache again does: adapt other modules"
        )
    return tensor.reshape(*tensor.shape[:first], *places, tensor.shape[-1])


def rows_of(adapter_names: Sequence[str], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The rows of ``(batch, …)`` that each adapter is for: PEFT's ``model(…, adapter_names=[…])``."""
    if len(adapter_names) != len(x):
        raise ValueError(f"adapter_names has {len(adapter_names)} names for a batch of {len(x)}")
    indices: dict[str, list[int]] = {}
    for row, name in enumerate(adapter_names):
        if name != NO_ADAPTER:
            indices.setdefault(name, []).append(row)
    return {name: torch.tensor(rows, device=x.device) for name, rows in indices.items()}


class PerThread(threading.local):
    """Attributes that each thread has for itself; a copy, pickled or not, begins anew."""

    def __reduce__(self) -> tuple:
        return type(self), ()


class UnderWay(PerThread):
    """The residual that the projections of one name add one layer late, on its way from each to the next."""

    def __init__(self) -> None:
        self.residual: torch.Tensor | None = None


def features(module: str, base: nn.Module) -> tuple[int, int]:
    """``(in_features, out_features)`` of a linear layer, ``nn.Linear`` or GPT-2's ``Conv1D``."""
    if isinstance(base, nn.Linear):
        return base.in_features, base.out_features
    if isinstance(base, Conv1D):
        return base.nx, base.nf
    raise ValueError(f"{module} is a {type(base).__name__}: only nn.Linear and Conv1D can be adapted")


def weight_of(layer: Any) -> nn.Parameter:
    """The weight of the linear layer in whose place an adapter's layer is."""
    return layer.get_base_layer().weight


def plain(module: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight, unless it is quantised: then it is not what its layer multiplies with."""
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise ValueError(f"the weight of {module} is quantised ({weight.dtype}): it cannot be merged, nor give bases")
    return weight


def keep_projections(module: str, adapter_name: str, config: ProjectionConfig, *projections: tuple) -> None:
    """Put ``(buffers, value)`` into a layer: all adapters of one are saved with their projections, or none is."""
    for buffers, value in projections:
        if len(buffers) and buffers.persistent != config.save_projection:
            raise ValueError(
                f"init={config.init!r} for the adapter {adapter_name!r}, but another one for those that the model has "
                f"in {module}: their projections are saved, or drawn again, together"
            )
        buffers.persistent = config.save_projection
        buffers[adapter_name] = value


def layers(model: nn.Module, adapter_name: str = "default") -> dict[str, PrivateLoraLayer]:
    """The layers that have this PrivateLoRA adapter, by their names in the model; none if there is no such adapter."""
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, PrivateLoraLayer)}
    return {name: layer for name, layer in adapted.items() if adapter_name in layer.privatelora_M}


def matrices(model: nn.Module, adapter_name: str = "default") -> dict[str, nn.Linear]:
    """Every M of an adapter, by the name that its module had before it was adapted.

    Raises
    ------
    ValueError
        The model has no such PrivateLoRA adapter.
    """
    adapted = layers(model, adapter_name).values()
    if not adapted:
        raise ValueError(f"{type(model).__name__} has no PrivateLoRA adapter {adapter_name!r}")
    return {layer.module: layer.privatelora_M[adapter_name] for layer in adapted}
