"""One backward pass gives every example's gradient: layers are watched, clipped, and added up.

A layer with parameters that learn is called with them frozen, so that autograd computes no weight gradient at all. Its
output goes through a tap, whose reports a pass takes (:mod:`plpkg.clipping.passes`). :class:`Recorder` puts taps behind
a model's layers for as long as a step takes, and runs the passes; a guard checks that examples stay apart
(:mod:`plpkg.clipping.mixing`).

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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache

from plpkg.clipping.batches import behind, float_tensors
from plpkg.clipping.clip import Clip
from plpkg.clipping.dropout import Kept
from plpkg.clipping.execution import Execution
from plpkg.clipping.layers import LOOP_TAKES_IT, SCRIPTED, Call, Site, check_layers, sites
from plpkg.clipping.mixing import Guard, Probe, RowPass, modules_of
from plpkg.clipping.passes import NormPass, SumPass, tap
from plpkg.clipping.replay import Projections
from plpkg.memory import GradientLabel

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


def has_hooks(parameter: torch.nn.Parameter) -> bool:
    """Whether something waits for a parameter's gradient, an optimizer in the backward pass, say, and may read it."""
    accumulated = (parameter._post_accumulate_grad_hooks or {}).values()
    return bool(parameter._backward_hooks) or not all(isinstance(hook, GradientLabel) for hook in accumulated)


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
