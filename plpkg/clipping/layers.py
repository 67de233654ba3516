"""What each layer adds to its parameters' per-sample gradients, from what it read and its output's gradient.

Matrices become :class:`~plpkg.clipping.factors.Outer` products; biases and norm layers' weights are small and are
built, ``(batch, *shape)``. A layer without a rule here is differentiated example by example with ``torch.func``. What
mixes examples, or depends on them in another way than through its gradient, is refused by name.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch.func import functional_call, vjp, vmap
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers.cache_utils import Cache
from transformers.pytorch_utils import Conv1D

from plpkg.clipping.batches import OWN, Rows, alike, float_tensors
from plpkg.clipping.dropout import Kept, RandomState, each_example
from plpkg.clipping.factors import Outer

Contributions = dict[str, Outer | torch.Tensor]
"""By the parameter's name in its module: factors, or the gradients themselves, ``(batch, *shape)``."""


@dataclass(frozen=True)
class Call:
    """One call of a layer, seen from its backward pass."""

    module: nn.Module
    wanted: tuple[str, ...]  # the names of its parameters that learn
    args: tuple
    kwargs: dict
    gradients: tuple[torch.Tensor, ...]  # the loss's, by example, at each of the float_tensors that it returned
    batch: int
    rows: Rows = OWN
    outputs: tuple[torch.Tensor, ...] = ()  # what it gave, if the rule's has to be compared with it
    masks: tuple[torch.Tensor, ...] = ()  # what it dropped then

    @property
    def read(self) -> torch.Tensor:
        """The first argument, ``(batch, …)``."""
        return self.rows.by_example(self.args[0] if self.args else next(iter(self.kwargs.values())), self.batch)

    def gave(self, output: torch.Tensor) -> bool:
        """Whether the layer's output was this, but for rounding; yes where tensors hold no numbers."""
        return is_fake(output) or alike(output.to(self.outputs[0].dtype), self.outputs[0])


def linear(call: Call) -> Contributions:
    """y = x·Wᵀ + b: g ⊗ x."""
    g, x = _positions(call.gradients[0]), _positions(call.read)
    return _with_bias(call, Outer(g, x, call.module.weight.shape), g)


def conv1d_of_transformers(call: Call) -> Contributions:
    """GPT-2's layer, y = x·W + b: x ⊗ g."""
    g, x = _positions(call.gradients[0]), _positions(call.read)
    return _with_bias(call, Outer(x, g, call.module.weight.shape), g)


def embedding(call: Call) -> Contributions:
    """Rows of a table: one-hot ⊗ g. The row of ``padding_idx`` does not learn."""
    ids = call.read.flatten(1) if call.read.ndim > 1 else call.read[:, None]
    g = call.gradients[0].reshape(*ids.shape, call.gradients[0].shape[-1])
    if call.module.padding_idx is not None:
        g = g * (ids != call.module.padding_idx)[:, :, None]
    return {"weight": Outer(ids, g[:, None], call.module.weight.shape)}


def scaled_embedding(call: Call, factor: float) -> Contributions:
    """A model family's own table, whose rows are multiplied by one number (Gemma's √hidden).

    A kind of embedding that does something else with its ids, which it did not with those that it was asked with
    (:func:`embedding_scale`), gives other rows here: then :func:`any_layer` takes it.
    """
    ids, table = call.read, call.module.weight.detach()
    in_range = is_fake(ids) or bool((ids >= 0).all() and (ids < len(table)).all())
    if _with_more(call) or not in_range or not call.gave(factor * nn.functional.embedding(ids, table)):
        return any_layer(call)
    gradients = tuple(g * factor for g in call.gradients)
    return embedding(replace(call, gradients=gradients))


def convolution(call: Call) -> Contributions:
    """A convolution is a linear layer on patches, group by group."""
    if call.rows.each > 1:
        return any_layer(call)
    module, x, g = call.module, call.read, call.gradients[0]
    if g.ndim == len(module.kernel_size) + 1:
        raise ValueError(f"an input of shape {tuple(x.shape)} has no batch")
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = nn.functional.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    flat = len(module.kernel_size) == 1
    kernel, dilation, stride = (
        (1, *size) if flat else size for size in (module.kernel_size, module.dilation, module.stride)
    )
    patches = nn.functional.unfold(x[:, :, None] if flat else x, kernel, dilation=dilation, stride=stride)
    g = g.flatten(2).unflatten(1, (module.groups, -1)).mT  # (batch, groups, positions, out/groups)
    cols = patches.unflatten(1, (module.groups, -1)).mT  # (batch, groups, positions, in/groups·k)
    return _with_bias(call, Outer(g, cols, module.weight.shape), g.transpose(1, 2).flatten(2)[:, None])


def norm(call: Call) -> Contributions:
    """A LayerNorm, y = x̂·w + b, or an RMSNorm, y = x̂·w."""
    module = call.module
    normalise = nn.functional.layer_norm if isinstance(module, nn.LayerNorm) else nn.functional.rms_norm
    normal = normalise(call.read, module.normalized_shape, eps=module.eps)
    return _affine(call, normal, range(1, normal.ndim - len(module.normalized_shape)))


def group_norm(call: Call) -> Contributions:
    """y = x̂·w + b, a weight for each channel (the second dimension)."""
    if call.rows.each > 1:
        return any_layer(call)
    module, x = call.module, call.read
    normal = nn.functional.group_norm(x, module.num_groups, eps=module.eps)
    return _affine(call, normal, range(2, normal.ndim))


def scale(call: Call, offset: int) -> Contributions:
    """A model family's own RMSNorm, y = x̂·(w + o): x̂ is what it gives for w + o = 1."""
    if _with_more(call):
        return any_layer(call)
    (name,) = call.wanted
    weight = getattr(call.module, name).detach()
    one = torch.full_like(weight, 1 - offset)
    normal = call.rows.by_example(functional_call(call.module, {name: one}, call.args, call.kwargs), call.batch)
    if not call.gave(normal * (weight + offset)):
        return any_layer(call)
    return _affine(call, normal, range(1, normal.ndim - 1), weight=name)


def _with_more(call: Call) -> bool:
    """Whether a layer has got more than the one argument that it was asked with: :func:`scale_offset`."""
    return len(call.args) + len(call.kwargs) > 1


def any_layer(call: Call) -> Contributions:
    """The gradients example by example, as ``torch.func`` builds them: fast gradient clipping's way."""
    parameters = {name: call.module.get_parameter(name).detach() for name in call.wanted}
    leaves, structure = tree_flatten((call.args, call.kwargs))
    own = _own(leaves, call)
    if any(isinstance(leaf, Cache) for leaf in leaves):
        raise NotImplementedError(
            "it writes into a cache, and cannot be run again: call the model with use_cache=False"
        )
    if call.batch == 0:
        return {name: p.new_zeros(0, *p.shape) for name, p in parameters.items()}

    def alone(gradient: torch.Tensor) -> torch.Tensor:
        """An example's part of a gradient, as the layer has it when that is the only example."""
        return gradient[None] if call.rows.each == 1 else gradient

    def forward(parameters, masks, *examples):
        filled = list(leaves)
        for place, example in zip(own, examples, strict=True):
            filled[place] = example
        args, kwargs = tree_unflatten(filled, structure)
        with Kept(masks):
            return tuple(float_tensors(functional_call(call.module, parameters, args, kwargs)))

    first = 0 if call.rows.each == 1 else slice(None)

    def one(gradients, *given):
        outputs, backward = vjp(lambda parameters: forward(parameters, *given), parameters)
        return backward(tuple(map(alone, gradients)))[0], tuple(output[first] for output in outputs)

    def one_by_autograd(gradients, *given):
        learning = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        with torch.enable_grad():
            outputs = forward(learning, *given)
            found = torch.autograd.grad(
                outputs, list(learning.values()), list(map(alone, gradients)), allow_unused=True, materialize_grads=True
            )
        return dict(zip(learning, found, strict=True)), tuple(output.detach()[first] for output in outputs)

    masks = tuple(each_example(mask, call.batch) for mask in call.masks)
    given = call.gradients, masks, *(leaves[i].unflatten(0, (call.batch, -1)) for i in own)
    try:
        try:
            gradients, outputs = vmap(one)(*given)
        except RuntimeError:  # a kernel or an autograd function that torch.func does not know: one after the other
            before = RandomState()
            each = [one_by_autograd(*tree_map(itemgetter(i), given)) for i in range(call.batch)]
            if before != RandomState():
                raise RuntimeError("it draws random numbers") from None
            gradients, outputs = tree_map(lambda *parts: torch.stack(parts), *each)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise NotImplementedError(
            f"{type(call.module).__name__} cannot be differentiated example by example ({reason})"
        ) from error
    if not all(is_fake(once) or alike(once, again) for once, again in zip(call.outputs, outputs, strict=False)):
        raise NotImplementedError(
            f"{type(call.module).__name__} gives something else when it is run again for one example at a time "
            "(it keeps a state, draws random numbers, or reads a tensor as long as the batch that is none)"
        )
    return gradients


def rule_for(module: nn.Module) -> Callable[[Call], Contributions]:
    """The rule for a layer: by its type, by asking it (norms of model families), or :func:`any_layer`."""
    if "forward" in vars(module) or not set(module._parameters.keys()) <= {"weight", "bias"}:
        return any_layer
    for kind, rule in RULES.items():
        # A subclass with its own forward may compute something else.
        if isinstance(module, kind) and all(
            getattr(type(module), name, None) is getattr(kind, name, None) for name in ("forward", "_conv_forward")
        ):
            return rule
    if (offset := scale_offset(module)) is not None:
        return partial(scale, offset=offset)
    if (factor := embedding_scale(module)) is not None:
        return partial(scaled_embedding, factor=factor)
    return any_layer


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
        """What a call adds to each parameter's per-sample gradients, by the parameter's name in the model."""
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
    learning, covered = [], set()
    for name, module in model.named_modules():
        if module in covered or isinstance(module, HOLDERS):
            continue
        # DoRA's magnitude is computed from LoRA's factors, past their layers.
        unit = isinstance(module, UNITS) or bool(getattr(module, "lora_magnitude_vector", None))
        if unit:
            covered |= set(module.modules())
            keys = {n: names[id(p)] for n, p in module.named_parameters() if id(p) in names}
        else:
            keys = {n: names[id(p)] for n, p in _held(module) if id(p) in names}
            if keys:  # what a layer below owns as well is counted there
                below = {names.get(id(p)) for child in _layers_below(module) for p in child.parameters()}
                keys = {n: key for n, key in keys.items() if key not in below}
        if keys:
            whole = unit or any("." in n for n in keys)
            learning.append(Site(name, module, any_layer if whole else rule_for(module), keys))
    return learning


def _held(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """A module's own parameters, and those that it keeps in lists and the like, which are never called."""
    yield from ((prefix + name, p) for name, p in module._parameters.items() if p is not None)
    for name, child in module.named_children():
        if isinstance(child, HOLDERS):
            yield from _held(child, f"{prefix}{name}.")


def _layers_below(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, HOLDERS):
            yield from _layers_below(child)
        else:
            yield child


def refusal(module: nn.Module, alone: bool = False) -> str | None:
    """Why a layer's examples depend on each other or, where one is not ``alone``, cannot be told apart; or ``None``."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        if module.training or module.running_mean is None:
            return (
                "normalises each example by the others: replace it by GroupNorm (opacus.validators.ModuleValidator.fix "
                "does), or fold it into its convolution (torch.nn.utils.fuse_conv_bn_eval); eval() alone is undone by "
                "the next model.train()"
            )
    elif isinstance(module, nn.modules.instancenorm._InstanceNorm):
        if module.track_running_stats and module.training:
            return "keeps running statistics of private examples: use track_running_stats=False"
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        learns = module.weight.requires_grad
        if module.max_norm is not None:
            return f"has max_norm={module.max_norm}, which rescales the rows that a batch reads, outside the gradient"
        if learns and module.scale_grad_by_freq and not alone:
            return "has scale_grad_by_freq=True, which scales an example's gradient by the others' tokens"
        if learns and module.sparse:
            return "has sparse=True; the noise of DP-SGD is dense: use sparse=False"
    elif alone:
        return None
    elif isinstance(module, torch.jit.ScriptModule) and any(p.requires_grad for p in module.parameters()):
        return f"is {SCRIPTED}"
    elif merges(module) and any(p.requires_grad for p in module.parameters()):
        return "puts its weights into those of the layer below as it runs, past what is watched"
    elif _is_spectral(module) and any(p.requires_grad for _, p in _held(module)):
        return "computes its weight anew whenever it is run, and cannot be run again for each example"
    elif reason := REFUSED.get(type(module).__name__):
        return reason if any(p.requires_grad for p in module.parameters()) else None
    elif isinstance(module, nn.RNNBase) and any(p.requires_grad for p in module.parameters()):
        kind = type(module).__name__
        return f"is a fused kernel, whose state has the examples second: take opacus.layers.DP{kind}"
    elif isinstance(module, nn.MultiheadAttention) and not module.batch_first and module.out_proj.weight.requires_grad:
        return "has batch_first=False; the first dimension must be the batch"
    return None


def merges(module: nn.Module) -> bool:
    """Whether it is a layer of PEFT that merges its weights while it runs: LoRA on a ``nn.MultiheadAttention``, or with
    ``target_parameters``.
    """
    kind = type(module)
    return kind.__module__.startswith("peft.") and kind.__name__ in ("MultiheadAttention", "ParamWrapper")


def _is_spectral(module: nn.Module) -> bool:
    """Whether a weight is divided by its largest singular value, by a parametrization or the older hook."""
    lists = module.parametrizations.values() if is_parametrized(module) else ()
    parts = (*module._forward_pre_hooks.values(), *(each for parts in lists for each in parts))
    return any(isinstance(each, (_SpectralNorm, SpectralNorm)) for each in parts)


def check_layers(model: nn.Module, *, alone: bool = False) -> None:
    """Refuse what mixes examples or, where one is not ``alone``, cannot tell them apart.

    Raises
    ------
    ValueError
        The message names the layer.
    """
    for name, module in model.named_modules():
        if reason := refusal(module, alone):
            otherwise = "" if refusal(module, alone=True) else f"; {LOOP_TAKES_IT}"
            raise ValueError(f"{name or 'the model'} ({type(module).__name__}) {reason}{otherwise}")


def scale_offset(module: nn.Module) -> int | None:
    """Whether a layer computes x̂·(w + o) with one vector w: o (0, or 1 as Gemma's), or ``None``.

    Asked of the layer itself with random numbers, since the families name theirs differently.
    """
    parameters = dict(module.named_parameters())
    if "Norm" not in type(module).__name__ or len(parameters) != 1 or len(module._parameters) != 1:
        return None
    ((name, weight),) = parameters.items()
    if weight.ndim != 1 or len(weight) == 1:  # one number for all would be one for each of one
        return None
    offsets: set[int | None] = set()
    with unset_fake_temporarily(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        w = torch.randn(len(weight), generator=generator)
        for shape in ((2,), (2, 3), (2, 3, 4)):  # vectors, texts, heads: it may have the channels elsewhere in some
            x = torch.randn(*shape, len(w), generator=generator)
            try:
                zero, one, some = (functional_call(module, {name: value}, (x,)) for value in (0 * w, w**0, w))
            except (RuntimeError, TypeError, ValueError):
                return None
            if one.shape != x.shape or not torch.allclose(zero + w * (one - zero), some, atol=1e-5):
                return None
            fits = [offset for offset in (0, 1) if torch.allclose(zero, offset * (one - zero), atol=1e-5)]
            offsets.add(fits[0] if fits else None)
    return offsets.pop() if len(offsets) == 1 else None


def embedding_scale(module: nn.Module) -> float | None:
    """The number that a kind of embedding multiplies its rows with, or ``None`` if it does something else."""
    if not isinstance(module, nn.Embedding) or len(module._parameters) != 1:
        return None
    with unset_fake_temporarily(), torch.no_grad():
        table = torch.randn(module.weight.shape[0], 5, generator=torch.Generator().manual_seed(0))
        ids = torch.arange(len(table))[None]
        try:
            rows = functional_call(module, {"weight": table}, (ids,))[0]
        except (IndexError, RuntimeError, TypeError, ValueError):  # learned positions may look beyond the table
            return None
        factor = (rows[0, 0] / table[0, 0]).item()
        return factor if torch.allclose(rows, factor * table, rtol=1e-5) else None


def _positions(x: torch.Tensor) -> torch.Tensor:
    """``(batch, …, n)`` as ``(batch, 1, positions, n)``."""
    return x.reshape(len(x), 1, math.prod(x.shape[1:-1]), x.shape[-1])


def _with_bias(call: Call, weight: Outer, g: torch.Tensor) -> Contributions:
    wide = torch.promote_types(g.dtype, torch.float32)
    return _wanted(call, weight=lambda: weight, bias=lambda: g.sum((1, 2), dtype=wide))


def _affine(call: Call, normal: torch.Tensor, positions: range, weight: str = "weight") -> Contributions:
    """y = normal·weight + bias, with the same weights all along the dimensions ``positions``."""
    g = call.gradients[0].to(torch.promote_types(normal.dtype, torch.float32))

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum(tuple(positions)) if positions else x

    return _wanted(call, **{weight: lambda: total(g * normal), "bias": lambda: total(g)})


def _wanted(call: Call, **parts: Callable) -> Contributions:
    return {name: parts[name]() for name in call.wanted}


def _own(leaves: list, call: Call) -> list[int]:
    """The places of the tensors that hold the examples' rows."""
    rows, places = call.rows, [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if rows.shared:
        return []
    if rows.own is None:  # shapes alone tell
        return [i for i in places if rows.fit(leaves[i], call.batch)]
    whole = [i for i, grows in zip(places, rows.own, strict=False) if grows and leaves[i].ndim]
    return [i for i in whole if len(leaves[i]) % call.batch == 0]


RULES: Mapping[type, Callable[[Call], Contributions]] = {
    nn.Linear: linear,
    Conv1D: conv1d_of_transformers,
    nn.Embedding: embedding,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.LayerNorm: norm,
    nn.RMSNorm: norm,
    nn.GroupNorm: group_norm,
}
_PROMPT = "gives the same row to all examples, which PEFT then repeats: its examples cannot be told apart"
REFUSED: Mapping[str, str] = {
    "PromptEmbedding": _PROMPT,
    "PromptEncoder": _PROMPT,
    "PrefixEncoder": _PROMPT,
}
"""PEFT's layers by name, which need not be loaded."""
SCRIPTED = "compiled by torch.jit, which takes no hooks: give the module that it was made of"
LOOP_TAKES_IT = "execution='loop' takes it, one example at a time"
HOLDERS = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict, ParametrizationList)
"""What keeps parameters or layers for the module that it is in."""
UNITS = (nn.MultiheadAttention,)
"""Layers that use their children's parameters without calling the children."""
