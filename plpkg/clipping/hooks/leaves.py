"""The leaves of autograd's graph: what stands in the parameters' places, and whose gradient stays what it was.

In a step the modules have other leaves than the parameters, with the same memory: so no gradient that is not clipped
reaches a parameter, nor what waits for its gradient.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from plpkg.clipping.guard.mixing import modules_of
from plpkg.memory import GradientLabel


@contextmanager
def stand_ins(model: nn.Module, learning: Mapping[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
    """Inside, the modules have leaves in the places of the parameters that learn. Gives the leaves, by name."""
    leaves: dict[str, nn.Parameter] = {}
    by_id: dict[int, nn.Parameter] = {}
    for name, p in learning.items():
        leaf = nn.Parameter(p.detach())
        vars(leaf).update(vars(p))
        leaves[name] = leaf
        by_id[id(p)] = leaf
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in modules_of(model):
        for name, p in module._parameters.items():
            if p is not None and id(p) in by_id:
                places.append((module, name, p))
    try:
        for module, name, p in places:
            _put(module, name, by_id[id(p)])
        yield leaves
    finally:
        for module, name, p in places:
            _put(module, name, p)


def _put(module: nn.Module, name: str, p: nn.Parameter) -> None:
    if isinstance(module, nn.RNNBase):  # which keeps its parameters in a list as well
        setattr(module, name, p)
    else:
        module._parameters[name] = p


@contextmanager
def without_gradients_of(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, the parameters begin without gradients; what comes to them inside is gone afterwards."""
    parameters = list(parameters)
    _clear(parameters)
    try:
        yield
    finally:
        _clear(parameters)


def _clear(parameters: Iterable[nn.Parameter]) -> None:
    for p in parameters:
        p.grad = None


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether something waits for a parameter's gradient, an optimizer in the backward pass, say, and may read it."""
    if parameter._backward_hooks:
        return True
    accumulated = (parameter._post_accumulate_grad_hooks or {}).values()
    return not all(isinstance(hook, GradientLabel) for hook in accumulated)


def refuse_use_past_the_modules(name: str, gradient: torch.Tensor) -> None:
    """RuntimeError: a hook of a parameter that has a stand-in, and whose gradient came nevertheless."""
    raise RuntimeError(
        f"{name} is used past the model's modules, which have another leaf in its place in a private step: read it "
        "from its module"
    )
