"""One backward pass gives every example's gradient: layers are watched, clipped, and added up.

A layer with parameters that learn is called with them frozen, so that autograd computes no weight gradient at all. Its
output goes through a *tap*: an identity whose backward hands on what the layer read, and its output's gradient. From
the two follow the per-sample gradients (:mod:`plpkg.clipping.layers`), as factors where they are matrices. A *pass*
takes them: :class:`NormPass` the norms, and the sums of what is kept until the norms are known; :class:`SumPass`, a
second backward pass, the sums that nothing was kept for. :class:`Recorder` puts taps behind a model's layers for as
long as a step takes, and runs the passes; a guard checks that examples stay apart (:mod:`plpkg.clipping.mixing`).

Each node of the graph reports once, however often its forward was run, which makes reused layers, tied weights and
both kinds of gradient checkpointing come out right. A parameter that is used past its layer, as in
``F.linear(h, embedding.weight)``, gets a gradient from autograd itself; that is noticed, and refused.

Left out: what a layer hands on in another way than by returning it (an auxiliary loss that it keeps as an attribute);
compiled models; hooks for every module (``register_module_forward_hook``) that change outputs: PyTorch runs them before
a layer's own, so that their part of the gradient is missed.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers.cache_utils import Cache

from plpkg.clipping import factors
from plpkg.clipping.batches import Rows, behind, float_tensors
from plpkg.clipping.clip import Clip, check_finite
from plpkg.clipping.dropout import Kept
from plpkg.clipping.execution import Execution
from plpkg.clipping.factors import Outer
from plpkg.clipping.layers import LOOP_TAKES_IT, SCRIPTED, Call, Site, check_layers, sites
from plpkg.clipping.mixing import Guard, Probe, RowPass, modules_of
from plpkg.clipping.replay import Projections
from plpkg.memory import GradientLabel

# Taps


class _Tap(torch.autograd.Function):
    """Hands on the first ``count`` tensors as they are, and reports in the backward pass. The others are saved."""

    @staticmethod
    def forward(ctx, report, count, anchor, *tensors):
        ctx.report, ctx.others = report, len(tensors) - count
        ctx.save_for_backward(*tensors[count:])  # lets checkpointing recompute them
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx, *gradients):
        ctx.report(ctx.saved_tensors, gradients)
        return None, None, None, *gradients, *[None] * ctx.others


def has_hooks(parameter: torch.nn.Parameter) -> bool:
    """Whether something waits for a parameter's gradient, an optimizer in the backward pass, say, and may read it."""
    accumulated = (parameter._post_accumulate_grad_hooks or {}).values()
    return bool(parameter._backward_hooks) or not all(isinstance(hook, GradientLabel) for hook in accumulated)


def tap(
    site: Site,
    batch: int,
    rows: Rows,
    args: tuple,
    kwargs: dict,
    output,
    masks: Sequence[torch.Tensor],
    wanted: Callable[[Site], tuple[str, ...]],
    see: Callable[[Site, Call, torch.autocast], None],
):
    """Let a layer's output through; its backward tells what the layer read and what gradient came.

    Parameters
    ----------
    site, args, kwargs, output, masks
        The layer, what it was called with, what it gave, and what it dropped.
    batch, rows
        Examples, and which rows of the output are theirs.
    wanted
        Asked in the backward pass which of the site's parameters to report; nothing is reported for none.
    see
        Told then: the site, the call, and the precision that the forward pass ran in.

    Returns
    -------
    The output with its tensors tapped, each with rows of its own for each example; ``None``, which leaves a hook's
    output as it is, where no gradient will come.
    """
    if not torch.is_grad_enabled():
        return None
    leaves, structure = tree_flatten((args, kwargs))
    results, shape = tree_flatten(output)
    places = [i for i, leaf in enumerate(results) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    # What is the same for all examples gets a gradient of its own for each of them.
    outputs = [rows.given(results[i], batch) for i in places]
    inputs = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    # Copies: what comes after the layer may change its output in place, as nn.ReLU(inplace=True) does.
    again = [_by_example(rows, tensor.detach().clone(), batch) for tensor in outputs if site.is_compared]
    device = outputs[0].device.type
    precision = dict(dtype=torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device))
    others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]

    def report(saved: Sequence[torch.Tensor], gradients: tuple[torch.Tensor, ...]) -> None:
        if names := wanted(site):
            rest = iter(saved)
            filled = [next(rest) if known else other for known, other in zip(tensors, others, strict=True)]
            args, kwargs = tree_unflatten(filled, structure)
            gave, dropped = tuple(islice(rest, len(again))), tuple(rest)
            by_example = tuple(_by_example(rows, gradient, batch) for gradient in gradients)
            call = Call(site.module, names, args, kwargs, by_example, batch, rows, gave, dropped)
            see(site, call, torch.autocast(device, **precision))

    anchor = torch.zeros(0, requires_grad=True)  # so that the first layer's output has a gradient, too
    tapped = _Tap.apply(report, len(places), anchor, *outputs, *inputs, *again, *masks)
    for place, tensor in zip(places, tapped, strict=True):
        results[place] = tensor
    return tree_unflatten(results, shape)


def _by_example(rows: Rows, given: torch.Tensor, batch: int) -> torch.Tensor:
    return given if rows.shared else rows.by_example(given, batch)


# Passes


@dataclass(eq=False)
class ClipGroup:
    """Parameters that are scaled by one norm, to ``limit``: all of them, or a layer's."""

    limit: float
    waiting: set[str] = field(default_factory=set)  # those whose gradients are not known
    square: torch.Tensor | None = None  # (batch,): the squared norm of the others' gradients
    kept: dict[str, list[Outer] | torch.Tensor] = field(default_factory=dict)  # what their sums are to be made of


class NormPass:
    """The norm of each example's gradient, and the sums of what is kept.

    Parameters
    ----------
    layers
        The layer of each parameter; ``per_layer`` scales by it.
    uses
        How often each parameter's layers were called.
    clip, execution
        What is done with a norm, and what is kept.
    owners
        ``(batch,)``: the number of the user to whom each example belongs, if users are clipped and not examples.
    beside
        Is told each part of a gradient.

    Attributes
    ----------
    sums
        By parameter, the sums of clipped gradients.
    """

    def __init__(
        self,
        layers: Mapping[str, str],
        uses: Mapping[str, int],
        clip: Clip,
        execution: Execution,
        owners: torch.Tensor | None = None,
        beside: Projections | None = None,
    ) -> None:
        self._uses, self._clip, self._execution, self._beside = uses, clip, execution, beside
        self._owners, self._members = owners, None if owners is None else factors.members_of(owners)
        limits = clip.limits(list(dict.fromkeys(layers.values())))
        groups = {name: ClipGroup(limit) for name, limit in limits.items()}
        self._groups = {key: groups[layer if clip.local else ""] for key, layer in layers.items()}
        for key, group in self._groups.items():
            group.waiting.add(key)
        self._arrived: dict[str, list[Outer | torch.Tensor]] = {}
        self._open: list[ClipGroup] = []  # those with a norm that is not complete
        self._closed: list[ClipGroup] = []
        self.sums: dict[str, torch.Tensor] = {}

    def wanted(self, site: Site) -> tuple[str, ...]:
        return tuple(site.keys)

    def report(self, site: Site, call: Call, precision: torch.autocast) -> None:
        for key, part in site.contributions(call, precision):
            if key not in self._groups[key].waiting:
                raise RuntimeError(f"{key} was used more often in the backward pass than its layers were called")
            if self._beside:
                self._beside.add(key, part)
            self._arrived.setdefault(key, []).append(part)
            if len(self._arrived[key]) == self._uses[key]:
                self._settle(key)

    def finish(self, losses: torch.Tensor) -> torch.Tensor:
        """After the pass: what has not arrived will not. Gives the norms before clipping, ``(batch,)``.

        Raises
        ------
        FloatingPointError
            An example's gradient is not finite.
        """
        for key in list(self._arrived):
            self._settle(key)
        squares = [group.square for group in (*self._open, *self._closed)]
        count = len(losses) if self._members is None else len(self._members)
        norms = sum(squares[1:], squares[0]).sqrt() if squares else losses.new_zeros(count)
        check_finite(norms, 0, count)
        for group in list(self._open):
            self._close(group)
        return norms

    def _settle(self, key: str) -> None:
        """All uses of a parameter are known: its norm, and what is kept of it."""
        parts, group = [self._of_users(part) for part in self._arrived.pop(key)], self._groups[key]
        outer = [part for part in parts if isinstance(part, Outer)]
        built = [part for part in parts if not isinstance(part, Outer)]
        choice = self._execution.choose(outer)
        if built or choice.keep == "gradient":
            built += [factors.instantiate(outer)] if outer else []
            kept = sum(built[1:], built[0])
            square = factors.square(kept)
        else:
            kept, square = outer, factors.norms_squared(outer, choice.norm)
        if group.square is None:
            group.square = square
            self._open.append(group)
        else:
            group.square = group.square + square
        group.waiting.remove(key)
        if self._clip.local or choice.keep != "nothing":
            group.kept[key] = kept
        if self._clip.local and not group.waiting:
            self._close(group)

    def _close(self, group: ClipGroup) -> None:
        """The norm that a group is scaled by is known: add up what was kept of it."""
        self._open.remove(group)
        self._closed.append(group)
        scale = self._clip.factors(group.square, group.limit)
        for key in list(group.kept):
            self.sums[key] = _weighted_sum(group.kept.pop(key), scale)

    def _of_users(self, part: Outer | torch.Tensor) -> Outer | torch.Tensor:
        if self._members is None:
            return part
        if isinstance(part, Outer):
            return part.of_users(self._members)
        return part.new_zeros(len(self._members), *part.shape[1:]).index_add_(0, self._owners.to(part.device), part)


class SumPass:
    """Adds to ``sums`` the gradients of the parameters that it lacks, an example's scaled by its factor."""

    def __init__(self, scale: torch.Tensor, sums: dict[str, torch.Tensor]) -> None:
        self._scale, self._sums, self._done = scale, sums, set(sums)

    def wanted(self, site: Site) -> tuple[str, ...]:
        return tuple(name for name, key in site.keys.items() if key not in self._done)

    def report(self, site: Site, call: Call, precision: torch.autocast) -> None:
        for key, part in site.contributions(call, precision):
            part = _weighted_sum([part] if isinstance(part, Outer) else part, self._scale)
            self._sums[key] = self._sums[key].add_(part) if key in self._sums else part


def _weighted_sum(kept: list[Outer] | torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return torch.tensordot(weights.to(kept.dtype), kept, dims=1)
    first, *others = [use.weighted_sum(weights) for use in kept]
    return sum(others, first)


# The recorder

_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Recorder:
    """Takes the gradients of a model's losses apart, while it is :meth:`attached`.

    Parameters
    ----------
    model
        A model; what has ``requires_grad`` learns.
    guard
        What former recorders of the model have seen, in the same training.
    alone
        Each forward pass is of one example: layers need not be watched, its gradient is autograd's.

    Attributes
    ----------
    parameters
        The parameters that learn, by name; while it is attached, the leaves that stand in their places.
    layers
        The layer of each parameter.
    recording
        Whether layers are watched now; ``batch`` says for how many examples.
    called
        Whether the model itself has been called since.
    guard
        Sees that nothing changes silently.

    Raises
    ------
    ValueError
        Nothing learns, or what has no shape, no numbers or complex ones; a layer mixes examples or takes no hooks; or a
        gradient would be changed by a hook.
    """

    def __init__(self, model: nn.Module, guard: Guard | None = None, *, alone: bool = False) -> None:
        self._learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = self._learning
        if not self.parameters:
            raise ValueError("no parameter of the model has requires_grad=True")
        if lazy := [name for name, p in self.parameters.items() if is_lazy(p)]:
            raise ValueError(f"{lazy[0]} has no shape yet: run the model once before, with an example that is public")
        for name, p in self.parameters.items():
            if p.is_complex():  # noise of one real number is not for two
                raise ValueError(f"{name} is complex: let its real and imaginary parts learn (torch.view_as_real)")
            if p.is_meta and not is_fake(p):
                raise ValueError(f"{name} is on the device meta, without numbers: build the model in a FakeTensorMode")
        if isinstance(model, torch.jit.ScriptModule):
            raise ValueError(f"the model is {SCRIPTED}")
        self.guard, self.alone = guard or Guard(), alone
        check_layers(model, alone=alone)
        self.model = model
        self.batch = 0
        self.recording = self.called = False
        self._uses: Counter[str] = Counter()
        self._pass: RowPass | NormPass | SumPass | Projections | None = None
        self._probe: Probe | None = None  # which looks at the model now
        self._inside: list[tuple[nn.Module, list[tuple[nn.Parameter, bool]], Kept | None]] = []
        self._thread = 0
        self._structure: list[tuple] = []
        self._find_sites()

    def _find_sites(self) -> None:
        """The layers that own what learns: again, if a module, its class or its forward is another one."""
        structure = [
            (id(module), type(module), vars(module).get("forward"), *module._parameters)
            for module in modules_of(self.model)
        ]
        if structure != self._structure:
            self._structure = structure
            self._sites = sites(self.model, {id(p): name for name, p in self._learning.items()})
            self.layers: dict[str, str] = {}
            for site in self._sites:
                for key in site.keys.values():
                    self.layers.setdefault(key, site.name)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the layers are watched, and gradients go to leaves that have the parameters' numbers.

        So no gradient that is not clipped reaches a parameter, nor what waits for its gradient.

        Raises
        ------
        RuntimeError
            Another recorder watches the model.
        ValueError
            A parameter has a hook for gradients.
        """
        if self.model in _WATCHED:
            raise RuntimeError("the model is in a private step, or another call that clips: one at a time")
        if parametrize._cache_enabled:
            raise RuntimeError("parametrize.cached() goes inside of the losses function: the step has other leaves")
        for name, p in self._learning.items():
            if has_hooks(p):
                raise ValueError(f"{name} has a gradient hook, which would see what is not clipped: remove it")
        with ExitStack() as stack:
            _WATCHED.add(self.model)
            stack.callback(_WATCHED.discard, self.model)
            self._thread, self._pass, self._probe = threading.get_ident(), None, None
            self._find_sites()
            for name, p in self._learning.items():
                stack.callback(p.register_hook(partial(_refuse_past_the_modules, name)).remove)
            stack.enter_context(self._stand_ins())
            stack.callback(self.forget)
            for site in () if self.alone else self._sites:
                # First, so that what other hooks do with the output comes after the tap, and is differentiated.
                after = dict(with_kwargs=True, always_call=True, prepend=True)
                stack.callback(site.module.register_forward_pre_hook(self._before(site), prepend=True).remove)
                stack.callback(site.module.register_forward_hook(self._after(site), **after).remove)
            # Before the model's own, if it is a layer itself: what a probe draws is not the layer's.
            first = dict(with_kwargs=True, prepend=True)
            stack.callback(self.model.register_forward_pre_hook(self._begin, **first).remove)
            stack.callback(self.model.register_forward_hook(self._end).remove)
            yield

    @contextmanager
    def _stand_ins(self) -> Iterator[None]:
        """Inside, the modules have leaves in the places of the parameters that learn, with the same memory."""
        leaves = {id(p): nn.Parameter(p.detach()) for p in self._learning.values()}
        for p in self._learning.values():
            leaves[id(p)].__dict__.update(p.__dict__)
        places = [
            (module, name, p)
            for module in modules_of(self.model)
            for name, p in module._parameters.items()
            if p is not None and id(p) in leaves
        ]
        try:
            for module, name, p in places:
                _put(module, name, leaves[id(p)])
            self.parameters = {name: leaves[id(p)] for name, p in self._learning.items()}
            yield
        finally:
            self.parameters = self._learning
            for module, name, p in places:
                _put(module, name, p)

    @property
    def busy(self) -> bool:
        """Whether a backward pass reports, or the model is being looked at: then its layers are called by us."""
        return self._probe is not None or self._pass is not None

    def forget(self) -> None:
        """Drop what forward passes have announced."""
        while self._inside:  # an interrupt may come between a layer's two hooks
            self._leave()
        self._uses.clear()

    @contextmanager
    def watch(self, batch: int) -> Iterator[None]:
        """Record the layers that are called inside, for so many examples."""
        self.forget()
        self.recording, self.called, self.batch = True, False, batch
        try:
            yield
        finally:
            self.recording = False
            self.forget()

    def clipped_sums(
        self,
        losses: torch.Tensor,
        clip: Clip,
        execution: Execution,
        *,
        owners: torch.Tensor | None = None,
        beside: Projections | None = None,
    ) -> tuple[dict[str, torch.Tensor | None], torch.Tensor]:
        """The sum of the clipped gradients, from one loss an example.

        Parameters
        ----------
        losses
            ``(batch,)``, computed while ``recording``.
        clip, execution
            The clip function, and how its sum is computed.
        owners
            ``(batch,)``: the number of the user to whom each example belongs, if users are clipped and not examples.
        beside
            Is told each part of a gradient.

        Returns
        -------
        (sums, norms)
            By parameter, in its shape, ``None`` where no gradient came; the norms before clipping, ``(batch,)`` or
            ``(users,)``.

        Raises
        ------
        NotImplementedError
            A parameter is used outside its layer, or a layer cannot be differentiated example by example.
        FloatingPointError
            An example's gradient is not finite.
        """
        two_passes = execution.two_passes and not clip.local
        with self.leaves_of(losses):
            self.guard.verify(losses, self.passing)
            norm_pass = NormPass(self.layers, self._uses, clip, execution, owners, beside)
            with self.passing(norm_pass):
                losses.sum().backward(retain_graph=two_passes)
                self._refuse_stray()
            norms, sums = norm_pass.finish(losses), norm_pass.sums
            if two_passes:
                # The same gradients again, scaled layer by layer: reweighted losses would round differently from
                # what the norms were taken of, in half precision by more than an example may move the sum.
                scale = clip.factors(norms.square(), clip.sensitivity)
                scale = scale if owners is None else scale[owners.to(scale.device)]
                with self.passing(SumPass(scale, sums)):
                    losses.sum().backward()
            return {key: sums.get(key) for key in self.parameters}, norms

    def projected(self, losses: torch.Tensor, projections: Projections) -> None:
        """A backward pass for the gradient of one example."""
        with self.leaves_of(losses), self.passing(projections):
            losses.sum().backward()

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Autograd's gradient of one loss, by parameter; zeros where none came."""
        with self.leaves_of(loss), self._cleared():
            loss.backward()
            return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.parameters.items()}

    def _refuse_stray(self) -> None:
        """After a backward pass: nothing has come past the layers."""
        if stray := [name for name, p in self.parameters.items() if p.grad is not None]:
            raise NotImplementedError(
                f"{', '.join(stray)}: used outside of the layer that owns it (through torch.nn.functional, say), where "
                "its examples' gradients cannot be told apart; call the layer, or use execution='loop'"
            )

    @contextmanager
    def leaves_of(self, losses: torch.Tensor) -> Iterator[None]:
        """What else the losses' graph ends in keeps the gradient that it had.

        Raises
        ------
        ValueError
            It is a parameter, whose gradient nobody clips.
        """
        ours, others = {id(p) for p in self.parameters.values()}, []
        for node in behind(losses.grad_fn):
            if (leaf := getattr(node, "variable", None)) is None or (id(leaf) in ours and not has_hooks(leaf)):
                continue
            others.append((leaf, leaf.grad))
            if isinstance(leaf, nn.Parameter) and id(leaf) not in ours:
                raise ValueError(
                    f"the losses depend on a parameter of shape {tuple(leaf.shape)} that is not in the model's "
                    "modules, whose gradient nobody clips: give it to the model, or freeze it"
                )
            if has_hooks(leaf):
                raise ValueError(
                    f"the losses depend on a tensor of shape {tuple(leaf.shape)} with a gradient hook, which would see "
                    "what is not clipped: remove it"
                )
        try:
            yield
        finally:
            for leaf, gradient in others:
                leaf.grad = gradient

    @contextmanager
    def _cleared(self) -> Iterator[None]:
        """What came to the leaves before is gone, and what comes inside is gone afterwards."""

        def clear() -> None:
            for p in self.parameters.values():
                p.grad = None

        clear()
        try:
            yield
        finally:
            clear()

    @contextmanager
    def passing(self, backward_pass: RowPass | NormPass | SumPass | Projections) -> Iterator[None]:
        """What the layers report goes to this pass."""
        self._pass = backward_pass
        try:
            with self._cleared():
                yield
        finally:
            self._pass = None

    def _wanted(self, site: Site) -> tuple[str, ...]:
        return self._pass.wanted(site) if self._pass else tuple(site.keys)

    def _report(self, site: Site, call: Call, precision: torch.autocast) -> None:
        """A node of the graph reports."""
        if self._pass is None:
            raise RuntimeError(
                f"{site} saw a backward pass that clips nothing: the losses function gives losses, and calls no "
                "backward(); where a loss has a gradient in it, as a gradient penalty does, take execution='loop'"
            )
        self.recording = False  # a rule may run the layer
        try:
            self._pass.report(site, call, precision)
        finally:
            self.recording = True

    def _begin(self, module, args, kwargs) -> None:
        """The model is called: look for changes and, for new shapes, find which example owns each row."""
        if module is not self.model:  # a copy of the model has copies of the hooks
            return
        if threading.get_ident() != self._thread:
            raise RuntimeError("the model is in a private step: another thread may run it when that is over")
        if not self.recording or self.busy:
            return
        self.called = True

        def run(probe: Probe) -> None:
            self._probe = probe
            try:
                probe.run(module.forward, args, kwargs, self.batch)
            finally:
                self._probe = None

        self.guard.begin(module, args, kwargs, self.batch, run)

    def _end(self, module, args, output) -> None:
        if self.recording and module is self.model and not self.busy:
            self.guard.still(module)

    def _watches(self, site: Site, module: nn.Module) -> bool:
        """Whether this is a call of a site in the step; a copy of the model has copies of the hooks."""
        mine = self._pass is not None or threading.get_ident() == self._thread  # a backward pass has threads of its own
        return self.recording and module is site.module and mine

    def _before(self, site: Site):
        parameters = [self.parameters[key] for key in site.keys.values()]
        places = [(site.module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in site.keys]

        def is_called_with_them() -> bool:
            """Not where ``functional_call`` has put other tensors there, or the losses function has frozen it."""
            own = all(owner._parameters.get(n) is p for (owner, n), p in zip(places, parameters, strict=True))
            learning = [p.requires_grad for p in parameters]
            if own and any(learning) and not all(learning):
                raise NotImplementedError(f"{site}: a part of it is frozen within the step; {LOOP_TAKES_IT}")
            return own and all(learning)

        def hook(module, args):
            if self._watches(site, module) and is_called_with_them():
                kept = Kept() if site.is_compared and not self._probe else None
                self._inside.append((module, [(p, p.requires_grad) for p in parameters], kept))
                for p in parameters:
                    p.requires_grad_(False)
                if kept:
                    kept.__enter__()

        return hook

    def _after(self, site: Site):
        label = str(site)

        def hook(module, args, kwargs, output):
            entered = bool(self._inside) and self._inside[-1][0] is module  # not where the hooks before it raised
            if not entered or not self._watches(site, module):
                return None
            masks = self._leave()
            if output is None:  # an exception passes: checkpointing stops a recomputation with one
                return None
            given = float_tensors(output)
            if odd := [leaf for leaf in tree_leaves(output) if not isinstance(leaf, OPENED) or is_complex(leaf)]:
                raise NotImplementedError(
                    f"{label} gave a {type(odd[0]).__name__}, within which no gradient can be followed; {LOOP_TAKES_IT}"
                )
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if self._probe:
                return self._probe.see(label, read, output)
            if not given:
                raise NotImplementedError(
                    f"{label} gave a {type(output).__name__} without tensors that can be followed"
                )
            rows = self.guard.rows(label, given, len(read), self.batch)
            if self._pass is None:  # else the layer is run again for a checkpoint
                self._uses.update(site.keys.values())
                self.guard.see(label, given)
            return tap(site, self.batch, rows, args, kwargs, output, masks, self._wanted, self._report)

        return hook

    def _leave(self) -> list[torch.Tensor]:
        """A layer has been called; gives what it dropped."""
        _, frozen, kept = self._inside.pop()
        if kept:
            kept.__exit__(None, None, None)
        for p, learns in frozen:
            p.requires_grad_(learns)
        return kept.masks if kept else []


OPENED = (torch.Tensor, bool, int, float, str, type(None), Cache)
"""What a layer may return, in tuples, lists, mappings and what transformers registers as such."""


def is_complex(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_complex()


def _put(module: nn.Module, name: str, p: nn.Parameter) -> None:
    if isinstance(module, nn.RNNBase):  # which keeps its parameters in a list as well
        setattr(module, name, p)
    else:
        module._parameters[name] = p


def _refuse_past_the_modules(name: str, gradient: torch.Tensor) -> None:
    raise RuntimeError(
        f"{name} is used past the model's modules, which have another leaf in its place in a private step: read it "
        "from its module"
    )
