"""Whether the examples of a batch stay apart: which example owns each row of a layer's output, in every step.

Shapes do not tell the owner of a row: there may be as many positions as examples. So the model is run on one example
and on two, without gradients and without dropout (:class:`Probe`). What grows from one to two belongs to the examples;
what stays, made of the same input, depends on none of them: positions, ``embedding(torch.arange(T))``. Such rows are
then given once for each example: that must not change what the model gives.

A gradient of zero says nothing about mixing: a gate may open later. So some of the losses go backward alone, which must
reach their own examples' rows of every layer and no others (:meth:`Guard.verify`). In the first steps every two
examples are told apart; at an example's new shapes, and else once in fifty steps, at random, one half of the examples
from the other. What leaves no trace in the graph is seen by :mod:`plpkg.clipping.replay`, in the first steps and then
once in a hundred.

What begins to mix later is looked at as in the beginning, in that very step, where it shows: a layer, a mode, a hook,
or a number, text or function that a module keeps has changed, or the graph has other nodes (:meth:`Guard.is_new`). The
rest is seen by chance, in one of fifty or a hundred steps: a factor outside of the model that opens (0 to 1 in a
closure); a hook on a gradient, or an autograd function, that begins to change what it hands on; what is rounded by the
largest of a batch; a collate function; weights of the losses that have no gradient.

Left out: a tensor that the model, or the losses function, keeps of one batch for the next as an attribute; a buffer
that changes, after the first steps, in another way than PyTorch counts (``.data``, numpy).
"""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, combinations
from random import SystemRandom
from types import FunctionType, MethodType

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._pytree import tree_map

from plpkg.clipping.batches import EVERYBODYS, OWN, Rows, alike, behind, examples, float_tensors, is_float, leaves
from plpkg.clipping.dropout import Without, untouched
from plpkg.clipping.layers import LOOP_TAKES_IT, Call, Site, check_layers, merges

FIRST, SELDOM, REPLAYED = 3, 50, 100
MOVING = ("num_batches_tracked", "weight_u", "weight_v", "_u", "_v")
"""Buffers that change with a batch's number, or with the weights (spectral norm), not with what it says."""

SETTINGS = {bool, int, float, str, FunctionType, MethodType, partial}
"""What a module keeps that may decide what it computes."""
RESTLESS = 4
"""So often has a setting changed (a counter) that a change tells nothing any more."""
GRAPHS = 20

_RANDOM = SystemRandom()

_Calls = dict[str, list[tuple[list[torch.Tensor], list[torch.Tensor]]]]
"""By layer, of each call what was given and what was read."""


class Probe:
    """Finds the rows of a model's layers. While it runs, :meth:`see` is told each call of a layer.

    Attributes
    ----------
    found
        By layer, the rows of its calls; none if they follow from nothing.
    """

    def __init__(self) -> None:
        self.found: dict[str, set[Rows]] = {}
        self._calls: _Calls = {}

    def run(self, forward: Callable, args: tuple, kwargs: dict, batch: int) -> None:
        """Run a model on one and on two of a batch's examples; nothing is found if it cannot be.

        Raises
        ------
        ValueError
            The model does not take what is shared once for each example.
        """

        shared: tuple[torch.Tensor, ...] = ()

        def of(count: int, seed: int | None = None) -> tuple[list[torch.Tensor], _Calls]:
            index, self._calls = torch.arange(count) % batch, {}
            with untouched(), without_gradients(), Without():
                if seed is not None:
                    torch.manual_seed(seed)
                given = forward(*examples(args, index, batch, shared), **examples(kwargs, index, batch, shared))
            calls, self._calls = self._calls, {}
            return float_tensors(given), calls

        # Tensors as long as the batch may be everybody's, as a mask (seq, seq) is: the model then runs with them whole,
        # and not with a part. (What examples are mixed with could be cut as they are.)
        long = [leaf for leaf in leaves([*args, kwargs]) if leaf.ndim and len(leaf) == batch]
        for shared in [(), *(some for count in (1, 2) if len(long) > count for some in combinations(long, count))]:
            try:
                (single, one), (plain, two) = of(1), of(2)
            except Exception:  # a model may have any reason not to run on so few
                continue
            if not shared or (plain and all(x.ndim and len(x) == 2 for x in plain) and all(map(len, single))):
                break
        else:
            return
        if _mixed(single, plain) and not any(_mixed(single, of(1, seed)[0]) for seed in (0, 1)):
            layers = [name for name, calls in two.items() if _mixed(*(c[0][0] for c in (one[name], calls)))]
            other = [x.shape for x in leaves([*args, kwargs]) if x.ndim and len(x) not in (1, batch)]
            either = (
                f", or they are not along the first dimension of a tensor of shape {tuple(other[0])}" if other else ""
            )
            raise ValueError(
                f"examples are mixed{f', by {layers[0]} at the latest' if layers else ''}{either}: the model gives "
                "something else for one that stands beside another, whose numbers it takes, perhaps without a gradient"
                + (f"; {LOOP_TAKES_IT}" if other else "")
            )
        found = {name: _rows(one.get(name, []), calls) for name, calls in two.items()}
        self.found = found
        shared = [name for name, calls in found.items() if any(rows.shared for rows in calls)]
        if not shared:
            return

        def same() -> bool:
            try:
                return all(map(alike, plain, of(2)[0]))
            except Exception:  # shapes that do not go together, in whatever words
                return False

        if not same():
            lone = {r: replace(r, apart=True) for rows in found.values() for r in rows if r.shared and r.each == 1}
            self.found = {name: {lone.get(r, r) for r in rows} for name, rows in found.items()}
            if lone and same():
                return
            self.found = found
            raise ValueError(
                f"{shared[0]} gives the same for all examples, and the model does not take it once for each: their "
                "gradients cannot be told apart: freeze the layer, or take execution='loop'"
            )

    def see(self, name: str, read: Sequence[torch.Tensor], output):
        """A layer was called. Gives its output, what is shared once for each example if that is known."""
        given = float_tensors(output)
        self._calls.setdefault(name, []).append((given, list(read)))
        rows = next((r for r in self.found.get(name, ()) if all(r.fit(tensor, 2) for tensor in given)), OWN)
        return tree_map(lambda leaf: rows.given(leaf, 2) if is_float(leaf) else leaf, output)

    def rows(self, name: str, given: Sequence[torch.Tensor], read: int, batch: int) -> Rows:
        """The rows of what a layer gave for a batch, when it had read so many tensors.

        Raises
        ------
        ValueError
            They are not what was found; or, where nothing was, neither the examples nor one for all of them.
        """
        known = self.found.get(name, (OWN, EVERYBODYS))
        fitting = [rows for rows in known if all(rows.fit(tensor, batch) for tensor in given)]
        # A cell may have a state to read only after its first call.
        fitting = [rows for rows in fitting if rows.own is None or len(rows.own) == read] or fitting
        if len(fitting) == 1 or (fitting and batch == 1):
            return fitting[0]
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in given)
        raise ValueError(
            f"{name} gave a tensor of shape {shapes}, whose first dimension is neither the batch of {batch}, once or "
            "several times, nor the same for all examples (time first, or tokens routed by what they say?): give the "
            f"layer the batch first; {LOOP_TAKES_IT}"
        )


def _rows(one: list, two: list) -> set[Rows]:
    """The rows of a layer that was called so for one example and for two."""
    rows = {_of_call(*calls) for calls in zip(one, two, strict=False)}
    return set() if None in rows or len(one) != len(two) else rows


def _of_call(one: tuple, two: tuple) -> Rows | None:
    (given, read), (again, reread) = one, two
    counts, doubled = ([len(tensor) if tensor.ndim else 0 for tensor in tensors] for tensors in (given, again))
    if len(set(counts)) != 1 or not all(counts):
        return None
    if doubled == [2 * count for count in counts]:
        own = (one.ndim > 0 and len(two) == 2 * len(one) for one, two in zip(read, reread, strict=False))
        return Rows(counts[0], own=tuple(own))
    # A gate that is closed gives zeros whatever it reads.
    same = _equal(read, reread) or (_equal(given, again) and all(tensor.any() for tensor in given))
    return Rows(counts[0], shared=True) if same and counts == doubled else None


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _mixed(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    """Whether the first half of what was given for two examples is not what was given for the first alone."""
    for alone, both in zip(one, two, strict=False):
        if alone.shape[1:] == both.shape[1:] and alone.ndim and len(both) in (len(alone), 2 * len(alone)):
            half = alone.dtype.itemsize < 4 or torch.is_autocast_enabled(alone.device.type)
            apart = (alone - both[: len(alone)]).float().norm()
            if apart > (0.1 if half else 0.01) * alone.float().norm():
                return True
    return False


class Guard:
    """Remembers what a model's layers did in all its steps, and checks that its examples stay apart."""

    def __init__(self) -> None:
        self._probes: dict[Hashable, Probe] = {}
        self._modules: list[tuple] | None = None
        self._settings: dict[tuple[int, str], object] = {}
        self._changes: Counter[tuple[int, str]] = Counter()
        self._graphs: set[int] = set()
        self._shapes: set[Hashable] = set()
        self._whole, self._new, self._replays = FIRST, False, FIRST
        # Of the forward pass under way:
        self.known = Probe()
        self._state: list[tuple] = []
        self._contents = False  # whether the state has them

    @property
    def fresh(self) -> bool:
        """Whether these are the first steps, or the first after a layer, a mode or a hook has changed."""
        return self._whole > 0

    def begin(self, model: nn.Module, args: tuple, kwargs: dict, batch: int, run: Callable[[Probe], object]) -> None:
        """A forward pass of so many examples begins. ``run`` has a probe look at the model, where none has.

        Raises
        ------
        ValueError
            A layer mixes examples now, or keeps something of them.
        """
        self.known, self._state = Probe(), []  # nothing of the pass before, which may have been broken off
        self._judge(model)
        inputs = leaves([*args, kwargs])
        if any(map(is_fake, inputs)):  # they have no values to look at
            return
        self._contents = self.fresh
        self._state = state(model, contents=self._contents)
        shapes = tuple(t.shape[1:] if t.ndim and len(t) == batch else t.shape for t in inputs)
        key = (shapes, batch == 1)
        if key not in self._probes:
            try:
                run(self.known)  # what it refuses is refused again
            finally:
                self.still(model)
            self._probes[key], self._new = self.known, True
        self.known = self._probes[key]

    def stand(self, model: nn.Module) -> None:
        """A forward pass of one example begins: nothing can mix it with others, but the model may keep some of it."""
        self._contents, self._whole = self.fresh, max(0, self._whole - 1)
        self._state = state(model, contents=self._contents)

    def still(self, model: nn.Module) -> None:
        """Refuse a forward pass that has changed something since it began.

        Raises
        ------
        ValueError
            A parameter or a buffer is not what it was; the message names it.
        """
        known, self._state = self._state, []
        if known:
            check_still(model, known, contents=self._contents)

    def _judge(self, model: nn.Module) -> None:
        """Look whether the layers, their modes, their hooks and what they keep are those that were seen before."""
        found = modules_of(model)
        modules = [(id(m), type(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in found]
        settings = {
            (id(m), name): setting(value) for m in found for name, value in vars(m).items() if type(value) in SETTINGS
        }
        changed = {key for key, value in settings.items() ^ self._settings.items()}
        self._changes.update(changed)
        self._settings = settings
        if modules != self._modules or any(self._changes[key] <= RESTLESS for key in changed):
            check_layers(model)
            self._modules = modules
            self._probes.clear()
            self.look_again()

    def look_again(self) -> None:
        """The step under way is looked at as in the beginning."""
        self._whole, self._replays = max(1, self._whole), max(1, self._replays)

    def is_new(self, losses: torch.Tensor) -> bool:
        """Whether the losses' graph has other nodes than those before. After so many kinds it tells nothing."""
        if is_fake(losses) or len(self._graphs) >= GRAPHS:
            return False
        graph = hash(tuple(node.name() for node in behind(losses.grad_fn)))
        new = graph not in self._graphs
        self._graphs.add(graph)
        return new

    def replays(self, batch: int) -> bool:
        """Whether a step of so many examples that begins now is to be made again (:mod:`plpkg.clipping.replay`)."""
        if batch < 2 or not (self._replays or _RANDOM.randrange(REPLAYED) == 0):
            return False
        self._replays = max(0, self._replays - 1)
        return True

    def rows(self, name: str, given: Sequence[torch.Tensor], read: int, batch: int) -> Rows:
        """The rows of what a layer gave: :meth:`Probe.rows`."""
        return self.known.rows(name, given, read, batch)

    def see(self, name: str, given: Iterable[torch.Tensor]) -> None:
        """A layer gave tensors; their shapes may be new."""
        for tensor in given:
            shape = name, tensor.shape[1:]
            if shape not in self._shapes:
                self._shapes.add(shape)
                self._new = True

    def _halves(self, losses: torch.Tensor) -> list[torch.Tensor]:
        """Which examples' losses should go backward alone now: ``(batch,)`` of booleans, each true and false somewhere.

        Nothing can be seen of one example, nor of fake tensors.
        """
        count = len(losses)
        if count < 2 or is_fake(losses):
            return []
        order = torch.tensor(_RANDOM.sample(range(count), count))
        if self._whole:
            return [(order >> bit) % 2 == 1 for bit in range((count - 1).bit_length())]
        return [order < count // 2] if self._new or _RANDOM.randrange(SELDOM) == 0 else []

    def verify(self, losses: torch.Tensor, passing: Callable[[object], AbstractContextManager]) -> None:
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
        if halves := self._halves(losses):
            for half in halves:
                with passing(RowPass(half)):
                    losses[half].sum().backward(retain_graph=True)
            self._whole, self._new = max(0, self._whole - 1), False


def setting(value: object) -> object:
    """What tells a setting from others, without keeping alive what a function refers to; two NaN are one."""
    if isinstance(value, float):
        return repr(value)
    return value if isinstance(value, (int, str)) else (id(value), getattr(value, "__code__", None))


class RowPass:
    """The losses of some examples, ``half`` of ``(batch,)``, reach their own rows of every layer, and no others."""

    def __init__(self, half: torch.Tensor) -> None:
        self._half = half

    def wanted(self, site: Site) -> tuple[str, ...]:
        return tuple(site.keys)

    def report(self, site: Site, call: Call, precision: torch.autocast) -> None:
        for gradient in call.gradients:
            others = gradient[~self._half.to(gradient.device)]
            if not others.any():
                continue
            # What is not finite is refused with its norm.
            reached = (others.isfinite() & (others != 0)).flatten(1).any(1)
            if reached.any():
                rows = (~self._half).nonzero().flatten()[reached.cpu()].tolist()
                raise ValueError(
                    f"{site}: the losses of examples {self._half.nonzero().flatten().tolist()} depend on row {rows[0]} "
                    f"of what it gave, of shape {tuple(gradient.shape)}: examples are mixed, or the rows are not the "
                    f"examples; {LOOP_TAKES_IT}"
                )


@contextmanager
def without_gradients() -> Iterator[None]:
    """As ``torch.no_grad``; reentrant checkpointing warns that there are none."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad", category=UserWarning)
        yield


def state(model: nn.Module, *, contents: bool = False) -> list[tuple]:
    """Of each parameter, and of each buffer that should stand still: the module's ``id``, the name, the tensor's ``id``
    and version, and with ``contents`` sums of what it holds. No tensor or module is kept alive by it.
    """
    # PEFT merges these and takes them apart in each forward pass, which says nothing of examples.
    modules = modules_of(model)
    merged = {each for module in modules if merges(module) for each in module.base_layer.modules()}
    return [
        (id(module), name, id(tensor), tensor._version, *(_sums(tensor.detach()) if contents else ()))
        for module in modules
        if module not in merged
        for name, tensor in chain(module._parameters.items(), module._buffers.items())
        if not (tensor is None or name in MOVING or _is_rotary(module, name) or tensor.is_inference())
    ]


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
    if before != now:
        names = {id(module): name for name, module in model.named_modules()}
        moved = [".".join(filter(None, (names[old[0]], old[1]))) for old in before if old not in now]
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
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    bits = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    try:  # hash_tensor refuses a tensor without numbers
        return bits.numel() and torch.hash_tensor(bits).item(), tensor.sum(dtype=wide).item()
    except RuntimeError:  # nothing of the kind for a sparse tensor, or for float8: the version has to tell
        return ()
