"""Private training with the loop that it had: ``criterion(output, y).backward(); optimizer.step()``.

DP-SGD (Abadi et al., arXiv 1607.00133): a Poisson sample, each example's gradient clipped to C, normal noise of
standard deviation σ·C on their sum, divided by the *expected* batch size. ε comes from Opacus's accountants.

The model and the optimizer stay the objects that they were. The criterion gives one loss an example; its ``backward``
clips and adds up, as often as there are micro-batches; ``step`` adds the noise once.
"""

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from opacus.accountants import create_accountant
from torch.utils.data import DataLoader

from plpkg.clipping.clip import Clip
from plpkg.clipping.gradients import EXECUTIONS
from plpkg.clipping.planner import Plan
from plpkg.clipping.training.accounting import ACCOUNTANTS, noise_for
from plpkg.clipping.training.loader import PoissonLoader, PoissonSampler, check_loader
from plpkg.clipping.training.randomness import Randomness
from plpkg.clipping.training.session import Session
from plpkg.validation import number, one_of, whole_number


class Private(NamedTuple):
    """What :func:`make_private` returns; unpacks into four."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    criterion: "PrivateCriterion"
    data_loader: DataLoader | None

    def epsilon(self, delta: float) -> float:
        """The ε spent so far, for a δ: adding or removing one example changes no probability by more.

        Raises
        ------
        ValueError
            ``delta`` is not between 0 and 1.
        """
        return self.criterion.session.epsilon(delta)

    @property
    def noise_multiplier(self) -> float:
        """σ."""
        return self.criterion.session.noise_multiplier

    def skip(self) -> None:
        """Where you sample yourself and nobody was chosen: a step of noise alone, which counts like any other.

        Raises
        ------
        RuntimeError
            Examples have gone backward since the last step, or a data loader samples (and does this by itself).
        """
        self.criterion.session.skip()

    def remove(self) -> None:
        """Make the model and the optimizer ordinary again; what has been spent stays spent."""
        self.criterion.session.remove()

    def state_dict(self) -> dict:
        """What to save beside the model's and the optimizer's states: the accountant, and which sample comes next.

        Raises
        ------
        RuntimeError
            A sample is half done: call it after ``step`` and before the next batch.
        """
        return self.criterion.session.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Go on where :meth:`state_dict` was called: the same ε, and with the same seed the same samples and noise.

        Raises
        ------
        ValueError
            The state is of another run.
        """
        self.criterion.session.load_state_dict(state)


def make_private(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader | None,
    criterion: Callable,
    *,
    max_grad_norm: float,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    target_delta: float | None = None,
    epochs: int | None = None,
    execution: str | Plan = "book_keeping",
    clipping: str = "flat",
    accountant: str = "prv",
    max_physical_batch_size: int | None = None,
    sample_rate: float | None = None,
    expected_batch_size: float | None = None,
    seed: int | None = None,
    secure: bool = False,
) -> Private:
    """Make a training loop private.

    Parameters
    ----------
    model
        In training mode. Every parameter with ``requires_grad`` belongs to the optimizer, and is clipped.
    optimizer
        Any ``torch.optim`` optimizer that steps without a closure.
    data_loader
        Its number of batches becomes that of steps in an epoch, and a step expects the examples over that number.
        After a ``break`` the next loop is a new epoch. ``None``: you sample yourself, each example with probability
        ``sample_rate``, give ``expected_batch_size``, and call :meth:`Private.skip` where nobody was chosen.
    criterion
        A loss module (``reduction`` ``mean`` or ``sum``, ``ignore_index`` as it is), or a function that returns one
        loss an example. The loss of an example with several targets is their mean (or sum); losses and targets may
        be flattened as long as each example's stay together. On outputs without a gradient, as in validation, the
        criterion that comes back does what this one did.
    max_grad_norm
        C.
    noise_multiplier
        σ, in units of C. Or ``target_epsilon``, ``target_delta`` and ``epochs``: the smallest σ for these.
    execution
        ``per_sample``, ``fast``, ``ghost``, ``book_keeping``, or what :func:`plpkg.clipping.plan` found.
    clipping
        ``flat``, ``automatic`` or ``per_layer``.
    accountant
        ``prv`` (tight) or ``rdp``.
    max_physical_batch_size
        Gradient accumulation: samples larger than that come in pieces (micro-batches); ``step`` does nothing until
        the last. You may also take a batch apart yourself, but not put two of them in a step.
    seed, secure
        Of the sampling and the noise: see :mod:`plpkg.clipping.training.randomness`.

    Returns
    -------
    Private
        ``(model, optimizer, criterion, data_loader)``, with ``epsilon``, ``state_dict`` and ``load_state_dict``.

    Raises
    ------
    TypeError
        A model, optimizer or criterion that is none.
    ValueError
        Bad arguments, a model in evaluation mode, layers that mix examples.

    Notes
    -----
    The model carries hooks until :meth:`Private.remove`: save its ``state_dict()``, not the object.
    """
    for name, value, kind in (("model", model, torch.nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    if not callable(criterion):
        raise TypeError(f"criterion must be callable, got {type(criterion).__name__}")
    if not model.training:
        raise ValueError("the model is in evaluation mode: call model.train() first")
    if not isinstance(execution, Plan):
        one_of("execution", execution, tuple(EXECUTIONS))
    one_of("accountant", accountant, ACCOUNTANTS)
    clip = Clip(max_grad_norm, clipping)
    if max_physical_batch_size is not None:
        whole_number("max_physical_batch_size", max_physical_batch_size, 1)
    if data_loader is None:
        if sample_rate is None or expected_batch_size is None:
            raise ValueError("without a data_loader, sample_rate and expected_batch_size must be given")
        number("sample_rate", sample_rate, 0, 1, open_low=True)
        number("expected_batch_size", expected_batch_size, open_low=True)
        steps = math.ceil(1 / sample_rate)
    else:
        if sample_rate is not None or expected_batch_size is not None:
            raise ValueError("sample_rate and expected_batch_size follow from the data_loader: leave them out")
        check_loader(data_loader)
        steps = len(data_loader)
        sample_rate = 1 / steps
        expected_batch_size = len(data_loader.dataset) * sample_rate
    sigma = _sigma(noise_multiplier, target_epsilon, target_delta, epochs, sample_rate, steps, accountant)
    _check_optimizer(model, optimizer)

    randomness = Randomness(seed, secure=secure)
    chosen = execution.execution if isinstance(execution, Plan) else EXECUTIONS[execution]
    session = Session(
        model,
        optimizer,
        clip,
        chosen,
        sigma,
        sample_rate,
        expected_batch_size,
        create_accountant(accountant),
        randomness,
        averages=_reduction(criterion) == "mean",
    )
    if data_loader is not None:
        session.sampler = PoissonSampler(
            len(data_loader.dataset), sample_rate, steps, randomness, max_physical_batch_size
        )
        data_loader = PoissonLoader(data_loader, session.sampler, session)
    return Private(model, optimizer, PrivateCriterion(criterion, session), data_loader)


class PrivateCriterion:
    """A criterion whose losses clip when they go backward."""

    def __init__(self, criterion: Callable, session: Session) -> None:
        self._reduction, self._plain = _reduction(criterion), criterion
        self._ignore = getattr(criterion, "ignore_index", None)
        if hasattr(criterion, "reduction"):
            criterion = copy.copy(criterion)
            criterion.reduction = "none"
        self._criterion = criterion
        self.session = session

    def __call__(self, output, target, **options) -> "PrivateLoss | torch.Tensor":
        """One loss an example, reduced for show; of an output without a gradient, what the criterion gave before.

        Raises
        ------
        ValueError
            The criterion has mixed the examples.
        """
        if isinstance(output, torch.Tensor) and not output.requires_grad:
            return self._plain(output, target, **options)
        losses = self._criterion(output, target, **options)
        batch = self.session.recorder.batch
        tensors = [x for x in (output, target) if isinstance(x, torch.Tensor)]
        if isinstance(losses, torch.Tensor) and tensors and losses.numel() > max(x.numel() for x in tensors):
            shapes = " and ".join(str(tuple(x.shape)) for x in tensors)
            raise ValueError(
                f"the criterion made losses of shape {tuple(losses.shape)} from {shapes}: it broadcast them"
            )
        if not isinstance(losses, torch.Tensor) or losses.ndim == 0:
            found = "one number" if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ValueError(f"the criterion gave {found} for {batch} examples: it must not reduce (reduction='none')")
        if losses.ndim == 1 and batch and len(losses) != batch and len(losses) % batch == 0:
            parts = losses.reshape(batch, -1)
        elif len(losses) == batch:
            parts = losses.reshape(batch, -1) if batch else losses.reshape(0, 1)
        else:
            raise ValueError(f"the criterion gave losses of shape {tuple(losses.shape)} for {batch} examples")
        sums = parts.sum(1)
        if self._reduction == "mean":
            counts = torch.full_like(sums, parts.shape[1])
            if self._ignore is not None and isinstance(target, torch.Tensor) and target.numel() == losses.numel():
                counts = (target.reshape(parts.shape) != self._ignore).sum(1).clamp(min=1).to(sums)
            sums = sums / counts
        return PrivateLoss(sums, self.session)


class PrivateLoss:
    """The losses of a batch: ``backward()`` clips each example's gradient and adds them up for the next step."""

    def __init__(self, losses: torch.Tensor, session: Session) -> None:
        self.losses = losses
        self._session = session

    def backward(self) -> None:
        """Clip and add up. Once for each forward pass."""
        self._session.add(self.losses)

    def item(self) -> float:
        """The mean (or sum) over the batch; 0 for an empty one. Not private: do not publish it."""
        value = self.losses.detach().sum().item()
        return value / max(1, len(self.losses)) if self._session.averages else value

    def detach(self) -> torch.Tensor:
        """:meth:`item` as a tensor."""
        return torch.tensor(self.item())

    def __float__(self) -> float:
        return self.item()

    def _refuse(self, *_) -> None:
        raise TypeError(
            "a private loss goes backward as it is: scale losses or add to them inside of the criterion, example by "
            "example; micro-batches need no division, and float(loss) is a number to show"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __pow__ = _refuse

    def __repr__(self) -> str:
        return f"PrivateLoss({self.item():.4f} over {len(self.losses)} examples)"


def _sigma(noise_multiplier, target_epsilon, target_delta, epochs, sample_rate, steps, accountant) -> float:
    if (noise_multiplier is None) == (target_epsilon is None):
        raise ValueError(
            f"give noise_multiplier or target_epsilon, got noise_multiplier={noise_multiplier!r} and "
            f"target_epsilon={target_epsilon!r}"
        )
    if noise_multiplier is not None:
        return number("noise_multiplier", noise_multiplier)
    number("target_epsilon", target_epsilon, open_low=True)
    if target_delta is None or epochs is None:
        raise ValueError(f"target_epsilon needs target_delta and epochs, got {target_delta!r} and {epochs!r}")
    whole_number("epochs", epochs, 1)
    return noise_for(target_epsilon, target_delta, sample_rate, epochs * steps, accountant=accountant)


def _check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    learning = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    if missing := [name for key, name in learning.items() if key not in held]:
        raise ValueError(f"the optimizer lacks {', '.join(missing[:3])}: give it these, or set requires_grad=False")
    if foreign := held - set(learning):
        raise ValueError(f"the optimizer has {len(foreign)} parameters that are not the model's")


def _reduction(criterion: Callable) -> str:
    """``mean`` or ``sum`` of a loss module; a function's losses are averaged over examples."""
    reduction = getattr(criterion, "reduction", "mean")
    if reduction == "mean" and isinstance(getattr(criterion, "weight", None), torch.Tensor):
        raise ValueError(
            f"the mean of {type(criterion).__name__} with weights divides by those of the whole batch, which mixes "
            "examples: take reduction='sum'"
        )
    return "mean" if reduction == "none" else one_of("the criterion's reduction", reduction, ("mean", "sum"))
