"""Watching a model's layers during a backward pass, and clipping with what was seen.

Each layer with parameters that learn is called with its parameters frozen, and its output goes through a *tap*
(:mod:`plpkg.clipping.taps`). So autograd computes no weight gradient at all; what the taps report goes to
the backward pass that is under way (:mod:`plpkg.clipping.passes`): norms from the factors, and later the one sum.

Recording in the backward pass alone is what makes reuse, ties and both kinds of gradient checkpointing come out
right: every node of the graph reports once, however often its forward was run. A parameter that is used past its
layer (``F.linear(h, embedding.weight)``) gets a gradient from autograd itself; that is noticed, and refused.

Whether a layer's rows are examples cannot be seen from shapes: as many positions as examples fit as well. So before
the first clipping the losses of three examples go backward alone; they must reach their own row of every layer, and
no other.

Left out: what a layer hands on in another way than by returning it (an auxiliary loss that it keeps as an attribute);
a loss that uses other examples' numbers without a gradient; models in several processes; compiled models.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import SystemRandom

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from plpkg.clipping.clip import Clip
from plpkg.clipping.execution import Execution
from plpkg.clipping.layers import Call, refusal
from plpkg.clipping.passes import NormPass, RowPass, SumPass
from plpkg.clipping.taps import Site, sites, tap

_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Recorder:
    """Hooks on a model's layers.

    Parameters
    ----------
    model
        A model; what has ``requires_grad`` learns.

    Attributes
    ----------
    parameters
        The parameters that learn, by name.
    layers
        The layer of each parameter.
    recording
        Whether layers are watched now; ``batch`` says for how many examples.
    verified
        Whether examples have been seen to reach their own rows.

    Raises
    ------
    ValueError
        Nothing learns, a layer mixes examples, or a gradient would be changed by a hook.
    RuntimeError
        Another recorder watches the model.
    """

    def __init__(self, model: nn.Module) -> None:
        if model in _WATCHED:
            raise RuntimeError("the model is watched already: by make_private, or by a call that is not finished")
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("no parameter of the model has requires_grad=True")
        for name, module in model.named_modules():
            if reason := refusal(module):
                raise ValueError(f"{name or 'the model'} ({type(module).__name__}) {reason}")
        for name, p in self.parameters.items():
            if p._backward_hooks:
                raise ValueError(f"{name} has a gradient hook, which clipping would leave out: remove it")
        self.model = model
        self.layers: dict[str, str] = {}
        self.batch = 0
        self.recording = self.verified = False
        self._uses: Counter[str] = Counter()
        self._pass: RowPass | NormPass | SumPass | None = None
        self._frozen: list[list[tuple[nn.Parameter, bool]]] = []
        self._hooks = []
        for site in sites(model, {id(p): name for name, p in self.parameters.items()}):
            for key in site.keys.values():
                self.layers.setdefault(key, site.name)
            # First, so that what other hooks do with the output comes after the tap, and is differentiated.
            after = dict(with_kwargs=True, always_call=True, prepend=True)
            self._hooks += [
                site.module.register_forward_pre_hook(self._before(site)),
                site.module.register_forward_hook(self._after(site), **after),
            ]
        _WATCHED.add(model)

    def remove(self) -> None:
        """Take the hooks off the model."""
        self.forget()
        for hook in self._hooks:
            hook.remove()
        _WATCHED.discard(self.model)

    def forget(self) -> None:
        """Drop what forward passes have announced."""
        while self._frozen:  # an interrupt may come between a layer's two hooks
            self._thaw()
        self._uses.clear()

    @contextmanager
    def watch(self, batch: int) -> Iterator[None]:
        """Record the layers that are called inside, for so many examples."""
        self.forget()
        self.recording, self.batch = True, batch
        try:
            yield
        finally:
            self.recording = False
            self.forget()

    def clipped_sums(
        self, losses: torch.Tensor, clip: Clip, execution: Execution
    ) -> tuple[dict[str, torch.Tensor | None], torch.Tensor]:
        """The sum of the clipped gradients, from one loss an example.

        Parameters
        ----------
        losses
            ``(batch,)``, computed while ``recording``.
        clip, execution
            The clip function, and how its sum is computed.

        Returns
        -------
        (sums, norms)
            By parameter, in its shape, ``None`` where no gradient came; the norms before clipping, ``(batch,)``.

        Raises
        ------
        NotImplementedError
            A parameter is used outside its layer, or a layer cannot be differentiated example by example.
        FloatingPointError
            An example's gradient is not finite.
        """
        two_passes = execution.two_passes and not clip.local
        try:
            self.verify(losses)
            norm_pass = NormPass(self.layers, self._uses, clip, execution)
            with self._passing(norm_pass):
                losses.sum().backward(retain_graph=two_passes)
                if stray := [name for name, p in self.parameters.items() if p.grad is not None]:
                    raise NotImplementedError(
                        f"{', '.join(stray)}: used outside of the layer that owns it (through torch.nn.functional, "
                        "say), where its examples' gradients cannot be told apart; call the layer, or use "
                        "execution='loop'"
                    )
            norms, sums = norm_pass.finish(losses), norm_pass.sums
            if two_passes:
                # The same gradients again, scaled layer by layer: reweighted losses would round differently from
                # what the norms were taken of, in half precision by more than an example may move the sum.
                with self._passing(SumPass(clip.factors(norms.square()), sums, execution.seen)):
                    losses.sum().backward()
            return {key: sums.get(key) for key in self.parameters}, norms
        finally:
            self.forget()

    def verify(self, losses: torch.Tensor) -> None:
        """The losses of the first, the last and a random example, of ``(batch,)``, reach their own rows alone.

        Raises
        ------
        ValueError
            They reach others; the message names the layer.
        """
        if self.verified or len(losses) < 2 or is_fake(losses):
            return
        last = len(losses) - 1
        for example in sorted({0, SystemRandom().randint(min(1, last - 1), max(1, last - 1)), last}):
            with self._passing(RowPass(example)):
                losses[example].backward(retain_graph=True)
        self.verified = True

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """The parameters have no gradients inside, and those that they had afterwards."""
        before = [(p, p.grad) for p in self.parameters.values()]
        try:
            for p, _ in before:
                p.grad = None
            yield
        finally:
            for p, gradient in before:
                p.grad = gradient

    @contextmanager
    def _passing(self, backward_pass: RowPass | NormPass | SumPass) -> Iterator[None]:
        """What the layers report goes to this pass."""
        self._pass = backward_pass
        try:
            with self.set_aside():
                yield
        finally:
            self._pass = None

    def _wanted(self, site: Site) -> tuple[str, ...]:
        return self._pass.wanted(site) if self._pass else tuple(site.keys)

    def _report(self, site: Site, call: Call, precision: torch.autocast) -> None:
        """A node of the graph reports."""
        if self._pass is None:
            raise RuntimeError(f"{site} saw a backward pass that clips nothing: call criterion(...).backward()")
        self.recording = False  # a rule may run the layer
        try:
            self._pass.report(site, call, precision)
        finally:
            self.recording = True

    def _before(self, site: Site):
        def hook(module, args):
            if self.recording and module is site.module:  # a copy of the model has copies of the hooks
                self._frozen.append([(p, p.requires_grad) for p in site.parameters])
                for p, _ in self._frozen[-1]:
                    p.requires_grad_(False)

        return hook

    def _after(self, site: Site):
        def hook(module, args, kwargs, output):
            if not self.recording or module is not site.module:
                return None
            self._thaw()
            if output is None:  # an exception passes: checkpointing stops a recomputation with one
                return None
            if self._pass is None:  # else the layer is run again for a checkpoint
                self._uses.update(site.keys.values())
            return tap(site, self.batch, args, kwargs, output, self._wanted, self._report)

        return hook

    def _thaw(self) -> None:
        for p, learns in self._frozen.pop():
            p.requires_grad_(learns)
