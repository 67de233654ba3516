"""The costs of a step in every execution: operations and peak memory, counted on fake tensors of any size.

Nothing here is a formula: the code that clips runs, on tensors that have a shape and no data. So the figures hold for
machines that could not run the step, and they are exact but for what an allocator adds.
"""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from plpkg.clipping.execution import EXECUTIONS
from plpkg.clipping.gradients import clipped_gradients
from plpkg.clipping.memory.dataflow import checked_widths, measure
from plpkg.clipping.memory.published import PUBLISHED, PublishedTask, opacus_step, two_layer_task
from plpkg.memory import MIB, MemoryTimeline
from plpkg.results import Tabular
from plpkg.validation import whole_number

COMPARED = ("sgd", *EXECUTIONS)
"""Plain SGD, which clips nothing, and the executions."""


@dataclass(frozen=True)
class Cost:
    """The cost of one step's gradients.

    Attributes
    ----------
    flops
        Operations of forward and backward passes, norms and sums; two for a multiply-add.
    peak_bytes
        The most that is live at once: inputs, parameters, activations, gradients and what clipping needs.
    """

    flops: int
    peak_bytes: int


@dataclass(frozen=True)
class Costs(Tabular):
    """The costs of one step in every execution, for a stack of linear layers."""

    batch: int
    seq: int
    widths: tuple[int, ...]
    by_execution: dict[str, Cost]

    def rows(self) -> list[dict]:
        base = self.by_execution["sgd"]
        return [
            {
                "execution": execution,
                "gflop": cost.flops / 1e9,
                "of SGD's": cost.flops / base.flops,
                "peak_mib": cost.peak_bytes / MIB,
                "of SGD's peak": cost.peak_bytes / base.peak_bytes,
            }
            for execution, cost in self.by_execution.items()
        ]

    def __repr__(self) -> str:
        widths = " → ".join(map(str, self.widths))
        peaks = ", ".join(f"{name} {cost.peak_bytes / MIB:,.0f}" for name, cost in self.by_execution.items())
        return f"Costs({widths}, batch {self.batch}, {self.seq} tokens: {peaks} MiB)"


def stack_costs(batch: int, seq: int, widths: Sequence[int]) -> Costs:
    """The costs of a step of a stack of linear layers without biases, on sequences.

    Norms are computed in pieces of 64 MiB, here as on real tensors, and a piece takes about 10 ms: thousands of them
    (a batch of 1,024 with 4,096 tokens, say) take half a minute.

    Parameters
    ----------
    batch, seq
        Examples, and tokens of each.
    widths
        How many values the input has, and each layer's output.

    Raises
    ------
    ValueError
        A size below 1, or fewer than two widths.
    """
    whole_number("batch", batch, 1)
    whole_number("seq", seq, 1)
    widths = checked_widths(widths)

    def build() -> nn.Module:
        layers = [nn.Linear(read, written, bias=False) for read, written in itertools.pairwise(widths)]
        return nn.Sequential(*layers)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean((1, 2))

    costs = {execution: _cost(build, loss, (batch, seq, widths[0]), execution) for execution in COMPARED}
    return Costs(batch, seq, widths, costs)


def _cost(build, loss, shape: tuple[int, ...], execution: str) -> Cost:
    with FakeTensorMode():
        model = build()
        x = torch.empty(shape)
        with FlopCounterMode(display=False) as counter, MemoryTimeline(label_saved=False) as timeline:
            timeline.track(model, x)
            if execution == "sgd":
                loss(model, x).sum().backward()
            else:
                clipped_gradients(model, loss, x, 1.0, execution)
    return Cost(counter.get_total_flops(), timeline.peak_bytes)


def our_step(task: PublishedTask, execution: str = "book_keeping"):
    """A step of this package in a published setting, to be measured beside Opacus's.

    Parameters
    ----------
    task
        A task of :mod:`plpkg.clipping.memory.published`.
    execution
        A name of an execution.

    Returns
    -------
    Callable
        ``step(timeline)`` for :func:`plpkg.clipping.memory.dataflow.measure`; its phase, ``iteration``, is the
        whole step without the model.
    """

    criterion = copy.copy(task.criterion)
    criterion.reduction = "none"

    def losses(model: nn.Module, batch) -> torch.Tensor:
        return criterion(model(batch[0]), batch[1])

    def step(timeline: MemoryTimeline) -> None:
        model = task.build()
        batch = task.data()
        timeline.track(model, *batch)
        with timeline.phase("iteration"):
            gradients, _ = clipped_gradients(model, losses, batch, 1.0, execution)
            learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
            for name, p in learning.items():
                total = gradients.pop(name)
                p.grad = total.add_(torch.randn_like(total)).div_(len(batch[0]))
            torch.optim.SGD(learning.values(), lr=0.1).step()

    return step


def two_layer_table(batches: Sequence[int] = (32, 2**17)):
    """A whole step of the published two-layer network, with the Opacus that is installed and with this package.

    Parameters
    ----------
    batches
        Batch sizes: any, for nothing is allocated.

    Returns
    -------
    pandas.DataFrame
        A row for each execution, a column for each batch: the peak above model and batch, MiB, *computed*.
    """
    import pandas as pd

    peaks = {}
    for batch in batches:
        task = two_layer_task(batch)
        steps = {"SGD" if name == "sgd" else f"Opacus, {name}": opacus_step(task, name) for name in PUBLISHED}
        steps |= {f"plpkg, {name}": our_step(task, name) for name in EXECUTIONS}
        peaks[batch] = {label: measure(step).phases[-1].increase_bytes / MIB for label, step in steps.items()}
    return pd.DataFrame(peaks).rename_axis(index="step", columns="batch")
