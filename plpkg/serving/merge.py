"""The simple way to serve one adapter: add it to the base's weights, and take it away again.

W + scale · B A is the model that the adapter makes, at no cost for a token; another adapter first needs this one gone.
"""

import torch

from plpkg.serving.adapter import Adapter, targets


def merge(model: torch.nn.Module, adapter: Adapter) -> None:
    """Add an adapter to the weights of the base, in place.

    The product is made in float32, or what is wider, and rounded once to the weight's dtype, as PEFT does. A weight
    that two modules share changes in both of them; the output head often shares the embedding, but neither is adapted.

    Raises
    ------
    ValueError
        The adapter does not fit this model, which then stays as it was.
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
    shapes = targets(model)
    for path, each in adapter.factors.items():
        fits = shapes.get(path) == (each.down.shape[1], each.up.shape[0])
        if not fits or not model.get_submodule(path).weight.is_floating_point():
            raise ValueError(f"{adapter} does not fit: {path} is {shapes.get(path)} in this model, or quantised")
    for path, each in adapter.factors.items():
        module = model.get_submodule(path)
        weight = module.weight
        wide = torch.promote_types(torch.float32, torch.promote_types(weight.dtype, each.up.dtype))
        delta = each.scale * (each.up.to(weight.device, wide) @ each.down.to(weight.device, wide))  # (out, in)
        weight += sign * (delta if isinstance(module, torch.nn.Linear) else delta.T).to(
            weight.dtype
        )  # Conv1D: (in, out)
