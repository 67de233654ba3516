"""The explorer of notebook 05: batch, sequence, layer widths, execution → peak memory and operations."""

from functools import lru_cache

import ipywidgets

from plpkg.clipping import plots
from plpkg.clipping.memory.costs import COMPARED, Costs, stack_costs
from plpkg.memory import MIB
from plpkg.show.explorer import Explorer

WIDTHS = ((512, 256, 128), (1024, 512, 256), (2048, 1024, 512), (5120, 2560, 1280))


@lru_cache(maxsize=256)
def _costs(batch: int, seq: int, widths: tuple[int, ...]) -> Costs:
    return stack_costs(batch, seq, widths)


def compute(batch: int, seq: int, widths: tuple[int, ...], execution: str) -> tuple[Costs, str]:
    """A step of two linear layers in every execution, on fake tensors; and the one to look at."""
    return _costs(batch, seq, widths), execution


def read_out(result: tuple[Costs, str]) -> str:
    """Say the result in words."""
    costs, execution = result
    cost = costs.by_execution[execution]
    sgd = costs.by_execution["sgd"]
    clipping = [name for name in costs.by_execution if name != "sgd"]
    least = min(clipping, key=lambda name: costs.by_execution[name].flops)
    widths = " → ".join(map(str, costs.widths))
    return (
        f"{execution}, {costs.batch:,} examples of {costs.seq:,} tokens, {widths}: peak "
        f"{cost.peak_bytes / MIB:,.0f} MiB ({cost.peak_bytes / sgd.peak_bytes:.2f} × SGD's), {cost.flops / 1e9:,.4g} "
        f"GFLOP ({cost.flops / sgd.flops:.2f} ×). Of those that clip, {least} needs the fewest operations."
    )


def draw(result: tuple[Costs, str], ax):
    """Peak and operations of every execution beside SGD."""
    return plots.costs(*result, ax=ax)


def explorer() -> Explorer:
    """The widget of the notebook."""
    controls = {
        "batch": ipywidgets.SelectionSlider(options=[2**k for k in range(8)], value=32, description="Batch (examples)"),
        "seq": ipywidgets.SelectionSlider(
            options=[2**k for k in range(12)], value=128, description="Sequence (tokens)"
        ),
        "widths": ipywidgets.SelectionSlider(
            options=[(" → ".join(map(str, widths)), widths) for widths in WIDTHS],
            value=WIDTHS[1],
            description="Widths (values)",
        ),
        "execution": ipywidgets.SelectionSlider(options=COMPARED, value="ghost", description="Execution"),
    }
    question = "Up to which sequence length does ghost clipping need less memory than per_sample?"
    return Explorer(controls, compute, read_out, draw, question)
