"""The rules for layers: a parameter's per-sample gradients, from what its layer read and its output's gradient.

Matrices become :class:`~plpkg.clipping.factors.Outer` products; biases and norm layers' weights are small and are
built, ``(batch, *shape)``. A layer without a rule here is differentiated example by example with ``torch.func``. Which
layers a model has, and which are refused, is in :mod:`plpkg.clipping.sites`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch.func import functional_call, vjp, vmap
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

    module: Any  # an nn.Module, of the kind that its rule is for
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
        first = self.args[0] if self.args else next(iter(self.kwargs.values()))
        return self.rows.by_example(first, self.batch)

    def gave(self, output: torch.Tensor) -> bool:
        """Whether the layer's output was this, but for rounding; yes where tensors hold no numbers."""
        return is_fake(output) or alike(output.to(self.outputs[0].dtype), self.outputs[0])


def linear(call: Call) -> Contributions:
    """y = x·Wᵀ + b: g ⊗ x."""
    g = _positions(call.gradients[0])
    x = _positions(call.read)
    return _with_bias(call, Outer(g, x, call.module.weight.shape), g)


def conv1d_of_transformers(call: Call) -> Contributions:
    """GPT-2's layer, y = x·W + b: x ⊗ g."""
    g = _positions(call.gradients[0])
    x = _positions(call.read)
    return _with_bias(call, Outer(x, g, call.module.weight.shape), g)


def embedding(call: Call) -> Contributions:
    """Rows of a table: one-hot ⊗ g. The row of ``padding_idx`` does not learn."""
    read = call.read
    ids = read.flatten(1) if read.ndim > 1 else read[:, None]  # (batch, positions)
    width = call.gradients[0].shape[-1]
    g = call.gradients[0].reshape(*ids.shape, width)
    padding = call.module.padding_idx
    if padding is not None:
        g = g * (ids != padding)[:, :, None]
    return {"weight": Outer(ids, g[:, None], call.module.weight.shape)}


def scaled_embedding(call: Call, factor: float) -> Contributions:
    """A model family's own table, whose rows are multiplied by one number (Gemma's √hidden).

    A kind of embedding that does something else with its ids, which it did not with those that it was asked with
    (:func:`embedding_scale`), gives other rows here: then :func:`any_layer` takes it.
    """
    ids = call.read
    table = call.module.weight.detach()
    in_range = is_fake(ids) or bool((ids >= 0).all() and (ids < len(table)).all())
    if _with_more(call) or not in_range:
        return any_layer(call)
    if not call.gave(factor * nn.functional.embedding(ids, table)):
        return any_layer(call)
    gradients = tuple(g * factor for g in call.gradients)
    return embedding(replace(call, gradients=gradients))


def convolution(call: Call) -> Contributions:
    """A convolution is a linear layer on patches, group by group."""
    if call.rows.each > 1:
        return any_layer(call)
    module = call.module
    x = call.read
    g = call.gradients[0]  # (batch, out, *positions)
    if g.ndim == len(module.kernel_size) + 1:
        raise ValueError(f"an input of shape {tuple(x.shape)} has no batch")
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = nn.functional.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    kernel, dilation, stride = module.kernel_size, module.dilation, module.stride
    if len(kernel) == 1:  # unfold takes images alone: one row of pixels
        x = x[:, :, None]
        kernel, dilation, stride = (1, *kernel), (1, *dilation), (1, *stride)
    patches = nn.functional.unfold(x, kernel, dilation=dilation, stride=stride)  # (batch, in·k, positions)
    cols = patches.unflatten(1, (module.groups, -1)).mT  # (batch, groups, positions, in/groups·k)
    rows = g.flatten(2).unflatten(1, (module.groups, -1)).mT  # (batch, groups, positions, out/groups)
    of_bias = rows.transpose(1, 2).flatten(2)[:, None]  # (batch, 1, positions, out)
    return _with_bias(call, Outer(rows, cols, module.weight.shape), of_bias)


def norm(call: Call) -> Contributions:
    """A LayerNorm, y = x̂·w + b, or an RMSNorm, y = x̂·w."""
    module = call.module
    normalise = nn.functional.layer_norm if isinstance(module, nn.LayerNorm) else nn.functional.rms_norm
    normal = normalise(call.read, module.normalized_shape, eps=module.eps)  # (batch, *positions, *normalized_shape)
    positions = range(1, normal.ndim - len(module.normalized_shape))
    return _affine(call, normal, positions)


def group_norm(call: Call) -> Contributions:
    """y = x̂·w + b, a weight for each channel (the second dimension)."""
    if call.rows.each > 1:
        return any_layer(call)
    module = call.module
    normal = nn.functional.group_norm(call.read, module.num_groups, eps=module.eps)  # (batch, channels, *positions)
    return _affine(call, normal, range(2, normal.ndim))


def scale(call: Call, offset: int) -> Contributions:
    """A model family's own RMSNorm, y = x̂·(w + o): x̂ is what it gives for w + o = 1."""
    if _with_more(call):
        return any_layer(call)
    (name,) = call.wanted
    weight = getattr(call.module, name).detach()
    neutral = torch.full_like(weight, 1 - offset)
    output = functional_call(call.module, {name: neutral}, call.args, call.kwargs)
    normal = call.rows.by_example(output, call.batch)
    if not call.gave(normal * (weight + offset)):
        return any_layer(call)
    return _affine(call, normal, range(1, normal.ndim - 1), weight=name)


def _with_more(call: Call) -> bool:
    """Whether a layer has got more than the one argument that it was asked with: :func:`scale_offset`."""
    return len(call.args) + len(call.kwargs) > 1


def any_layer(call: Call) -> Contributions:
    """The gradients example by example, as ``torch.func`` builds them: fast gradient clipping's way."""
    parameters = {name: call.module.get_parameter(name).detach() for name in call.wanted}
    again = _Again(call)
    if again.has_cache:
        raise NotImplementedError(
            "it writes into a cache, and cannot be run again: call the model with use_cache=False"
        )
    if call.batch == 0:
        return {name: p.new_zeros(0, *p.shape) for name, p in parameters.items()}
    kind = type(call.module).__name__
    try:
        gradients, outputs = again.gradients(parameters)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise NotImplementedError(f"{kind} cannot be differentiated example by example ({reason})") from error
    for once, output in zip(call.outputs, outputs, strict=False):
        if not is_fake(once) and not alike(once, output):
            raise NotImplementedError(
                f"{kind} gives something else when it is run again for one example at a time (it keeps a state, draws "
                "random numbers, or reads a tensor as long as the batch that is none)"
            )
    return gradients


class _Again:
    """A layer that is called again, for one example at a time."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._leaves, self._structure = tree_flatten((call.args, call.kwargs))
        self._own = _own(self._leaves, call)

    @property
    def has_cache(self) -> bool:
        return any(isinstance(leaf, Cache) for leaf in self._leaves)

    def gradients(self, parameters: dict[str, torch.Tensor]) -> tuple[Contributions, tuple[torch.Tensor, ...]]:
        """The parameters' per-sample gradients, and what the layer gives, ``(batch, …)`` each."""
        call = self._call
        masks = tuple(each_example(mask, call.batch) for mask in call.masks)
        inputs = tuple(self._leaves[place].unflatten(0, (call.batch, -1)) for place in self._own)
        given = call.gradients, masks, inputs  # each tensor with the batch first
        try:
            return vmap(partial(self._by_func, parameters))(*given)
        except RuntimeError:  # a kernel or an autograd function that torch.func does not know: one after the other
            before = RandomState()
            each = []
            for example in range(call.batch):
                each.append(self._by_autograd(parameters, *tree_map(itemgetter(example), given)))
            if before != RandomState():
                raise RuntimeError("it draws random numbers") from None
            return tree_map(lambda *parts: torch.stack(parts), *each)

    def _by_func(self, parameters, gradients, masks, inputs):
        """One example's, by ``torch.func``: this runs within ``vmap``."""
        outputs, backward, *_ = vjp(lambda learning: self._forward(learning, masks, inputs), parameters)
        (found,) = backward(self._as_given(gradients))
        return found, self._of_example(outputs)

    def _by_autograd(self, parameters, gradients, masks, inputs):
        """One example's, by autograd."""
        learning = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        with torch.enable_grad():
            outputs = self._forward(learning, masks, inputs)
            found = torch.autograd.grad(
                outputs,
                list(learning.values()),
                self._as_given(gradients),
                allow_unused=True,
                materialize_grads=True,
            )
        detached = tuple(output.detach() for output in outputs)
        return dict(zip(learning, found, strict=True)), self._of_example(detached)

    def _forward(self, parameters, masks, inputs) -> tuple[torch.Tensor, ...]:
        """The layer's outputs for one example's inputs, with what was dropped then."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._own, inputs, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._structure)
        with Kept(masks):
            output = functional_call(self._call.module, parameters, args, kwargs)
        return tuple(float_tensors(output))

    def _as_given(self, gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """An example's gradients in the shapes of the layer's outputs, when that is the only example."""
        if self._call.rows.each > 1:
            return gradients
        return tuple(gradient[None] for gradient in gradients)

    def _of_example(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The outputs without that dimension."""
        if self._call.rows.each > 1:
            return outputs
        return tuple(output[0] for output in outputs)


def _own(leaves: list, call: Call) -> list[int]:
    """The places of the tensors that hold the examples' rows."""
    rows = call.rows
    if rows.shared:
        return []
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if rows.own is None:  # shapes alone tell
        return [place for place in places if rows.fit(leaves[place], call.batch)]
    own = []
    for place, grows in zip(places, rows.own, strict=False):
        leaf = leaves[place]
        if grows and leaf.ndim and len(leaf) % call.batch == 0:
            own.append(place)
    return own


def rule_for(module: nn.Module) -> Callable[[Call], Contributions]:
    """The rule for a layer: by its type, by asking it (norms of model families), or :func:`any_layer`."""
    if "forward" in vars(module) or not set(module._parameters.keys()) <= {"weight", "bias"}:
        return any_layer
    for kind, rule in RULES.items():
        if isinstance(module, kind) and _computes_as(module, kind):
            return rule
    offset = scale_offset(module)
    if offset is not None:
        return partial(scale, offset=offset)
    factor = embedding_scale(module)
    if factor is not None:
        return partial(scaled_embedding, factor=factor)
    return any_layer


def _computes_as(module: nn.Module, kind: type) -> bool:
    """Whether a layer has the forward of its kind; a subclass with its own may compute something else."""
    forwards = ("forward", "_conv_forward")
    return all(getattr(type(module), name, None) is getattr(kind, name, None) for name in forwards)


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
    offsets: set[int] = set()
    with unset_fake_temporarily(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        w = torch.randn(len(weight), generator=generator)
        for shape in ((2,), (2, 3), (2, 3, 4)):  # vectors, texts, heads: it may have the channels elsewhere in some
            x = torch.randn(*shape, len(w), generator=generator)
            offset = _offset_at(module, name, w, x)
            if offset is None:
                return None
            offsets.add(offset)
    return offsets.pop() if len(offsets) == 1 else None


def _offset_at(module: nn.Module, name: str, w: torch.Tensor, x: torch.Tensor) -> int | None:
    """The o for which the layer computes x̂·(w + o) of this x, with its parameter ``name`` as w."""
    try:
        zero = functional_call(module, {name: torch.zeros_like(w)}, (x,))  # o·x̂
        one = functional_call(module, {name: torch.ones_like(w)}, (x,))  # (1 + o)·x̂
        some = functional_call(module, {name: w}, (x,))
    except (RuntimeError, TypeError, ValueError):
        return None
    if one.shape != x.shape:
        return None
    normal = one - zero
    if not torch.allclose(zero + w * normal, some, atol=1e-5):
        return None
    for offset in (0, 1):
        if torch.allclose(zero, offset * normal, atol=1e-5):
            return offset
    return None


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
    """A weight's factors; and a bias, whose gradients are the sums over positions of ``g``, ``(batch, 1, …, out)``."""
    wide = torch.promote_types(g.dtype, torch.float32)
    return _wanted(call, weight=lambda: weight, bias=lambda: g.sum((1, 2), dtype=wide))


def _affine(call: Call, normal: torch.Tensor, positions: range, weight: str = "weight") -> Contributions:
    """y = normal·weight + bias, with the same weights all along the dimensions ``positions``."""
    g = call.gradients[0].to(torch.promote_types(normal.dtype, torch.float32))

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum(tuple(positions)) if positions else x

    return _wanted(call, **{weight: lambda: total(g * normal), "bias": lambda: total(g)})


def _wanted(call: Call, **parts: Callable) -> Contributions:
    """Those parts whose parameters learn; the others are not computed."""
    return {name: parts[name]() for name in call.wanted}


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
