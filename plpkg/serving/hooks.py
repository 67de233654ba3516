"""Adapters beside a backbone: each linear layer's output gets what the batch's adapters add to it.

Forward hooks do it, so the backbone stays as it is: its weights are not touched, and outside :meth:`Hooks.batch` it
answers as if no adapter were there.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from plpkg.serving.sgmv import Segments, add_sgmv, sgmv

Stack = torch.Tensor | Sequence[torch.Tensor]


class Group(NamedTuple):
    """Adapters of a batch whose factors are kept together.

    Attributes
    ----------
    segments
        Which tokens are whose; indices count in ``factors``.
    factors
        By module: downs, ups and scales as :func:`plpkg.serving.sgmv.sgmv` takes them.
    """

    segments: Segments
    factors: Mapping[str, tuple[Stack, Stack, Sequence[float] | torch.Tensor]]


class Hooks:
    """Hooks on the named modules of a model, until :meth:`close`."""

    def __init__(self, model: torch.nn.Module, modules: Iterable[str]) -> None:
        self._groups: tuple[Group, ...] = ()
        self._handles = [model.get_submodule(name).register_forward_hook(self._hook(name)) for name in modules]

    def _hook(self, name: str):
        def add(_, arguments, output):
            for segments, factors in self._groups:
                if name in factors:
                    x = arguments[0].flatten(0, -2)  # (tokens, hidden)
                    if torch.is_grad_enabled():
                        added = sgmv(x.to(factors[name][0].dtype), *factors[name], segments)
                        output = output + added.view_as(output).to(output.dtype)
                    else:
                        add_sgmv(output.flatten(0, -2), x, *factors[name], segments)
            return output

        return add

    @contextlib.contextmanager
    def batch(self, *groups: Group) -> Iterator[None]:
        """Within it, a forward pass goes through the groups' adapters; its tokens are counted row by row."""
        self._groups = groups
        try:
            yield
        finally:
            self._groups = ()

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
