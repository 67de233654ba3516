"""Watching a model's layers during a backward pass, and clipping with what was seen.

Each layer with parameters that learn is called with its parameters frozen, and its output goes through a *tap*
(:mod:`plpkg.clipping.taps`). So autograd computes no weight gradient at all; what the taps report goes to
the backward pass that is under way (:mod:`plpkg.clipping.passes`): norms from the factors, and later the one sum.

Recording in the backward pass alone is what makes reuse, ties and both kinds of gradient checkpointing come out
right: every node of the graph reports once, however often its forward was run. A parameter that is used past its
layer (``F.linear(h, embedding.weight)``) gets a gradient from autograd itself; that is noticed, and refused.

What a layer's rows are, and that nothing changes silently from step to step, a guard sees to
(:mod:`plpkg.clipping.guard`).

Left out: what a layer hands on in another way than by returning it (an auxiliary loss that it keeps as an attribute);
a loss that uses other examples' numbers without a gradient; compiled models.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._pytree import tree_leaves

from plpkg.clipping.batches import leaves
from plpkg.clipping.clip import Clip
from plpkg.clipping.dropout import Kept
from plpkg.clipping.execution import Execution
from plpkg.clipping.guard import Guard, check_layers, state
from plpkg.clipping.layers import Call, any_layer
from plpkg.clipping.passes import NormPass, RowPass, SumPass
from plpkg.clipping.rows import Probe, float_tensors
from plpkg.clipping.taps import Site, sites, tap

_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Recorder:
    """Hooks on a model's layers.

    Parameters
    ----------
    model
        A model; what has ``requires_grad`` learns.
    guard
        What former recorders of the model have seen, in the same training.

    Attributes
    ----------
    parameters
        The parameters that learn, by name.
    layers
        The layer of each parameter.
    recording
        Whether layers are watched now; ``batch`` says for how many examples.
    guard
        Sees that nothing changes silently.

    Raises
    ------
    ValueError
        Nothing learns, a layer mixes examples, or a gradient would be changed by a hook.
    RuntimeError
        Another recorder watches the model.
    """

    def __init__(self, model: nn.Module, guard: Guard | None = None) -> None:
        if model in _WATCHED:
            raise RuntimeError("the model is watched already: by make_private, or by a call that is not finished")
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("no parameter of the model has requires_grad=True")
        self.guard = guard or Guard()
        check_layers(model)
        for name, p in self.parameters.items():
            if p._backward_hooks:
                raise ValueError(f"{name} has a gradient hook, which clipping would leave out: remove it")
        self.model = model
        self.layers: dict[str, str] = {}
        self.batch = 0
        self.recording = False
        self._uses: Counter[str] = Counter()
        self._pass: RowPass | NormPass | SumPass | None = None
        self._probe, self._probing = Probe(), False
        self._state: list[tuple] = []
        self._contents = False  # whether it has them
        self._leaves: dict[int, weakref.ref] = {}  # of the last losses' graph
        self._inside: list[tuple[list[tuple[nn.Parameter, bool]], Kept | None]] = []
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end),
        ]
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

    @property
    def busy(self) -> bool:
        """Whether a backward pass reports, or the model is being looked at: then its layers are called by us."""
        return self._probing or self._pass is not None

    def remove(self) -> None:
        """Take the hooks off the model."""
        self.forget()
        for hook in self._hooks:
            hook.remove()
        _WATCHED.discard(self.model)

    def forget(self) -> None:
        """Drop what forward passes have announced."""
        while self._inside:  # an interrupt may come between a layer's two hooks
            self._leave()
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
        self,
        losses: torch.Tensor,
        clip: Clip,
        execution: Execution,
        *,
        owners: torch.Tensor | None = None,
        loss_scale: float = 1.0,
        verify: bool = True,
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
        loss_scale
            What the losses are multiplied with on their way back, against underflow in half precision. Where they
            overflow they go back once more with a sixteenth of it.
        verify
            Let the guard look, if it wants to.

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
        try:
            self._find_leaves(losses)
            if verify:
                self.verify(losses)
            while True:
                norm_pass = NormPass(self.layers, self._uses, clip, execution, owners, loss_scale)
                with self._passing(norm_pass):
                    (losses * loss_scale).sum().backward(retain_graph=two_passes or loss_scale > 1)
                    self._refuse_stray()
                try:
                    norms, sums = norm_pass.finish(losses), norm_pass.sums
                    break
                except FloatingPointError:
                    if loss_scale == 1:
                        raise
                    loss_scale = max(1.0, loss_scale / 16)
            if two_passes:
                # The same gradients again, scaled layer by layer: reweighted losses would round differently from
                # what the norms were taken of, in half precision by more than an example may move the sum.
                scale = clip.factors(norms.square(), clip.sensitivity) / loss_scale
                scale = scale if owners is None else scale[owners.to(scale.device)]
                with self._passing(SumPass(scale, sums, execution.seen)):
                    (losses * loss_scale).sum().backward()
            return {key: sums.get(key) for key in self.parameters}, norms
        finally:
            self.forget()

    def verify(self, losses: torch.Tensor) -> None:
        """Some of the losses, ``(batch,)``, go backward alone where the guard wants it.

        Raises
        ------
        ValueError
            They reach others' rows of a layer, or a parameter that nobody clips; the message names it.
        """
        if halves := self.guard.halves(losses):
            for half in halves:
                with self._passing(RowPass(half)):
                    losses[half].sum().backward(retain_graph=True)
            self.guard.verified()

    def _refuse_stray(self) -> None:
        """After a backward pass: nothing has come past the layers."""
        if stray := [name for name, p in self.parameters.items() if p.grad is not None]:
            raise NotImplementedError(
                f"{', '.join(stray)}: used outside of the layer that owns it (through torch.nn.functional, say), where "
                "its examples' gradients cannot be told apart; call the layer, or use execution='loop'"
            )

    def _find_leaves(self, losses: torch.Tensor) -> None:
        """What the losses' graph ends in. A parameter of nobody's, whose gradient nobody clips, is refused."""
        nodes, known, ours = [losses.grad_fn], {None}, {id(p) for p in self.parameters.values()}
        self._leaves.clear()
        while nodes:
            if (node := nodes.pop()) in known:
                continue
            known.add(node)
            nodes += [after for after, _ in node.next_functions]
            if (leaf := getattr(node, "variable", None)) is None or id(leaf) in ours:
                continue
            self._leaves[id(leaf)] = weakref.ref(leaf)
            if isinstance(leaf, nn.Parameter):
                raise ValueError(
                    f"the losses depend on a parameter of shape {tuple(leaf.shape)} that is not the model's, whose "
                    "gradient nobody clips: give it to the model, or freeze it"
                )

    def reached(self, tensor: torch.Tensor) -> bool:
        """Whether the last losses gave a gradient to a tensor that is not the model's."""
        leaf = self._leaves.get(id(tensor))
        return leaf is not None and leaf() is tensor

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

    def _begin(self, module, args, kwargs) -> None:
        """The model is called: look for changes and, for new shapes, find which example owns each row."""
        if not self.recording or module is not self.model:
            return
        self.guard.judge(module)
        inputs = leaves([*args, kwargs])
        if any(map(is_fake, inputs)):
            return

        self._contents = self.guard.fresh
        self._state = state(module, contents=self._contents)

        def look(probe: Probe) -> None:
            self._probe, self._probing = probe, True
            try:
                probe.run(module.forward, args, kwargs, self.batch)
            finally:
                self._probing = False
                self._check_state()

        self._probe = self.guard.probe(inputs, self.batch, look)

    def _end(self, module, args, output) -> None:
        if self.recording and module is self.model and self._state:
            self._check_state()

    def _check_state(self) -> None:
        """Refuse a forward pass that has changed something."""
        known, self._state = self._state, state(self.model, contents=self._contents)
        if known != self._state:
            names = {module: name for name, module in self.model.named_modules()}
            moved = [".".join(filter(None, (names[old[0]], old[1]))) for old in known if old not in self._state]
            raise ValueError(
                f"{', '.join(moved)}: the model changes this as it reads examples, and keeps something of them without "
                "noise: let it stand still, or be set up with public examples before"
            )

    def _before(self, site: Site):
        def hook(module, args):
            if self.recording and module is site.module:  # a copy of the model has copies of the hooks
                kept = Kept() if site.rule is any_layer and not self._probing else None
                self._inside.append(([(p, p.requires_grad) for p in site.parameters], kept))
                for p in site.parameters:
                    p.requires_grad_(False)
                if kept:
                    kept.__enter__()

        return hook

    def _after(self, site: Site):
        label = str(site)

        def hook(module, args, kwargs, output):
            if not self.recording or module is not site.module:
                return None
            masks = self._leave()
            if output is None:  # an exception passes: checkpointing stops a recomputation with one
                return None
            given = float_tensors(output)
            if self._probing:
                read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
                return self._probe.see(label, read, output)
            if not given:
                raise NotImplementedError(
                    f"{label} gave a {type(output).__name__} without tensors that can be followed"
                )
            rows = self._probe.rows(label, given, self.batch)
            if self._pass is None:  # else the layer is run again for a checkpoint
                self._uses.update(site.keys.values())
                self.guard.see(label, given)
            return tap(site, self.batch, rows, args, kwargs, output, masks, self._wanted, self._report)

        return hook

    def _leave(self) -> list[torch.Tensor]:
        """A layer has been called; gives what it dropped."""
        frozen, kept = self._inside.pop()
        if kept:
            kept.__exit__(None, None, None)
        for p, learns in frozen:
            p.requires_grad_(learns)
        return kept.masks if kept else []
