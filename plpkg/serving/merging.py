"""The simple way to serve one adapter: add it to the base's weights, and take it away again.

W + scale · B A is the model that the adapter makes, at no cost for a token; another adapter first needs this one gone.
"""

from typing import Any

import torch

from plpkg.adapters import Adapter, Factors, require_fit


def merge(model: torch.nn.Module, adapter: Adapter) -> None:
    """Add an adapter to the weights of the base, in place.

    The product is made in float32, or what is wider, and rounded once to the weight's dtype, as PEFT does. A weight
    that two modules share changes in both of them; the output head often shares the embedding, but neither is adapted.

    Raises
    ------
    ValueError
        The adapter does not fit this model, or a weight would not be finite; the model then stays as it was.
    """
    _add(model, adapter, 1)


def unmerge(model: torch.nn.Module, adapter: Adapter) -> None:
    """Take a merged adapter away again: the weights come back but for the rounding of two additions.

    Raises
    ------
    ValueError
        The adapter does not fit this model. Whether it was merged is not known here.
    """
    _add(model, adapter, -1)


@torch.no_grad()
def _add(model: torch.nn.Module, adapter: Adapter, sign: int) -> None:
    require_fit(adapter, model)
    modules: dict[str, Any] = {path: model.get_submodule(path) for path in adapter.factors}
    for path, module in modules.items():
        if not module.weight.is_floating_point():
            raise ValueError(f"{adapter} cannot be merged: the weight of {path} is quantised")
    # All weights are tried before the first is written: a refusal leaves the model as it was.
    for path, module in modules.items():
        weight = module.weight
        if not (weight + _delta(module, adapter.factors[path], sign)).isfinite().all():
            raise ValueError(f"{adapter} cannot be merged: {path}.weight would not be finite in {weight.dtype}")
    for path, module in modules.items():
        weight = module.weight
        weight += _delta(module, adapter.factors[path], sign)


def _delta(module: Any, factors: Factors, sign: int) -> torch.Tensor:
    """The change of a module's weight: ± scale · B A, in its dtype and orientation."""
    weight = module.weight
    wide = torch.promote_types(torch.float32, torch.promote_types(weight.dtype, factors.up.dtype))
    product = factors.up.to(weight.device, wide) @ factors.down.to(weight.device, wide)  # (out, in)
    delta = sign * factors.scale * product
    if not isinstance(module, torch.nn.Linear):  # a Conv1D's is (in, out)
        delta = delta.T
    return delta.to(weight.dtype)
