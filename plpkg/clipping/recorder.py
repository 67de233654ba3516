"""Watching a model's layers during a backward pass, and clipping with what was seen.

Each layer with parameters that learn is called with its parameters frozen, and its output goes through a *tap*
(:mod:`plpkg.clipping.taps`). So autograd computes no weight gradient at all; the recorder computes norms from the
factors, and later the one sum that is wanted.

Recording in the backward pass alone is what makes reuse, ties and both kinds of gradient checkpointing come out
right: every node of the graph reports once, however often its forward was run. A parameter that is used past its
layer (``F.linear(h, embedding.weight)``) gets a gradient from autograd itself; that is noticed, and refused.

Whether a layer's rows are samples cannot be seen from shapes: as many positions as samples fit as well. So before the
first clipping the losses of three samples go backward alone; they must reach their own row of every layer, no other.

Left out: what a layer hands on in another way than by returning it (an auxiliary loss that it keeps as an attribute);
a loss that uses other samples' numbers without a gradient; models in several processes; compiled models.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import SystemRandom

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from plpkg.clipping import factors
from plpkg.clipping.clip import Clip
from plpkg.clipping.factors import Outer
from plpkg.clipping.layers import Call, refusal
from plpkg.clipping.taps import Site, sites, tap


@dataclass(frozen=True)
class Choice:
    """What is done with a parameter when its gradient is known.

    Attributes
    ----------
    norm
        ``gram`` or ``instantiate``.
    keep
        Until the clipping factors are known: its ``factors``, its per-sample ``gradient``, or ``nothing``: then a
        second backward pass computes the sum.
    careful
        Whether ``gram`` is computed again where it cancels.
    """

    norm: str
    keep: str
    careful: bool = True


@dataclass(frozen=True)
class Execution:
    """How a step is computed.

    Attributes
    ----------
    choose
        Gets a parameter's name, its uses (factors) and the bytes of what has been built of it; gives its
        :class:`Choice`.
    two_passes
        Whether the graph is kept for a second backward pass, which computes the sums that nothing was kept for.
    seen
        Is told each parameter that the second pass comes to.
    """

    choose: Callable[[str, Sequence[Outer], int], Choice]
    two_passes: bool = False
    seen: Callable[[str], object] | None = None


_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Recorder:
    """Hooks on a model's layers.

    Parameters
    ----------
    model
        Its parameters with ``requires_grad`` are those that learn.

    Attributes
    ----------
    parameters
        Those, by name.
    groups
        The layer of each.
    recording
        Whether layers are watched now; ``batch`` says for how many samples.
    verified
        Whether samples have been seen to reach their own rows.

    Raises
    ------
    ValueError
        Nothing learns, a layer mixes samples, or a gradient would be changed by a hook.
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
        self.sites = sites(model, {id(p): name for name, p in self.parameters.items()})
        self.groups: dict[str, str] = {}
        for site in self.sites:
            for key in site.keys.values():
                self.groups.setdefault(key, site.name)
        self.batch = 0
        self.recording = self.verified = False
        self._frozen: list[list[tuple[nn.Parameter, bool]]] = []
        self._hooks = [
            hook
            for site in self.sites
            for hook in (
                site.module.register_forward_pre_hook(self._before(site)),
                # First, so that what other hooks do with the output comes after the tap, and is differentiated.
                site.module.register_forward_hook(self._after(site), with_kwargs=True, always_call=True, prepend=True),
            )
        ]
        self.forget()
        _WATCHED.add(model)

    def remove(self) -> None:
        """Take the hooks away."""
        self.forget()
        for hook in self._hooks:
            hook.remove()
        _WATCHED.discard(self.model)

    def forget(self) -> None:
        """Drop what forward passes have announced and backward passes have brought."""
        while self._frozen:  # an interrupt may come between a layer's two hooks
            self._thaw()
        self._phase = "forward"
        self._expected: Counter[str] = Counter()
        self._arrived: dict[str, list[Outer | torch.Tensor]] = {}
        self._settled: set[str] = set()
        self._kept: dict[str, list[Outer] | torch.Tensor] = {}
        self._squares: dict[str, torch.Tensor] = {}  # by group: the layer, or all of them
        self._closed: dict[str, torch.Tensor] = {}
        self._done: set[str] = set()
        self._sums: dict[str, torch.Tensor] = {}

    @contextmanager
    def watch(self, batch: int) -> Iterator[None]:
        """Record the layers that are called inside, for so many samples."""
        self.forget()
        self.recording, self.batch = True, batch
        try:
            yield
        finally:
            self.recording = False
            self.forget()

    def clipped_sums(
        self, losses: torch.Tensor, clip: Clip, execution: Execution
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The sum of the clipped gradients, from one loss a sample.

        Parameters
        ----------
        losses
            ``(batch,)``, computed while ``recording``.
        clip
            The clip function.
        execution
            How.

        Returns
        -------
        (sums, norms)
            By parameter, in its shape; the norms before clipping, ``(batch,)``.

        Raises
        ------
        NotImplementedError
            A parameter is used outside its layer, or a layer cannot be differentiated sample by sample.
        FloatingPointError
            A sample's gradient is not finite.
        """
        self._clip, self._execution = clip, execution
        self._layers = len(set(self.groups.values()))
        two_passes = execution.two_passes and not clip.local
        before = {name: p.grad for name, p in self.parameters.items()}
        try:
            for p in self.parameters.values():
                p.grad = None
            self.verify(losses)
            self._phase = "norms"
            losses.sum().backward(retain_graph=two_passes)
            for key in list(self._arrived):
                self._settle(key)
            if stray := [name for name, p in self.parameters.items() if p.grad is not None]:
                raise NotImplementedError(
                    f"{', '.join(stray)}: used outside of the layer that owns it (through torch.nn.functional, say), "
                    "where its samples' gradients cannot be told apart; call the layer, or use execution='loop'"
                )
            norms = self._norms(losses)
            for group in list(self._squares):
                self._close(group)
            if two_passes:
                # The same gradients again, scaled layer by layer: reweighted losses would round differently from
                # what the norms were taken of, in half precision by more than a sample may move the sum.
                self._phase, self._done, self._scale = "sums", set(self._sums), clip.factors(norms.square())
                losses.sum().backward()
            return {key: self._sums.pop(key, None) for key in self.parameters}, norms
        finally:
            for name, p in self.parameters.items():
                p.grad = before[name]
            self.forget()

    def verify(self, losses: torch.Tensor) -> None:
        """The losses of the first, the last and a random sample, of ``(batch,)``, reach their own rows alone.

        Raises
        ------
        ValueError
            They reach others; the message names the layer.
        """
        if self.verified or len(losses) < 2 or is_fake(losses):
            return
        before, self._phase = {name: p.grad for name, p in self.parameters.items()}, "rows"
        try:
            last = len(losses) - 1
            for self._row in sorted({0, SystemRandom().randint(min(1, last - 1), max(1, last - 1)), last}):
                losses[self._row].backward(retain_graph=True)
            self.verified = True
        finally:
            for name, p in self.parameters.items():
                p.grad = before[name]

    def _norms(self, losses: torch.Tensor) -> torch.Tensor:
        squares = [*self._squares.values(), *self._closed.values()]
        norms = sum(squares[1:], squares[0]).sqrt() if squares else torch.zeros_like(losses.detach())
        check_finite(norms, 0, len(norms))
        return norms

    def _wanted(self, site: Site) -> tuple[str, ...]:
        return tuple(n for n, key in site.keys.items() if self._phase != "sums" or key not in self._done)

    def _see(self, site: Site, call: Call, precision: torch.autocast) -> None:
        """A node of the graph reports."""
        if self._phase == "rows":
            self._check_rows(site, call)
            return
        if self._phase == "forward":
            raise RuntimeError(f"{site} saw a backward pass that clips nothing: call criterion(...).backward()")
        self.recording = False
        try:
            with precision:  # a rule may run the layer; sums and norms are not for autocast to round
                parts = site.rule(call)
        except (NotImplementedError, ValueError) as error:
            raise type(error)(f"{site}: {error}") from error
        finally:
            self.recording = True
        for name, part in parts.items():
            key = site.keys[name]
            if isinstance(part, torch.Tensor):
                part = part.to(torch.promote_types(part.dtype, torch.float32))
            if self._phase == "sums":
                if self._execution.seen:
                    self._execution.seen(key)
                part = _weighted_sum([part] if isinstance(part, Outer) else part, self._scale)
                self._sums[key] = self._sums[key].add_(part) if key in self._sums else part
                continue
            if key in self._settled:
                raise RuntimeError(f"{key} was used more often in the backward pass than its layers were called")
            self._arrived.setdefault(key, []).append(part)
            if len(self._arrived[key]) == self._expected[key]:
                self._settle(key)

    def _check_rows(self, site: Site, call: Call) -> None:
        for gradient in call.gradients:
            reached = gradient.detach().flatten(1).abs().amax(1) if gradient[0].numel() else gradient.new_zeros(0)
            reached[self._row : self._row + 1] = 0
            if (reached.isfinite() & (reached > 0)).any():  # what is not finite is refused with its norm
                raise ValueError(
                    f"{site}: the loss of sample {self._row} depends on row {reached.nonzero()[0].item()} of what it "
                    f"gave, of shape {tuple(gradient.shape)}: samples are mixed, or the rows are not the samples"
                )

    def _settle(self, key: str) -> None:
        """All uses of a parameter are known: its norm, and what is kept of it."""
        parts = self._arrived.pop(key)
        self._settled.add(key)
        outer = [part for part in parts if isinstance(part, Outer)]
        built = [part for part in parts if not isinstance(part, Outer)]
        choice = self._execution.choose(key, outer, sum(part.nbytes for part in built))
        if built or choice.keep == "gradient":
            built += [factors.instantiate(outer)] if outer else []
            gradient = sum(built[1:], built[0])
            square, kept = factors.square(gradient), gradient
        else:
            square, kept = factors.norms_squared(outer, choice.norm, careful=choice.careful), outer
        local = self._clip.local
        group = self.groups[key] if local else ""
        self._squares[group] = self._squares[group] + square if group in self._squares else square
        if local or choice.keep != "nothing":
            self._kept[key] = kept
        if local and all(k in self._settled for k, g in self.groups.items() if g == group):
            self._close(group)

    def _close(self, group: str) -> None:
        """The norm that a group is clipped by is known: add up what was kept of it."""
        square = self._squares.pop(group)
        self._closed[group] = square
        scale = self._clip.factors(square, self._layers)
        for key in [key for key in self._kept if not self._clip.local or self.groups[key] == group]:
            self._sums[key] = _weighted_sum(self._kept.pop(key), scale)

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
            if self._phase == "forward":
                self._expected.update(site.keys.values())
            return tap(site, self.batch, args, kwargs, output, self._wanted, self._see)

        return hook

    def _thaw(self) -> None:
        for p, learns in self._frozen.pop():
            p.requires_grad_(learns)


def check_finite(norms: torch.Tensor, first: int, batch: int) -> None:
    """Refuse gradients that are not numbers.

    Raises
    ------
    FloatingPointError
        Names the sample, counted from ``first``.
    """
    if not is_fake(norms) and not norms.isfinite().all():
        bad = (~norms.isfinite()).nonzero().flatten().tolist()
        raise FloatingPointError(f"the gradient of sample {first + bad[0]} of {batch} is not finite")


def _weighted_sum(kept: list[Outer] | torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return torch.tensordot(weights.to(kept.dtype), kept, dims=1)
    first, *others = [use.weighted_sum(weights) for use in kept]
    return sum(others, first)
