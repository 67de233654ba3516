"""The loop of every training run in this package: gradient, rate, update, checkpoint.

A caller brings what differs: how a step's gradient is made, the rate of each step, and what a checkpoint holds.
"""

import atexit
import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.optim import Optimizer
from tqdm.auto import tqdm


def accelerator(cpu: bool):
    """An ``accelerate.Accelerator`` for one process or for several, whatever its environment variables say."""
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    once = GradientAccumulationPlugin(num_steps=1)
    # Its own mixed precision would copy every logit to float32 once more.
    result = Accelerator(cpu=cpu, mixed_precision="no", dynamo_backend="no", gradient_accumulation_plugin=once)
    if result.num_processes > 1:  # left to the interpreter's end, gloo's threads abort the process now and then
        atexit.register(result.end_training)
    return result


def rising(step: int, warmup: int) -> float:
    """The share of the highest rate in a step, counted from 0: it rises for ``warmup`` steps and stays."""
    return min(1.0, (step + 1) / (warmup + 1))


def rising_and_falling(step: int, warmup: int, steps: int) -> float:
    """The share of the highest rate: it rises for ``warmup`` steps, then falls linearly to zero after ``steps``."""
    return min(rising(step, warmup), (steps - step) / max(1, steps - warmup))


def endless(what: str, batches: Iterable) -> Iterator:
    """The batches, begun anew when they have ended; ValueError says what cannot be begun anew, or has none."""
    while True:
        ended = True
        for batch in batches:
            ended = False
            yield batch
        if ended:
            raise ValueError(f"{what} have ended; give a list, which can be begun anew")


@contextlib.contextmanager
def frozen(model: torch.nn.Module) -> Iterator[None]:
    """Within it, the model's weights have no gradients, and its dropout rests; then it is as it was."""
    mode, trained = model.training, [p for p in model.parameters() if p.requires_grad]
    model.eval()
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        model.train(mode)
        for p in trained:
            p.requires_grad_()


class _Given(torch.nn.Module):
    """In the place of a model's body: it returns the states that were given."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden, self.called = hidden, False

    def forward(self, *_, **__):
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        self.called = True
        output = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.hidden)
        output.router_logits = None  # which a mixture of experts asks for
        return output


def logits_of(model, hidden: torch.Tensor) -> torch.Tensor:
    """What a causal language model makes of its body's last ``(tokens, hidden)`` states: ``(tokens, vocab)``.

    At least in float32. So that logits need not exist all at a time; a head's scale or soft cap is the model's own.
    """
    body = _Given(hidden[None])
    head = copy.copy(model)  # shares every tensor; the model itself is not touched, whatever thread uses it meanwhile
    head._modules = model._modules | {model.base_model_prefix: body}
    # The class's own forward: what others put around this model's (accelerate, torch.compile) would run the model.
    logits = type(model).forward(head, inputs_embeds=hidden[None], use_cache=False).logits[0]
    if not body.called:
        raise ValueError(f"{type(model).__name__} does not call its own body: its head cannot be had alone")
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


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
