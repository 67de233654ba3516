"""How far each example's gradient is scaled down, and how far one example can then move the sum: the sensitivity.

* ``flat``: min(1, C/‖g‖) (Abadi et al., arXiv 1607.00133). Sensitivity C.
* ``automatic``: C/(‖g‖ + γ), AUTO-S (Bu et al., arXiv 2206.07136): every example counts about the same. Below C.
* ``per_layer``: each of L layers is clipped to C/√L by its own norm (McMahan et al., arXiv 1710.06963), or to a C_l of
  its own. Sensitivity C, or √ΣC_l². Each layer's factor is known as soon as its own gradient is: no second pass, and
  nothing is kept.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import is_fake

from plpkg.clipping.factors import square
from plpkg.validation import number, one_of

CLIPPINGS = ("flat", "automatic", "per_layer")
GAMMA = 0.01
"""The γ of ``automatic``."""


@dataclass(frozen=True)
class Clip:
    """A clip function.

    Attributes
    ----------
    max_grad_norm
        C, or for ``per_layer`` one for each layer.
    kind
        One of :data:`CLIPPINGS`.

    Raises
    ------
    ValueError
        A norm that is not positive, several for another kind than ``per_layer``, an unknown kind.
    """

    max_grad_norm: float | Sequence[float]
    kind: str = "flat"

    def __post_init__(self) -> None:
        one_of("clipping", self.kind, CLIPPINGS)
        norms = self.max_grad_norm
        several = isinstance(norms, (list, tuple))
        if several and not self.local:
            raise ValueError(f"max_grad_norm={norms!r}: one for each layer needs clipping='per_layer'")
        for norm in norms if several else [norms]:
            number("max_grad_norm", norm, open_low=True)

    @property
    def local(self) -> bool:
        """Whether a layer's factor depends on that layer's norm alone."""
        return self.kind == "per_layer"

    @property
    def sensitivity(self) -> float:
        """The most that adding or removing one example moves the sum of the clipped gradients, an L2 norm."""
        if isinstance(self.max_grad_norm, Sequence):
            return math.hypot(*self.max_grad_norm)
        return self.max_grad_norm

    def limits(self, layers: Sequence[str]) -> dict[str, float]:
        """The norm that each group's gradients are clipped to: the layers, or ``""`` for all together.

        Raises
        ------
        ValueError
            ``max_grad_norm`` has one for each layer, but of another number of layers.
        """
        if not self.local:
            return {"": self.sensitivity}
        if not isinstance(self.max_grad_norm, Sequence):
            return dict.fromkeys(layers, self.max_grad_norm / math.sqrt(len(layers)))
        if len(self.max_grad_norm) != len(layers):
            names = ", ".join(layers)
            raise ValueError(f"max_grad_norm has {len(self.max_grad_norm)} norms for {len(layers)} layers: {names}")
        return dict(zip(layers, self.max_grad_norm, strict=True))

    def factors(self, squares: torch.Tensor, limit: float) -> torch.Tensor:
        """The number that each example's gradient is multiplied with, ``(batch,)``.

        Parameters
        ----------
        squares
            ``(batch,)``: squared norms of the gradients that are scaled together.
        limit
            The limits to which these are clipped, of :meth:`limits`.
        """
        norms = squares.sqrt()
        if self.kind == "automatic":
            return limit / (norms + GAMMA)
        return (limit / norms).clamp(max=1)  # 0 divides to infinity: a gradient of zero stays as it is


def clip_dense(gradients: Mapping[str, torch.Tensor], clip: Clip, groups: Mapping[str, str] | None = None):
    """Clip gradients that exist: the definition that every execution has to equal.

    Parameters
    ----------
    gradients
        By parameter, ``(batch, *shape)``: of examples, or of people.
    clip
        How.
    groups
        The layer of each parameter, by which ``per_layer`` scales; without it each parameter is one.

    Returns
    -------
    (sums, norms)
        By parameter, ``(*shape)``; and the norms before clipping, ``(batch,)``.
    """
    layers = groups or {name: name for name in gradients}
    group_of = {name: layers[name] if clip.local else "" for name in gradients}
    squares: dict[str, torch.Tensor] = {}  # by group, (batch,)
    for name, gradient in gradients.items():
        group = group_of[name]
        of_parameter = square(gradient)
        squares[group] = squares[group] + of_parameter if group in squares else of_parameter
    limits = clip.limits(list(dict.fromkeys(layers.values())))
    factors = {group: clip.factors(total, limits[group]) for group, total in squares.items()}
    sums = {}
    for name, gradient in gradients.items():
        factor = factors[group_of[name]].to(gradient.dtype)
        sums[name] = torch.tensordot(factor, gradient, dims=1)
    first, *others = squares.values()
    norms = sum(others, first).sqrt()
    return sums, norms


def check_finite(norms: torch.Tensor, first: int, batch: int) -> None:
    """Refuse gradients that are not numbers.

    Raises
    ------
    FloatingPointError
        The message names the example, counted from ``first``.
    """
    if not is_fake(norms) and not norms.isfinite().all():
        bad = (~norms.isfinite()).nonzero().flatten().tolist()
        raise FloatingPointError(f"the gradient of example {first + bad[0]} of {batch} is not finite")


def zeros_for(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros of a parameter's shape, at least float32."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
