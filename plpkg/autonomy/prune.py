"""Pruning for the device: whole units go, and the tensors really get smaller (:mod:`torch.nn.utils.prune` only masks).

A unit is a filter, a neuron, an LSTM's cell with its four gates, or an embedding's column. In each layer those go whose
incoming weights have the smallest L2 norm (AutLearn, Xu Mengwei et al.). How many is searched as in NetAdapt (Yang et
al., arXiv 1804.03230): in a round each layer alone is shrunk until the resource meets the round's target, tuned, and
scored; the best network stays. Left out: several resources. One may be the largest of Resource_j / Budget_j, for 1.

Networks are chains: each layer feeds the next. Each cut is checked: with random weights, the smaller network must be
the whole one where the units that go are zero. Residual connections fail that, and activations with f(0) ≠ 0.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.benchmark import Timer

from plpkg.validation import number, one_of, whole_number


@dataclass(frozen=True, eq=False)
class Pruned:
    """One of a family: the model in eval mode, how many units its layers have, what it takes, and how good it is."""

    model: nn.Module = field(repr=False)
    keep: dict[str, int]
    resource: float
    score: float


def prune(
    model: nn.Module,
    example: torch.Tensor,
    *,
    keep: Mapping[str, int] | None = None,
    budgets: Sequence[float] | None = None,
    score: Callable[[nn.Module], float] | None = None,
    tune: Callable[[nn.Module], object] | None = None,
    resource: Callable[[nn.Module], float] | None = None,
    step: float = 0.1,
) -> nn.Module | list[Pruned]:
    """A copy with so many units in each layer, or the best copies within budgets; the model stays as it is.

    Parameters
    ----------
    model, example
        A chain of Conv2d, Linear, Embedding and LSTM layers, which lose units but for the last one, the classes;
        BatchNorm and depthwise Conv2d follow. Its input.
    keep, budgets
        By layer, how many units stay; or what the resource may be, decreasing.
    score, tune, resource
        The validation accuracy of a model in eval mode; a short training of one, in place; what one takes (None: MACs).
    step
        The share of the resource that a round takes; less, where no layer gives as much with half its units.

    Returns
    -------
    nn.Module or list of Pruned
        The copy with the units of ``keep``, or the best one found for each budget.

    Raises
    ------
    ValueError
        The model is not such a chain, has no such layer or number of units, weights that are not finite, or cannot meet
        the budget.
    """
    sites = _sites(model, example)
    if keep is not None and budgets is None:
        return _smaller(model, sites, keep, example)
    if keep is not None or budgets is None:
        raise ValueError(f"give either keep or budgets, got keep={keep!r} and budgets={budgets!r}")
    budgets = [number("a budget", budget) for budget in budgets]
    step = number("step", step, high=1, open_low=True)
    decreasing = budgets == sorted(set(budgets), reverse=True)
    if not budgets or not decreasing or score is None:
        raise ValueError(f"budgets must decrease and need a score, got budgets={budgets} and score={score}")
    if resource is None:
        resource = partial(macs, example=example)
    return list(_family(model, example, sites, budgets, score, tune, resource, step))


def _family(model, example, sites, budgets, score, tune, resource, step) -> Iterator[Pruned]:
    """The best network found for each budget, each pruned from the one before."""

    def member(net: nn.Module) -> Pruned:
        net.eval()
        units = {name: site.units(net) for name, site in sites.items()}
        takes = number("resource", resource(net))
        return Pruned(net, units, takes, number("score", score(net), -torch.inf))

    def cost(name: str, units: int) -> float:
        """The resource of the best network so far with so many units in one layer."""
        return resource(_smaller(best.model, sites, {name: units}))

    smallest = _smaller(model, sites, dict.fromkeys(sites, 1), example)
    least = resource(smallest.eval())
    if least > budgets[-1]:
        raise ValueError(f"a budget of {budgets[-1]:g} cannot be met: with one unit in each layer it is {least:g}")
    best = member(deepcopy(model))
    for budget in budgets:
        while best.resource > budget:
            halved = min(cost(name, (n + 1) // 2) for name, n in best.keep.items())
            target = max(budget, best.resource * (1 - step), halved)
            trials = []
            for name, n in best.keep.items():
                most = bisect_right(range(1, n), target, key=partial(cost, name))  # units that meet the target
                if most:
                    trials.append(_smaller(best.model, sites, {name: most}, example))
            if not trials:  # a time measured twice is two times
                raise ValueError(f"no layer takes the resource from {best.resource:g} to {target:g}: is it exact?")
            if tune:
                for trial in trials:
                    tune(trial.train())
            best = max(map(member, trials), key=lambda each: each.score)
        yield deepcopy(best)


def macs(model: nn.Module, example: torch.Tensor) -> int:
    """The multiplications of a forward pass over the whole example, in Conv2d, Linear and LSTM layers."""
    count = 0
    for _, layer, output in _calls(model, example):
        if not isinstance(layer, (nn.Conv2d, nn.Linear, nn.LSTM)):
            continue
        if isinstance(layer, nn.LSTM):
            output = output[0]
        units = output.shape[1] if isinstance(layer, nn.Conv2d) else output.shape[-1]
        places = output.numel() // units  # pixels, words, samples: each meets every weight once
        count += places * sum(p.numel() for p in layer.parameters() if p.dim() > 1)
    return count


def latency(model: nn.Module, example: torch.Tensor, seconds: float = 0.2) -> float:
    """The median time of a forward pass in eval mode on one CPU thread, in seconds, measured for so many seconds."""
    run = partial(_output, deepcopy(model).eval(), example)
    return Timer("run()", globals={"run": run}).blocked_autorange(min_run_time=seconds).median


class _Site(NamedTuple):
    """The tensors with a place for each unit of a layer, and the attributes that hold the number of units.

    Each is a row: its module's name, its own, the dimension of the units, and how often all of them stand there.
    """

    incoming: tuple  # the weights that a unit's norm is taken of; none where the units are those of the layer before
    others: tuple
    inputs: tuple = ()  # the next layer's

    def units(self, model: nn.Module) -> int:
        name, tensor, dim, times = self.incoming[0]
        return getattr(model.get_submodule(name), tensor).shape[dim] // times


def _layout(name: str, layer: nn.Module) -> _Site:
    """The site of one layer, by its kind; ``inputs`` are its own, for the layer before it."""

    def at(*names: str, dim: int = 0, times: int = 1) -> tuple:
        return tuple((name, each, dim, times) for each in names)

    match layer:
        case nn.Conv2d(groups=1) | nn.Linear():
            inputs = at("weight", "in_channels", "in_features", dim=1)
            return _Site(at("weight"), at("bias", "out_channels", "out_features"), inputs)
        case nn.Embedding():
            return _Site(at("weight", dim=1), at("embedding_dim"))
        case nn.LSTM(num_layers=1, bidirectional=False, proj_size=0):
            others = at("bias_ih_l0", "bias_hh_l0", times=4) + at("weight_hh_l0", "hidden_size", dim=1)
            return _Site(at("weight_ih_l0", "weight_hh_l0", times=4), others, at("weight_ih_l0", "input_size", dim=1))
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            return _Site((), at("weight", "bias", "running_mean", "running_var", "num_features"))
        case nn.Conv2d() if layer.groups == layer.in_channels == layer.out_channels:
            return _Site((), at("weight", "bias", "in_channels", "out_channels", "groups"))
    raise ValueError(f"{name!r} cannot be cut here; an LSTM can, in modules of one layer and direction: {layer}")


def _calls(model: nn.Module, example: torch.Tensor) -> list[tuple]:
    """The layers in the order in which they are called: name, layer (of a copy), output."""
    model = deepcopy(model).eval()
    calls = []
    for name, layer in model.named_modules():  # those with weights or statistics of their own
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)) or [*layer.parameters(recurse=False)]:
            layer.register_forward_hook(lambda layer, _, output, name=name: calls.append((name, layer, output)))
    _output(model, example)
    return calls


def _sites(model: nn.Module, example: torch.Tensor) -> dict[str, _Site]:
    """By name, each layer that loses units, with all that has to shrink with it."""
    sites = {}
    seen = set()
    last = None  # the layer whose units come in
    for name, layer, _ in _calls(model, example):
        layout = _layout(name, layer)
        own = {layer, *layer.parameters(recurse=False)}
        if own & seen:
            raise ValueError(f"{name!r} is called twice, or shares its weights: the network is not a chain")
        seen |= own
        if layout.incoming:
            if last is not None:
                sites[last] = sites[last]._replace(inputs=layout.inputs)
            sites[name] = layout
            last = name
        elif last is not None:  # BatchNorm, or a depthwise convolution: the units are the same
            sites[last] = sites[last]._replace(others=sites[last].others + layout.others)
    sites.pop(last, None)  # its units are the classes
    return sites


def _smaller(
    model, sites: Mapping[str, _Site], keep: Mapping[str, int], example: torch.Tensor | None = None
) -> nn.Module:
    """A copy with so many units in these layers, those of the largest norms; checked with an example, if given."""
    smaller = deepcopy(model)
    for name, count in keep.items():
        site = sites[one_of("a layer of keep", name, tuple(sites))]
        squares = _norms_squared(model, site)
        if not squares.isfinite().all():
            raise ValueError(f"{name!r} has weights that are not finite")
        count = whole_number(f"keep[{name!r}]", count, 1, len(squares))
        stay = squares.topk(count).indices.sort().values  # (count,)
        if example is not None and not _same(smaller, site, stay, example):
            raise ValueError(f"{name!r} cannot lose units: without them, or with zeros, the outputs are not the same")
        _change(smaller, site, stay)
    return smaller


def _norms_squared(model: nn.Module, site: _Site) -> torch.Tensor:
    """The squared norm of each unit's incoming weights: ``(units,)``, float64."""
    units = site.units(model)
    squares = []
    for owner, tensor, dim, times in site.incoming:
        weight = getattr(model.get_submodule(owner), tensor).detach().double().unflatten(dim, (times, units, -1))
        by_unit = weight.movedim(dim + 1, 0).flatten(1)  # (units, weights)
        squares.append(by_unit.square().sum(1))
    return sum(squares, torch.zeros(()))


def _change(model: nn.Module, site: _Site, stay: torch.Tensor, mask: bool = False) -> None:
    """Cut all units but those that ``stay``, in place; with ``mask`` they become zeros, and the next layer stays."""
    units = site.units(model)
    rows = site.incoming + site.others
    if not mask:
        rows += site.inputs
    for name, attribute, dim, times in rows:
        owner = model.get_submodule(name)
        old = getattr(owner, attribute, None)
        if torch.is_tensor(old):
            blocks = old.detach().unflatten(dim, (times, units, -1))  # a unit may have many: a channel's pixels
            blocks = blocks - blocks.index_fill(dim + 1, stay, 0) if mask else blocks.index_select(dim + 1, stay)
            old.data = blocks.flatten(dim, dim + 2)
            old.grad = None
        elif old and not mask:  # a number of units, or of what they have
            setattr(owner, attribute, old // units * len(stay))


def _same(model: nn.Module, site: _Site, stay: torch.Tensor, example: torch.Tensor) -> bool:
    """Whether units cut are units zero; with random weights, since zeros among them would hide a difference."""
    model = deepcopy(model).double().eval()
    if example.is_floating_point():  # else it is words
        example = example.double()
    for seed, p in enumerate(model.parameters()):
        p.data.normal_(0, p.shape[1:].numel() ** -0.5, generator=torch.Generator(p.device).manual_seed(seed))
    try:
        _change(model, site, stay, mask=True)
        expected = _output(model, example)
        _change(model, site, stay)
        rounding = torch.finfo(expected.dtype).eps ** 0.5 * expected.abs().max().item()
        return torch.allclose(_output(model, example), expected, rtol=0, atol=rounding)
    except (AssertionError, IndexError, RuntimeError, ValueError):  # a shape does not fit
        return False


@torch.no_grad()
def _output(model: nn.Module, example: torch.Tensor) -> torch.Tensor:
    """The logits, whatever the model returns them in."""
    output = model(example)
    if isinstance(output, tuple):
        return output[0]
    return getattr(output, "logits", output)
