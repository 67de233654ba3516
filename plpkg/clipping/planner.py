"""What to do with each parameter: the fewest operations that fit a memory budget.

For a matrix of R × C numbers, used at T positions, with B examples of s bytes a number (2 operations a multiply-add):

==========================  ===========================  ========================  ======================
what is done                operations                   kept until clipping       temporaries
==========================  ===========================  ========================  ======================
build, keep the gradient    2BTRC + 2BRC                 B·R·C·s                   none
``gram``, keep factors      2BT²(R + C) + 2BTRC          both factors              2·B·T²·s, in chunks
build, keep factors         4BTRC                        both factors              B·R·C·s, in chunks
``gram``, second pass       2BT²(R + C) + 2BTRC          nothing                   2·B·T²·s, in chunks
build, second pass          4BTRC                        nothing                   B·R·C·s, in chunks
==========================  ===========================  ========================  ======================

A second pass adds the backward pass of everything below the loss once more, and needs the whole graph to live through
the first. Whether one fits is known from one watched step, which runs as ghost clipping does: it gives the live bytes
at the moment when each parameter's gradient is known, with the graph kept and without. To these the table's bytes are
added; the plan is the cheapest row for each parameter, changed where the peak is too high for the one that saves most
bytes for an operation. The often quoted rule 2T² ≤ RC compares bytes; by operations building the gradient costs
nothing if it is kept, because it replaces the weight gradient.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from plpkg.clipping import factors
from plpkg.clipping.execution import Choice, Execution
from plpkg.clipping.factors import Outer
from plpkg.memory import MIB, MemoryTimeline
from plpkg.results import Tabular
from plpkg.validation import whole_number


@dataclass(frozen=True)
class Matrix:
    """A parameter with a gradient of outer products, as the cost model sees it.

    Attributes
    ----------
    batch, positions, rows, cols
        B, T, R, C; groups count as rows of ``groups`` separate matrices.
    one_hot
        Whether the rows are token ids.
    itemsize
        Bytes a number of the factors; what is built has at least 4.
    """

    batch: int
    positions: int
    rows: int
    cols: int
    groups: int = 1
    one_hot: bool = False
    itemsize: int = 4

    @property
    def factor_bytes(self) -> int:
        """What both sides take (token ids take 8 bytes)."""
        sides = self.cols * self.itemsize + (8 if self.one_hot else self.rows * self.itemsize)
        return self.batch * self.positions * self.groups * sides

    @property
    def gradient_bytes(self) -> int:
        """What all examples' gradients take."""
        return self.batch * self.groups * self.rows * self.cols * max(4, self.itemsize)

    @property
    def scaled_bytes(self) -> int:
        """The copy of the smaller side, scaled by the clipping factors."""
        side = self.cols if self.one_hot else min(self.rows, self.cols)
        return self.batch * self.positions * self.groups * side * max(4, self.itemsize)

    @property
    def weight_flops(self) -> int:
        """The operations of the weight gradient in plain SGD, and of the input's gradient; token ids have none."""
        return 0 if self.one_hot else 2 * self.batch * self.positions * self.groups * self.rows * self.cols

    @property
    def norm_flops(self) -> dict[str, int]:
        """The operations of the norm by each rule."""
        if self.one_hot or self.positions * self.groups == 1:
            return {"gram": 0}
        square = 2 * self.batch * self.positions**2 * self.groups
        return {"gram": square * (self.rows + self.cols), "instantiate": self.weight_flops}

    def temporary_bytes(self, norm: str) -> int:
        """What is live beside the factors while the norm is computed."""
        if self.one_hot:
            return _chunk(3 * self.batch * self.positions * self.cols * max(4, self.itemsize), self.batch)
        if self.positions * self.groups == 1:
            return 0
        if norm == "gram":
            return _chunk(2 * self.batch * self.groups * self.positions**2 * max(4, self.itemsize), self.batch)
        return _chunk(self.gradient_bytes, self.batch)

    def options(self, *, two_passes: bool) -> list["Option"]:
        """The table's rows for this parameter."""
        options = []
        for norm, flops in self.norm_flops.items():
            temporary = self.temporary_bytes(norm)
            flops += self.weight_flops
            options.append(Option(Choice(norm, "factors"), flops, self.factor_bytes, temporary))
            if two_passes:
                options.append(Option(Choice(norm, "nothing"), flops, 0, temporary))
        if not self.one_hot:
            added = 2 * self.batch * self.groups * self.rows * self.cols
            keep = Choice("instantiate", "gradient")
            options.append(Option(keep, self.weight_flops + added, self.gradient_bytes, 0))
        return options


@dataclass(frozen=True)
class Option:
    """A row of the table for one parameter."""

    choice: Choice
    flops: int
    kept_bytes: int  # until clipping
    temporary_bytes: int


@dataclass(frozen=True)
class Moment:
    """When a parameter's gradient was known in the watched step.

    The two last give the live bytes while the graph is freed on the way, and while it is kept for a second pass: the
    most since the moment before, and now. Sums are not counted.
    """

    key: str
    matrix: Matrix | None  # None for what is built anyway (biases, norms)
    built_bytes: int  # of that, for all examples
    storages: tuple[tuple[int, int], ...]  # number and bytes of each of the factors': q, k and v share what they read
    freed: tuple[int, int]
    graph_kept: tuple[int, int]


@dataclass(frozen=True)
class Plan(Tabular):
    """What is done with each parameter.

    Attributes
    ----------
    options
        By parameter.
    matrices
        By parameter, the shapes it was made for.
    two_passes
        Whether a second backward pass is needed.
    peak_bytes
        The most that is expected to live at once: parameters, activations and what clipping adds.
    memory_bytes
        The budget.
    """

    options: Mapping[str, Option]
    matrices: Mapping[str, Matrix]
    two_passes: bool
    peak_bytes: int
    memory_bytes: int

    @property
    def flops(self) -> int:
        """Operations of norms and sums, and of the second pass."""
        again = sum(matrix.weight_flops for matrix in self.matrices.values()) if self.two_passes else 0
        return sum(option.flops for option in self.options.values()) + again

    @property
    def execution(self) -> Execution:
        """For :func:`~plpkg.clipping.clipped_gradients`."""
        keep = Choice("instantiate", "nothing" if self.two_passes else "gradient")

        def choose(key: str, uses: Sequence[Outer], built_bytes: int) -> Choice:
            return self.options[key].choice if key in self.options else keep

        return Execution(choose, two_passes=self.two_passes)

    def rows(self) -> list[dict]:
        return [
            {
                "parameter": key,
                "positions": self.matrices[key].positions,
                "rows": self.matrices[key].groups * self.matrices[key].rows,
                "cols": self.matrices[key].cols,
                "norm": option.choice.norm,
                "keep": option.choice.keep,
                "gflop": option.flops / 1e9,
                "kept_mib": option.kept_bytes / MIB,
            }
            for key, option in self.options.items()
        ]

    def __repr__(self) -> str:
        passes = "two passes" if self.two_passes else "one pass"
        return (
            f"Plan: {passes}, {self.flops / 1e9:.3g} GFLOP for {len(self.options)} matrices, "
            f"peak {self.peak_bytes / MIB:.1f} of {self.memory_bytes / MIB:.1f} MiB"
        )


@dataclass(frozen=True)
class Watched:
    """A step that was watched: the moments in the order of the backward pass, and two peaks in bytes."""

    moments: tuple[Moment, ...]
    forward_peak_bytes: int
    peak_bytes: int


def watch(model: torch.nn.Module, step: Callable[[Execution], object]) -> tuple[object, Watched]:
    """Run a step as ghost clipping would, and see what lives when.

    Parameters
    ----------
    model
        Its parameters and gradients are counted.
    step
        Runs forward and backward passes with the execution that it is given.

    Returns
    -------
    (result, watched)
        What ``step`` returned, and what was seen.
    """
    sizes = {name: p.numel() * max(4, p.element_size()) for name, p in model.named_parameters()}
    first: dict[str, tuple] = {}
    second: dict[str, tuple[int, int]] = {}
    storages: dict[int, tuple[int, weakref.ref]] = {}
    serials = count()
    forward_peak = event = 0

    def number(side: torch.Tensor) -> tuple[int, int]:
        storage = side.untyped_storage()
        serial, known = storages.get(storage._cdata, (0, None))
        if known is None or known() is None:  # new, perhaps at an address that was freed
            serial = next(serials)
            storages[storage._cdata] = serial, weakref.ref(storage)
        return serial, side.nbytes

    def now() -> tuple[int, int]:
        nonlocal event
        since, event = event, timeline.num_events
        return timeline.peak_since(since), timeline.live_bytes

    def choose(key: str, uses: Sequence[Outer], built_bytes: int) -> Choice:
        nonlocal forward_peak
        forward_peak = forward_peak or timeline.peak_bytes
        numbered = tuple(number(side) for use in uses for side in (use.rows, use.cols))
        first[key] = _matrix(uses), built_bytes, numbered, now()
        return Choice("gram", "nothing")

    def again(key: str) -> None:
        sums = sum(sizes[other] for other in second if other != key)
        most, live = now()
        second[key] = most - sums, live - sums

    with MemoryTimeline(label_saved=False) as timeline:
        timeline.track(model)
        result = step(Execution(choose, two_passes=True, seen=again))
    moments = tuple(Moment(key, *seen[:3], second[key], seen[3]) for key, seen in first.items())
    return result, Watched(moments, forward_peak, timeline.peak_bytes)


def _matrix(uses: Sequence[Outer]) -> Matrix | None:
    if not uses:
        return None
    use = next((use for use in uses if not use.one_hot), uses[0])
    batch, groups, _, cols = use.cols.shape
    positions = sum(use.positions for use in uses)
    return Matrix(batch, positions, use.num_rows, cols, groups, use.one_hot, use.cols.element_size())


def cheapest(watched: Watched, memory_bytes: int | None = None) -> Plan:
    """The plan with the fewest operations that fits.

    Parameters
    ----------
    watched
        What :func:`watch` gave.
    memory_bytes
        The budget: live bytes at the step's peak, parameters and gradients included. By default what the watched step
        took, which is what ghost clipping needs.

    Returns
    -------
    Plan

    Raises
    ------
    ValueError
        Nothing fits; the message says what would.
    """
    budget = watched.peak_bytes if memory_bytes is None else whole_number("memory_bytes", memory_bytes, 1)
    plans = [_fitted(watched, budget, two_passes) for two_passes in (False, True)]
    fitting = [plan for plan in plans if plan.peak_bytes <= budget]
    if fitting:
        return min(fitting, key=lambda plan: plan.flops)
    smallest = min(plans, key=lambda plan: plan.peak_bytes)
    if memory_bytes is None:  # a few bytes more than ghost clipping: where a sum is scaled, in a tiny model
        return smallest
    raise ValueError(
        f"memory_bytes={memory_bytes} is too little for this step: it needs at least {smallest.peak_bytes}"
    )


def _fitted(watched: Watched, memory_bytes: int, two_passes: bool) -> Plan:
    moments = watched.moments
    choices = {m.key: m.matrix.options(two_passes=two_passes) for m in moments if m.matrix}
    chosen = {key: min(options, key=lambda o: (o.flops, o.kept_bytes)) for key, options in choices.items()}
    place = {m.key: i for i, m in enumerate(moments)}
    left = {key: [chosen[key]] for key in chosen}  # options that are not come back to
    while True:
        live = _live(moments, chosen, two_passes)
        worst = max(range(len(live)), key=live.__getitem__)
        if live[worst] <= memory_bytes:
            break
        better = []
        for key, options in choices.items():
            here, now = place[key], chosen[key]
            for option in options:
                saved = (now.kept_bytes - option.kept_bytes) if here <= worst else 0
                saved += (now.temporary_bytes - option.temporary_bytes) if here == worst else 0
                if saved > 0 and option not in left[key]:
                    better.append((saved / max(1, option.flops - now.flops), key, option))
        if not better:
            break
        _, key, option = max(better, key=lambda candidate: candidate[0])
        chosen[key] = option
        left[key].append(option)
    # With the graph kept, the second pass peaks as the watched one did.
    peak = max(*live, watched.peak_bytes if two_passes else watched.forward_peak_bytes)
    return Plan(chosen, {m.key: m.matrix for m in moments if m.matrix}, two_passes, peak, memory_bytes)


def _live(moments: Sequence[Moment], chosen: Mapping[str, Option], two_passes: bool) -> list[int]:
    """The most live bytes until each parameter's norm is known, and when the first sum is."""
    live, kept, held, before = [], [], set(), 0
    for moment in moments:
        most, now = moment.graph_kept if two_passes else moment.freed
        option = chosen.get(moment.key)
        if option is None:
            keeps = adds = 0 if two_passes else moment.built_bytes
        elif option.choice.keep == "factors":  # they are live at this moment anyway
            keeps, adds = sum(size for serial, size in moment.storages if serial not in held), option.temporary_bytes
            held.update(serial for serial, _ in moment.storages)
        else:
            keeps, adds = option.kept_bytes, option.kept_bytes + option.temporary_bytes
        live.append(before + max(most, now + adds))
        before += keeps
        kept.append(keeps)
    if two_passes:
        return live
    for moment, keeps in zip(moments, kept, strict=True):  # the sums, one after the other
        total = scaled = 0
        if moment.matrix:
            total = moment.matrix.gradient_bytes // moment.matrix.batch
            scaled = moment.matrix.scaled_bytes if chosen[moment.key].choice.keep == "factors" else 0
            live.append(before + now + scaled + total)
        before += total - keeps
    return live


def _chunk(size: int, batch: int) -> int:
    """What is live at once of a temporary that is made for a few examples at a time."""
    return min(size, max(factors.CHUNK_BYTES, size // max(1, batch)))
