"""The loop of every training in this package: gradient, rate, update, checkpoint.

A caller brings what differs: how a step's gradient is made, the rate of each step, and what a checkpoint holds.
"""

import atexit
import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from tqdm.auto import tqdm

from plpkg.files import checkpoints

CHECKPOINT = "checkpoint.safetensors"
"""The file of a run's folder from which it goes on."""


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
    """The batches, over and over; ValueError if they cannot be begun again, or there are none. ``what`` names them."""
    while True:
        ended = True
        for batch in batches:
            ended = False
            yield batch
        if ended:
            raise ValueError(f"{what} have ended; give a list, which can be begun anew")


def forget_images(model: Any) -> list[tuple[Any, torch.Tensor | None]]:
    """Clear the position offsets that vision-language models keep from the images of an earlier prompt.

    Returns the modules that have one, each with its offset.
    """
    moved = [(module, module.rope_deltas) for module in model.modules() if "rope_deltas" in vars(module)]
    for module, _ in moved:
        module.rope_deltas = None
    return moved


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within it there is no dropout, and a cache also under gradient checkpointing; then modules are as they were.

    Nor do images of earlier prompts count: see :func:`forget_images`.
    """
    modes = [(module, module.training) for module in model.modules()]
    moved = forget_images(model)
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, deltas in moved:
            module.rope_deltas = deltas


@contextlib.contextmanager
def frozen(model: torch.nn.Module) -> Iterator[None]:
    """Within it, the model's weights have no gradients, and it is :func:`evaluating`; then it is as it was."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        with evaluating(model):
            yield
    finally:
        for p in trained:
            p.requires_grad_()


class _States(tuple):
    """A body's output: its states, and None for all else that a family hands on (router logits, shared keys)."""

    def __getattr__(self, name: str) -> torch.Tensor | None:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


class _Given(torch.nn.Module):
    """In the place of a model's body: it returns the states that were given."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden
        self.called = False

    @property
    def decoder(self) -> "_Given":
        """Itself: OPT calls its body's decoder instead of its body."""
        return self

    def forward(self, *_, **__) -> "_States":
        self.called = True
        return _States([self.hidden])


def logits_of(model, hidden: torch.Tensor) -> torch.Tensor:
    """The logits that a causal language model makes of its body's last states: ``([batch,] tokens, vocab)``.

    At least in float32. So that logits need not exist all at a time: ``hidden``, ``([batch,] tokens, hidden)``, may be
    the states of some tokens. A head's scale or soft cap is the model's own.
    """
    with_batch = hidden if hidden.dim() == 3 else hidden[None]
    body = _Given(with_batch)
    head = copy.copy(model)  # shares every tensor; the model itself is not touched, whatever thread uses it meanwhile
    head._modules = model._modules | {model.base_model_prefix: body}
    # The class's own forward: what others put around this model's (accelerate, torch.compile) would run the model.
    logits = type(model).forward(head, inputs_embeds=body.hidden, use_cache=False).logits
    if not body.called:
        raise ValueError(f"{type(model).__name__} does not call its own body: its head cannot be had alone")
    precision = torch.promote_types(logits.dtype, torch.float32)
    return logits.view(*hidden.shape[:-1], logits.shape[-1]).to(precision)


def learn(
    steps: tqdm,
    gradient: Callable[[int], float],
    optimizers: Sequence[Optimizer],
    rate: Callable[[int], float],
    *,
    remedy: str = ": take a lower lr",
) -> Iterator[tuple[int, float]]:
    """Make one update after another.

    Parameters
    ----------
    steps
        A bar over the steps that are left.
    gradient
        Leaves a step's gradient in the parameters, clipped, and returns its loss.
    optimizers, rate
        The optimizers of the parameters, and their learning rate in a step.
    remedy
        The end of the error message about a loss that is not finite.

    Yields
    ------
    int, float
        Steps made so far, and the loss of the last.

    Raises
    ------
    FloatingPointError
        A loss is not finite. Nothing was updated with its gradient.
    """
    for step in steps:
        loss = gradient(step)
        done = step + 1
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of step {done} is {loss}{remedy}")
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
            optimizer.zero_grad()
        yield done, loss


class TrainingRun:
    """A training that goes on where it stopped: its steps, and the checkpoint that keeps what they changed.

    Parameters
    ----------
    steps
        All of its steps.
    folder
        The folder of ``checkpoint.safetensors``; without one, nothing is kept.
    identity
        The settings that tell this run from others: a checkpoint with other settings is refused.
    checkpoint_every
        Steps between two checkpoints; there is one after the last step as well.
    writes
        Whether this process writes checkpoints and shows a bar: one of several does.

    Attributes
    ----------
    done, saved
        Steps made, and steps that the checkpoint has.
    settled
        Whether all parts are as a step left them; false while a step updates them.
    log, facts
        A list and a dictionary that the checkpoint keeps as well: numbers, strings, lists.
    bar
        The progress bar, from :meth:`begin` on.

    Raises
    ------
    ValueError
        The folder holds another run, or a checkpoint that cannot be read.
    """

    def __init__(
        self,
        steps: int,
        folder: Path | None = None,
        identity: Mapping[str, object] | None = None,
        *,
        checkpoint_every: int = 50,
        writes: bool = True,
    ) -> None:
        self._path = None if folder is None else folder / CHECKPOINT
        self._steps = steps
        self._identity = identity or {}
        self._every = checkpoint_every
        self._writes = writes
        state = checkpoints.load(self._path, self._identity) if self._path else None
        if state is None:
            state = {"step": 0, "log": [], "facts": {}, "seconds": 0.0, "parts": {}}
        self._state = state
        self.done = state["step"]
        self.saved = self.done
        self.settled = True
        self.log = state["log"]
        self.facts = state["facts"]

    def begin(self, title: str, progress: bool, **parts) -> None:
        """Load the parts if there is a checkpoint, and show a bar.

        Parameters
        ----------
        title, progress
            The bar's text, and whether it is shown.
        **parts
            The things that the steps change: modules, optimizers, whatever has ``state_dict`` and ``load_state_dict``.
        """
        self._parts = parts
        saved = self._state.pop("parts")  # they would stay in memory as long as the run
        if self.done:
            checkpoints.restore(parts, saved)
        self._began = time.perf_counter() - self._state["seconds"]
        left = range(self.done, self._steps)
        silent = not (progress and self._writes)
        self.bar = tqdm(left, title, initial=self.done, total=self._steps, disable=silent)

    @property
    def seconds(self) -> float:
        """Wall time since the first step, without the time between a stop and going on."""
        return time.perf_counter() - self._began

    def learn(self, gradient, optimizers, rate, **options) -> Iterator[tuple[int, float]]:
        """:func:`learn` the steps that are left, with checkpoints, each of which has what the caller noted before."""

        def noticed(step: int) -> float:
            loss = gradient(step)
            self.settled = False
            return loss

        for done, loss in learn(self.bar, noticed, optimizers, rate, **options):
            yield done, loss
            self.done = done
            self.settled = True
            due = done % self._every == 0 or done == self._steps
            if due and self._writes:
                self.save()

    def save(self) -> None:
        """Write the checkpoint, if there is a folder for it."""
        if self._path is None:
            return
        state = {
            "identity": self._identity,
            "step": self.done,
            "log": self.log,
            "facts": self.facts,
            "seconds": self.seconds,
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }
        checkpoints.save(self._path, state)
        self.saved = self.done
