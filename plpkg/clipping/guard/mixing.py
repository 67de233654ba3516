"""Whether the examples of a batch stay apart, in every step.

Which example owns each row of a layer's output is found once for each shape of the model's inputs
(:mod:`plpkg.clipping.guard.probe`).

A gradient of zero says nothing about mixing: a gate may open later. So some of the losses go backward alone, which
must reach their own examples' rows of every layer and no others (:meth:`Guard.verify`). In the first steps, of any two
examples the loss of each goes backward once without the other's; at an example's new shapes, and else once in fifty
steps, at random, one half of the examples from the other. What leaves no trace in the graph is seen by
:mod:`plpkg.clipping.guard.replay`, in the first steps and then once in a hundred.

What begins to mix later is looked at as in the beginning, in that very step, where it shows: a layer, a mode, a hook,
or a number, text or function that a module keeps has changed, or the graph has other nodes (:meth:`Guard.is_new`). The
rest is seen by chance, in one of fifty or a hundred steps: a factor outside of the model that opens (0 to 1 in a
closure); a hook on a gradient, or an autograd function, that begins to change what it hands on; what is rounded by the
largest of a batch; a collate function; weights of the losses that have no gradient.

Left out: a tensor that the model, or the losses function, keeps of one batch for the next as an attribute; a buffer
that changes, after the first steps, in another way than PyTorch counts (``.data``, numpy).
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain, combinations, islice
from random import SystemRandom
from types import FunctionType, MethodType

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from plpkg.clipping.batches import Rows, behind, leaves
from plpkg.clipping.guard.probe import Probe
from plpkg.clipping.layers import Call
from plpkg.clipping.sites import LOOP_TAKES_IT, Site, check_layers, merges

FIRST = 3
"""So many steps are looked at thoroughly, in the beginning."""
SELDOM = 50
"""Then one half of the examples is told from the other in one step of so many."""
REPLAYED = 100
"""And one step of so many is made again."""
MOVING = ("num_batches_tracked", "weight_u", "weight_v", "_u", "_v")
"""Buffers that change with a batch's number, or with the weights (spectral norm), not with what it says."""
SETTINGS = {bool, int, float, str, FunctionType, MethodType, partial}
"""The types of what a module keeps that may decide what it computes."""
RESTLESS = 4
"""So often has a setting changed (a counter) that a change tells nothing any more."""
GRAPHS = 20
"""So many kinds of graphs have been seen that another one tells nothing any more."""

_RANDOM = SystemRandom()


class Guard:
    """Remembers what a model's layers did in all its steps, and checks that its examples stay apart."""

    def __init__(self) -> None:
        self._probes: dict[Hashable, Probe] = {}  # by the shapes of a model's inputs
        self._modules: list[tuple] | None = None
        self._settings: dict[tuple[int, str], object] = {}
        self._changes: Counter[tuple[int, str]] = Counter()
        self._graphs: set[int] = set()
        self._shapes: set[Hashable] = set()
        self._thorough_steps = FIRST  # so many steps more, each example is told from every other one
        self._replays = FIRST  # so many steps more are made again
        self._new = False  # whether this step has shapes that no step before had
        # Of the forward pass under way:
        self.known = Probe()
        self._state: list[tuple] = []
        self._contents = False  # whether the state has them

    @property
    def fresh(self) -> bool:
        """Whether these are the first steps, or the first after a layer, a mode or a hook has changed."""
        return self._thorough_steps > 0

    def begin(self, model: nn.Module, args: tuple, kwargs: dict, batch: int, run: Callable[[Probe], object]) -> None:
        """A forward pass of so many examples begins. ``run`` has a probe look at the model, where none has.

        Raises
        ------
        ValueError
            A layer mixes examples now, or keeps something of them.
        """
        # Nothing of the pass before, which may have been broken off.
        self.known = Probe()
        self._state = []
        self._judge(model)
        inputs = leaves([*args, kwargs])
        if any(map(is_fake, inputs)):  # they have no values to look at
            return
        self._contents = self.fresh
        self._state = state(model, contents=self._contents)
        shapes = tuple(_shape_without_batch(tensor, batch) for tensor in inputs)
        key = (shapes, batch == 1)
        if key not in self._probes:
            try:
                run(self.known)  # what it refuses is refused again
            finally:
                self.still(model)
            self._probes[key] = self.known
            self._new = True
        self.known = self._probes[key]

    def stand(self, model: nn.Module) -> None:
        """A forward pass of one example begins: nothing can mix it with others, but the model may keep some of it."""
        self._contents = self.fresh
        self._thorough_steps = max(0, self._thorough_steps - 1)
        self._state = state(model, contents=self._contents)

    def still(self, model: nn.Module) -> None:
        """Refuse a forward pass that has changed something since it began.

        Raises
        ------
        ValueError
            A parameter or a buffer is not what it was; the message names it.
        """
        before = self._state
        self._state = []
        if before:
            check_still(model, before, contents=self._contents)

    def _judge(self, model: nn.Module) -> None:
        """Look whether the layers, their modes, their hooks and what they keep are those that were seen before."""
        modules = []
        settings = {}
        for module in modules_of(model):
            hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
            modules.append((id(module), type(module), module.training, *hooks))
            for name, value in vars(module).items():
                if type(value) in SETTINGS:
                    settings[id(module), name] = setting(value)
        changed = {key for key, _ in settings.items() ^ self._settings.items()}
        self._changes.update(changed)
        self._settings = settings
        if modules != self._modules or any(self._changes[key] <= RESTLESS for key in changed):
            check_layers(model)
            self._modules = modules
            self._probes.clear()
            self.look_again()

    def look_again(self) -> None:
        """The step under way is looked at as in the beginning."""
        self._thorough_steps = max(1, self._thorough_steps)
        self._replays = max(1, self._replays)

    def is_new(self, losses: torch.Tensor) -> bool:
        """Whether the losses' graph has other nodes than those before. After so many kinds it tells nothing."""
        if is_fake(losses) or len(self._graphs) >= GRAPHS:
            return False
        nodes = tuple(node.name() for node in behind(losses.grad_fn))
        graph = hash(nodes)
        new = graph not in self._graphs
        self._graphs.add(graph)
        return new

    def replays(self, batch: int) -> bool:
        """Whether a step of so many examples that begins now is to be made again (:mod:`.replay`)."""
        if batch < 2:
            return False
        if not self._replays and _RANDOM.randrange(REPLAYED) > 0:
            return False
        self._replays = max(0, self._replays - 1)
        return True

    def rows(self, name: str, given: Sequence[torch.Tensor], read: int, batch: int) -> Rows:
        """The rows of what a layer gave: :meth:`Probe.rows`."""
        return self.known.rows(name, given, read, batch)

    def see(self, name: str, given: Iterable[torch.Tensor]) -> None:
        """A layer gave tensors; their shapes may be new."""
        for tensor in given:
            shape = (name, tensor.shape[1:])
            if shape not in self._shapes:
                self._shapes.add(shape)
                self._new = True

    def verify(self, losses: torch.Tensor, passing: Callable[..., AbstractContextManager]) -> None:
        """Some of the losses, ``(batch,)``, go backward alone where there is something to look at.

        Parameters
        ----------
        passing
            Within it, what the model's layers report goes to the pass that it is given.

        Raises
        ------
        ValueError
            They reach others' rows of a layer; the message names it.
        """
        halves = self._halves(losses)
        if not halves:
            return
        for half in halves:
            with passing(RowPass(half)):
                losses[half].sum().backward(retain_graph=True)
        self._thorough_steps = max(0, self._thorough_steps - 1)
        self._new = False

    def _halves(self, losses: torch.Tensor) -> list[torch.Tensor]:
        """Which examples' losses should go backward alone now: ``(batch,)`` of booleans, each true and false somewhere.

        Nothing can be seen of one example, nor of fake tensors.
        """
        count = len(losses)
        if count < 2 or is_fake(losses):
            return []
        order = _RANDOM.sample(range(count), count)
        if self._thorough_steps:
            memberships = _memberships(count)
            members = torch.tensor([memberships[number] for number in order])  # (batch, halves)
            return list(members.T)
        if self._new or _RANDOM.randrange(SELDOM) == 0:
            return [torch.tensor(order) < count // 2]
        return []


def _memberships(count: int) -> list[list[bool]]:
    """For each of ``count`` examples, in which of some halves it is: of any two, each is in one without the other.

    That is so where all are in equally many halves, and no two in the same ones (Sperner). The fewest halves that have
    room for all are taken: two for two examples, eight for 64.
    """
    halves = 2
    while math.comb(halves, halves // 2) < count:
        halves += 1
    chosen = islice(combinations(range(halves), halves // 2), count)
    return [[half in its for half in range(halves)] for its in chosen]


def _shape_without_batch(tensor: torch.Tensor, batch: int) -> torch.Size:
    of_examples = tensor.ndim and len(tensor) == batch
    return tensor.shape[1:] if of_examples else tensor.shape


def setting(value: object) -> object:
    """A mark that tells a setting from others, without keeping alive what a function refers to; two NaN are one."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (int, str)):
        return value
    return id(value), getattr(value, "__code__", None)


class RowPass:
    """The losses of some examples, ``half`` of ``(batch,)``, reach their own rows of every layer, and no others."""

    def __init__(self, half: torch.Tensor) -> None:
        self._half = half

    def wanted(self, site: Site) -> tuple[str, ...]:
        """All that learn: each site reports."""
        return tuple(site.keys)

    def report(self, site: Site, call: Call, precision: torch.autocast) -> None:
        """Refuse a gradient at another example's row.

        Raises
        ------
        ValueError
            The message names the layer, the examples and the row.
        """
        for gradient in call.gradients:
            others = gradient[~self._half.to(gradient.device)]
            if not others.any():
                continue
            # What is not finite is refused with its norm.
            reached = (others.isfinite() & (others != 0)).flatten(1).any(1)
            if not reached.any():
                continue
            rows = (~self._half).nonzero().flatten()[reached.cpu()].tolist()
            raise ValueError(
                f"{site}: the losses of examples {self._half.nonzero().flatten().tolist()} depend on row {rows[0]} "
                f"of what it gave, of shape {tuple(gradient.shape)}: examples are mixed, or the rows are not the "
                f"examples; {LOOP_TAKES_IT}"
            )


def state(model: nn.Module, *, contents: bool = False) -> list[tuple]:
    """Of each parameter, and of each buffer that should stand still: the module's ``id``, the name, the tensor's ``id``
    and version, and with ``contents`` sums of what it holds. No tensor or module is kept alive by it.
    """
    modules = modules_of(model)
    merged: set[nn.Module] = set()
    for module in modules:
        # PEFT puts these together and takes them apart in each forward pass, which says nothing of examples.
        if merges(module):
            merged.update(module.get_submodule("base_layer").modules())
    found = []
    for module in modules:
        if module in merged:
            continue
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is None or name in MOVING or _is_rotary(module, name) or tensor.is_inference():
                continue
            sums = _sums(tensor.detach()) if contents else ()
            found.append((id(module), name, id(tensor), tensor._version, *sums))
    return found


@contextmanager
def standing_still(model: nn.Module, *, contents: bool = False) -> Iterator[None]:
    """Inside, neither a parameter nor a buffer may change; ``contents`` sees it also where PyTorch does not count it.

    Raises
    ------
    ValueError
        One has changed; the message names it.
    """
    before = state(model, contents=contents)
    yield
    check_still(model, before, contents=contents)


def check_still(model: nn.Module, before: list[tuple], *, contents: bool) -> None:
    """Refuse a model that is not what :func:`state` found before."""
    now = state(model, contents=contents)
    if before == now:
        return
    layers = {id(module): name for name, module in model.named_modules()}
    moved = []
    for entry in before:
        if entry not in now:
            module_id, name, *_ = entry
            layer = layers[module_id]
            moved.append(f"{layer}.{name}" if layer else name)
    raise ValueError(
        f"{', '.join(moved)}: the model changes this as it reads examples, and keeps something of them without "
        "noise: let it stand still, or be set up with public examples before"
    )


def _is_rotary(module: nn.Module, name: str) -> bool:
    """Whether it is a table of angles, which may follow the length of a text."""
    return name.endswith("inv_freq") and "Rotary" in type(module).__name__


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The model's modules, each as often as it is there: ``model.modules()``, in a twentieth of its time."""
    found = [model]
    for module in found:
        found += [child for child in module._modules.values() if child is not None]
    return found


def _sums(tensor: torch.Tensor) -> tuple:
    """A hash and the sum of a tensor's numbers."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    try:
        hashed = torch.hash_tensor(numbers).item() if numbers.numel() else 0  # it refuses a tensor without numbers
        total = tensor.sum(dtype=wide).item()
    except RuntimeError:  # nothing of the kind for a sparse tensor, or for float8: the version has to tell
        return ()
    return hashed, total
