"""One backward pass gives every example's gradient: each example's part is taken at the layers, clipped, and added up.

A layer with parameters that learn is called with them frozen, so that autograd computes no weight gradient at all. Its
output goes through a tap (:mod:`plpkg.clipping.hooks.taps`), whose reports a pass takes
(:mod:`plpkg.clipping.hooks.passes`).
:class:`Recorder` puts taps behind a model's layers for as long as a step takes, and runs the passes; a guard checks
that examples stay apart (:mod:`plpkg.clipping.guard.mixing`).

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from plpkg.clipping.guard.mixing import Guard, modules_of
from plpkg.clipping.guard.probe import Probe
from plpkg.clipping.guard.replay import Projections
from plpkg.clipping.hooks.leaves import has_hooks, refuse_use_past_the_modules, stand_ins, without_gradients_of
from plpkg.clipping.hooks.passes import NormPass, SumPass
from plpkg.clipping.hooks.taps import Forward, Pass, tap
from plpkg.clipping.layers import Call
from plpkg.clipping.sites import LOOP_TAKES_IT, SCRIPTED, Site, check_layers, sites

_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()

OPENED = (torch.Tensor, bool, int, float, str, type(None), Cache)
"""Types that a layer may return, in tuples, lists, mappings and what transformers registers as such."""


@dataclass(eq=False)
class _Entered:
    """A layer between its two hooks: its parameters are frozen, and ``kept`` notes what it drops."""

    module: nn.Module
    frozen: list[nn.Parameter]
    kept: Kept | None


class Recorder:
    """Takes the gradients of a model's losses apart, while it is :meth:`attached`.

    Parameters
    ----------
    model
        A model; what has ``requires_grad`` learns.
    guard
        That of former recorders of the model, in the same training.
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
        _check_parameters(self._learning)
        if isinstance(model, torch.jit.ScriptModule):
            raise ValueError(f"the model is {SCRIPTED}")
        check_layers(model, alone=alone)
        self.model = model
        self.guard = guard or Guard()
        self.alone = alone
        self.parameters = self._learning
        self.batch = 0
        self.recording = False
        self.called = False
        self._uses: Counter[str] = Counter()  # how often each parameter's layers were called
        self._pass: Pass | None = None  # to which the taps report now
        self._probe: Probe | None = None  # which looks at the model now
        self._inside: list[_Entered] = []
        self._thread = 0
        self._structure: list[tuple] = []
        self._find_sites()

    def _find_sites(self) -> None:
        """The layers that own what learns: again, if a module, its class or its forward is another one."""
        structure = [
            (id(module), type(module), vars(module).get("forward"), *module._parameters)
            for module in modules_of(self.model)
        ]
        if structure == self._structure:
            return
        self._structure = structure
        self._sites = sites(self.model, {id(p): name for name, p in self._learning.items()})
        self.layers: dict[str, str] = {}
        for site in self._sites:
            for key in site.keys.values():
                self.layers.setdefault(key, site.name)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the layers are watched, and gradients go to leaves that have the parameters' numbers.

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
            self._thread = threading.get_ident()
            self._pass = None
            self._probe = None
            self._find_sites()
            for name, p in self._learning.items():
                hook = p.register_hook(partial(refuse_use_past_the_modules, name))
                stack.callback(hook.remove)
            stack.enter_context(self._with_stand_ins())
            stack.callback(self.forget)
            for hook in self._hook_layers():
                stack.callback(hook.remove)
            yield

    def _hook_layers(self) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Hook the layers that learn, and the model."""
        # Before the layers' other hooks: what these do with the output comes after the tap, and is differentiated.
        watched = [] if self.alone else self._sites
        for site in watched:
            module = site.module
            yield module.register_forward_pre_hook(self._before(site), prepend=True)
            yield module.register_forward_hook(self._after(site), with_kwargs=True, always_call=True, prepend=True)
        # Before the model's own, if it is a layer itself: what a probe draws is not the layer's.
        yield self.model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
        yield self.model.register_forward_hook(self._end)

    @contextmanager
    def _with_stand_ins(self) -> Iterator[None]:
        try:
            with stand_ins(self.model, self._learning) as self.parameters:
                yield
        finally:
            self.parameters = self._learning

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
        self.recording = True
        self.called = False
        self.batch = batch
        try:
            yield
        finally:
            self.recording = False
            self.forget()

    @contextmanager
    def _not_recording(self) -> Iterator[None]:
        """Inside, layers may be called, as a rule does, and the calls are not part of the step."""
        self.recording = False
        try:
            yield
        finally:
            self.recording = True

    def clipped_sums(
        self,
        losses: torch.Tensor,
        clip: Clip,
        execution: Execution,
        *,
        owners: torch.Tensor | None = None,
        beside: Projections | None = None,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The sum of the clipped gradients, from one loss an example.

        Parameters
        ----------
        losses
            ``(batch,)``, computed while ``recording``.
        clip
            The clip function.
        execution
            How the sum is computed.
        owners
            ``(batch,)``: the number of the user to whom each example belongs, if users are clipped and not examples.
        beside
            Receives each part of a gradient.

        Returns
        -------
        (sums, norms)
            By parameter to which a gradient came, in its shape; the norms before clipping, ``(batch,)`` or
            ``(users,)``.

        Raises
        ------
        NotImplementedError
            A parameter is used outside its layer, or a layer cannot be differentiated example by example.
        FloatingPointError
            An example's gradient is not finite.
        """
        needs_second_pass = execution.two_passes and not clip.local
        with self.leaves_of(losses):
            self.guard.verify(losses, self.passing)
            norm_pass = NormPass(self.layers, self._uses, clip, execution, owners, beside)
            with self.passing(norm_pass):
                losses.sum().backward(retain_graph=needs_second_pass)
                self._refuse_stray()
            norms = norm_pass.finish(losses)
            sums = norm_pass.sums  # of what the first pass kept; the second adds the missing ones
            if needs_second_pass:
                # The same gradients again, scaled layer by layer. Not by reweighting the losses: that would round
                # differently from what the norms were taken of, in half precision by more than an example may move
                # the sum.
                scale = clip.factors(norms.square(), clip.sensitivity)
                if owners is not None:
                    scale = scale[owners.to(scale.device)]  # (batch,): each example has its user's
                with self.passing(SumPass(scale, sums)):
                    losses.sum().backward()
            return sums, norms

    def projected(self, losses: torch.Tensor, projections: Projections) -> None:
        """A backward pass for the gradient of one example."""
        with self.leaves_of(losses), self.passing(projections):
            losses.sum().backward()

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Autograd's gradient of one loss, by parameter; zeros where none came."""
        with self.leaves_of(loss), without_gradients_of(self.parameters.values()):
            loss.backward()
            return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.parameters.items()}

    def _refuse_stray(self) -> None:
        """After a backward pass: nothing has come past the layers."""
        stray = [name for name, p in self.parameters.items() if p.grad is not None]
        if stray:
            raise NotImplementedError(
                f"{', '.join(stray)}: used outside of the layer that owns it (through torch.nn.functional, say), where "
                "its examples' gradients cannot be told apart; call the layer, or use execution='loop'"
            )

    @contextmanager
    def leaves_of(self, losses: torch.Tensor) -> Iterator[None]:
        """Inside, the other leaves of the losses' graph may get gradients; afterwards they have those that they had.

        Raises
        ------
        ValueError
            One is a parameter, whose gradient nobody clips, or has a hook.
        """
        before = [(leaf, leaf.grad) for leaf in self._other_leaves(losses)]
        try:
            yield
        finally:
            for leaf, gradient in before:
                leaf.grad = gradient

    def _other_leaves(self, losses: torch.Tensor) -> list[torch.Tensor]:
        """The leaves of the losses' graph that are not the parameters'."""
        ours = {id(p) for p in self.parameters.values()}
        others = []
        for node in behind(losses.grad_fn):
            leaf = getattr(node, "variable", None)
            if leaf is None:
                continue
            is_ours = id(leaf) in ours
            if not is_ours and isinstance(leaf, nn.Parameter):
                raise ValueError(
                    f"the losses depend on a parameter of shape {tuple(leaf.shape)} that is not in the model's "
                    "modules, whose gradient nobody clips: give it to the model, or freeze it"
                )
            if has_hooks(leaf):
                raise ValueError(
                    f"the losses depend on a tensor of shape {tuple(leaf.shape)} with a gradient hook, which would see "
                    "what is not clipped: remove it"
                )
            if not is_ours:
                others.append(leaf)
        return others

    @contextmanager
    def passing(self, backward_pass: Pass) -> Iterator[None]:
        """Inside, the layers report to this pass."""
        self._pass = backward_pass
        try:
            with without_gradients_of(self.parameters.values()):
                yield
        finally:
            self._pass = None

    def _wanted(self, site: Site) -> tuple[str, ...]:
        """The parameters that a site is to report; without a pass it does report, and is refused."""
        if self._pass is None:
            return tuple(site.keys)
        return self._pass.wanted(site)

    def _report(self, site: Site, call: Call, precision: torch.autocast) -> None:
        """A node of the graph reports."""
        if self._pass is None:
            raise RuntimeError(
                f"{site} saw a backward pass that clips nothing: the losses function gives losses, and calls no "
                "backward(); where a loss has a gradient in it, as a gradient penalty does, take execution='loop'"
            )
        with self._not_recording():
            self._pass.report(site, call, precision)

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

    def _before(self, site: Site) -> Callable:
        """The hook before a layer's call, which freezes its parameters."""
        parameters = [self.parameters[key] for key in site.keys.values()]
        places = []
        for path in site.keys:
            owner, _, name = path.rpartition(".")
            places.append((site.module.get_submodule(owner), name))

        def is_called_with_them() -> bool:
            """Not where ``functional_call`` has put other tensors there, or the losses function has frozen it."""
            for (owner, name), p in zip(places, parameters, strict=True):
                if owner._parameters.get(name) is not p:
                    return False
            learning = [p.requires_grad for p in parameters]
            if any(learning) and not all(learning):
                raise NotImplementedError(f"{site}: a part of it is frozen within the step; {LOOP_TAKES_IT}")
            return all(learning)

        def hook(module, args):
            if self._watches(site, module) and is_called_with_them():
                kept = Kept() if site.is_compared and not self._probe else None
                self._enter(module, parameters, kept)

        return hook

    def _after(self, site: Site) -> Callable:
        """The hook after a layer's call, which puts a tap behind it."""
        label = str(site)

        def hook(module, args, kwargs, output):
            entered = bool(self._inside) and self._inside[-1].module is module  # not where the hooks before it raised
            if not entered or not self._watches(site, module):
                return None
            masks = self._leave()
            if output is None:  # an exception passes: checkpointing stops a recomputation with one
                return None
            _refuse_unopened(label, output)
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if self._probe:
                return self._probe.see(label, read, output)
            given = float_tensors(output)
            if not given:
                raise NotImplementedError(
                    f"{label} gave a {type(output).__name__} without tensors that can be followed"
                )
            rows = self.guard.rows(label, given, len(read), self.batch)
            if self._pass is None:  # else the layer is run again for a checkpoint
                self._uses.update(site.keys.values())
                self.guard.see(label, given)
            forward = Forward(site, args, kwargs, output, masks, self.batch, rows)
            return tap(forward, self._wanted, self._report)

        return hook

    def _enter(self, module: nn.Module, parameters: list[nn.Parameter], kept: Kept | None) -> None:
        """A layer is called."""
        self._inside.append(_Entered(module, parameters, kept))
        for p in parameters:
            p.requires_grad_(False)
        if kept:
            kept.__enter__()

    def _leave(self) -> list[torch.Tensor]:
        """A layer has been called; gives what it dropped."""
        layer = self._inside.pop()
        if layer.kept:
            layer.kept.__exit__(None, None, None)
        for p in layer.frozen:
            p.requires_grad_(True)
        return layer.kept.masks if layer.kept else []


def _check_parameters(learning: dict[str, nn.Parameter]) -> None:
    if not learning:
        raise ValueError("no parameter of the model has requires_grad=True")
    for name, p in learning.items():
        if is_lazy(p):
            raise ValueError(f"{name} has no shape yet: run the model once before, with an example that is public")
    for name, p in learning.items():
        if p.is_complex():  # noise of one real number is not for two
            raise ValueError(f"{name} is complex: let its real and imaginary parts learn (torch.view_as_real)")
        if p.is_meta and not is_fake(p):
            raise ValueError(f"{name} is on the device meta, without numbers: build the model in a FakeTensorMode")


def _refuse_unopened(label: str, output: object) -> None:
    """NotImplementedError where a layer gave something whose gradient is not seen."""
    for leaf in tree_leaves(output):
        is_complex = isinstance(leaf, torch.Tensor) and leaf.is_complex()
        if not isinstance(leaf, OPENED) or is_complex:
            raise NotImplementedError(
                f"{label} gave a {type(leaf).__name__}, within which no gradient can be followed; {LOOP_TAKES_IT}"
            )
