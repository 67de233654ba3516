"""The layers of a model whose parameters learn, and those that are refused by name.

A layer is refused that mixes examples, depends on them in another way than through its gradient, or cannot be run again
for one of them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm

from plpkg.clipping.factors import Outer
from plpkg.clipping.layers import Call, any_layer, rule_for, scale, scaled_embedding

SCRIPTED = "compiled by torch.jit, which takes no hooks: give the module that it was made of"
LOOP_TAKES_IT = "execution='loop' takes it, one example at a time"
HOLDERS = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict, ParametrizationList)
"""Containers that keep parameters or layers for the module that they are in."""
UNITS = (nn.MultiheadAttention,)
"""Layers that use their children's parameters without calling the children."""


@dataclass(frozen=True)
class Site:
    """A layer with parameters that learn: ``keys`` maps their names in the layer to their names in the model."""

    name: str
    module: nn.Module
    rule: Callable
    keys: dict[str, str]

    @property
    def is_compared(self) -> bool:
        """Whether the rule's output is compared with the layer's: it was not chosen by the layer's type alone."""
        rule = self.rule.func if isinstance(self.rule, partial) else self.rule
        return rule in (any_layer, scale, scaled_embedding)

    def contributions(self, call: Call, precision: torch.autocast) -> Iterator[tuple[str, Outer | torch.Tensor]]:
        """The parts that a call adds to each parameter's per-sample gradients, by the parameter's name in the model."""
        try:
            with precision:  # a rule may run the layer; sums and norms are not for autocast to round
                parts = self.rule(call)
        except NotImplementedError as error:
            raise NotImplementedError(f"{self}: {error}; {LOOP_TAKES_IT}") from error
        except ValueError as error:
            raise ValueError(f"{self}: {error}") from error
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                part = part.to(torch.promote_types(part.dtype, torch.float32))
            yield self.keys[name], part

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({type(self.module).__name__})"


def sites(model: nn.Module, names: Mapping[int, str]) -> list[Site]:
    """The layers that own the parameters that learn, in the model's order.

    Parameters
    ----------
    names
        The learning parameters' names by their ``id``.
    """
    found: list[Site] = []
    in_units: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in in_units or isinstance(module, HOLDERS):
            continue
        is_unit = _is_unit(module)
        if is_unit:
            in_units.update(module.modules())
            keys = _learning(module.named_parameters(), names)
        else:
            keys = _without_layers_below(_learning(_held(module), names), module, names)
        if not keys:
            continue
        whole = is_unit or any("." in n for n in keys)  # parameters that are not its own: no rule knows them
        rule = any_layer if whole else rule_for(module)
        found.append(Site(name, module, rule, keys))
    return found


def _is_unit(module: nn.Module) -> bool:
    """Whether a layer computes with the parameters of layers in it, and calls it alone."""
    if isinstance(module, UNITS):
        return True
    # DoRA's magnitude is computed from LoRA's factors, past their layers.
    return bool(getattr(module, "lora_magnitude_vector", None))


def _learning(named: Iterator[tuple[str, nn.Parameter]], names: Mapping[int, str]) -> dict[str, str]:
    """The names in the model of those parameters that learn, by their names in a layer."""
    return {name: names[id(p)] for name, p in named if id(p) in names}


def _without_layers_below(keys: dict[str, str], module: nn.Module, names: Mapping[int, str]) -> dict[str, str]:
    """The keys of a layer that no layer in it owns as well: such a parameter is counted there."""
    if not keys:
        return keys
    below: set[str | None] = set()
    for layer in _layers_below(module):
        below.update(names.get(id(p)) for p in layer.parameters())
    return {name: key for name, key in keys.items() if key not in below}


def _held(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """A module's own parameters, and those that it keeps in lists and the like, which are never called."""
    for name, p in module._parameters.items():
        if p is not None:
            yield prefix + name, p
    for name, child in module.named_children():
        if isinstance(child, HOLDERS):
            yield from _held(child, f"{prefix}{name}.")


def _layers_below(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, HOLDERS):
            yield from _layers_below(child)
        else:
            yield child


def check_layers(model: nn.Module, *, alone: bool = False) -> None:
    """Refuse what mixes examples or, where one is not ``alone``, cannot tell them apart.

    Raises
    ------
    ValueError
        The message names the layer.
    """
    for name, module in model.named_modules():
        reason = refusal(module, alone)
        if not reason:
            continue
        otherwise = "" if refusal(module, alone=True) else f"; {LOOP_TAKES_IT}"
        raise ValueError(f"{name or 'the model'} ({type(module).__name__}) {reason}{otherwise}")


def refusal(module: nn.Module, alone: bool = False) -> str | None:
    """Why a layer's examples depend on each other or, where one is not ``alone``, cannot be told apart; or ``None``."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return _refusal_of_batch_norm(module)
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        if module.track_running_stats and module.training:
            return "keeps running statistics of private examples: use track_running_stats=False"
        return None
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return _refusal_of_embedding(module, alone)
    if alone:
        return None
    return _refusal_of_examples_together(module)


def _refusal_of_batch_norm(module: nn.Module) -> str | None:
    if not module.training and module.running_mean is not None:
        return None
    return (
        "normalises each example by the others: replace it by GroupNorm (opacus.validators.ModuleValidator.fix does), "
        "or fold it into its convolution (torch.nn.utils.fuse_conv_bn_eval); eval() alone is undone by the next "
        "model.train()"
    )


def _refusal_of_embedding(module: nn.Embedding | nn.EmbeddingBag, alone: bool) -> str | None:
    if module.max_norm is not None:
        return f"has max_norm={module.max_norm}, which rescales the rows that a batch reads, outside the gradient"
    if not module.weight.requires_grad:
        return None
    if module.scale_grad_by_freq and not alone:
        return "has scale_grad_by_freq=True, which scales an example's gradient by the others' tokens"
    if module.sparse:
        return "has sparse=True; the noise of DP-SGD is dense: use sparse=False"
    return None


def _refusal_of_examples_together(module: nn.Module) -> str | None:
    """Why a layer's examples cannot be told apart, though each alone would do."""
    if isinstance(module, torch.jit.ScriptModule) and _learns(module):
        return f"is {SCRIPTED}"
    if merges(module) and _learns(module):
        return "puts its weights into those of the layer below as it runs, past what is watched"
    if _is_spectral(module) and any(p.requires_grad for _, p in _held(module)):
        return "computes its weight anew whenever it is run, and cannot be run again for each example"
    kind = type(module).__name__
    if kind in REFUSED:
        return REFUSED[kind] if _learns(module) else None
    if isinstance(module, nn.RNNBase) and _learns(module):
        return f"is a fused kernel, whose state has the examples second: take opacus.layers.DP{kind}"
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first and module.out_proj.weight.requires_grad:
        return "has batch_first=False; the first dimension must be the batch"
    return None


_PROMPT = "gives the same row to all examples, which PEFT then repeats: its examples cannot be told apart"
REFUSED: Mapping[str, str] = {
    "PromptEmbedding": _PROMPT,
    "PromptEncoder": _PROMPT,
    "PrefixEncoder": _PROMPT,
}
"""PEFT's layers by name, which need not be loaded."""


def _learns(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def merges(module: nn.Module) -> bool:
    """Whether it is a layer of PEFT that merges its weights while it runs: LoRA on a ``nn.MultiheadAttention``, or with
    ``target_parameters``.
    """
    kind = type(module)
    return kind.__module__.startswith("peft.") and kind.__name__ in ("MultiheadAttention", "ParamWrapper")


def _is_spectral(module: Any) -> bool:
    """Whether a weight is divided by its largest singular value, by a parametrization or the older hook."""
    computing: list[object] = list(module._forward_pre_hooks.values())
    if is_parametrized(module):
        for parametrizations in module.parametrizations.values():
            computing += parametrizations
    return any(isinstance(each, (_SpectralNorm, SpectralNorm)) for each in computing)
