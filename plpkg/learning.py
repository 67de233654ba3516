"""The loop of every training run in this package: gradient, rate, update, checkpoint.

A caller brings what differs: how a step's gradient is made, the rate of each step, and what a checkpoint holds.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from torch.optim import Optimizer
from tqdm.auto import tqdm


def accelerator(cpu: bool):
    """An ``accelerate.Accelerator`` for one process or for several, whatever its environment variables say."""
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    once = GradientAccumulationPlugin(num_steps=1)
    # Its own mixed precision would copy every logit to float32 once more.
    return Accelerator(cpu=cpu, mixed_precision="no", dynamo_backend="no", gradient_accumulation_plugin=once)


def rising(step: int, warmup: int) -> float:
    """The share of the highest rate in a step, counted from 0: it rises for ``warmup`` steps and stays."""
    return min(1.0, (step + 1) / (warmup + 1))


def rising_and_falling(step: int, warmup: int, steps: int) -> float:
    """The share of the highest rate: it rises for ``warmup`` steps, then falls linearly to zero after ``steps``."""
    return min(rising(step, warmup), (steps - step) / max(1, steps - warmup))


def learn(
    steps: tqdm,
    gradient: Callable[[int], float],
    optimizers: Sequence[Optimizer],
    rate: Callable[[int], float],
    *,
    save: Callable[[int], object] | None = None,
    checkpoint_every: int = 1,
    remedy: str = ": take a lower lr",
) -> Iterator[tuple[int, float]]:
    """Make one update after another.

    Parameters
    ----------
    steps
        A bar over the steps that are left; its ``total`` counts those made before, too.
    gradient
        Leaves a step's gradient in the parameters, clipped, and returns its loss.
    optimizers, rate
        What updates the parameters, and the learning rate of a step.
    save
        Writes a checkpoint, given the steps made: after every ``checkpoint_every`` of them and after the last.
    remedy
        The end of the sentence that says which loss is not finite.

    Yields
    ------
    int, float
        Steps made so far, and the loss of the last, before a checkpoint has them.

    Raises
    ------
    FloatingPointError
        A loss is not finite. Nothing was updated with its gradient.
    """
    for step in steps:
        loss, done = gradient(step), step + 1
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of step {done} is {loss}{remedy}")
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
            optimizer.zero_grad()
        yield done, loss
        if save and (done % checkpoint_every == 0 or done == steps.total):
            save(done)
