"""Private training with the loop that it had: ``criterion(output, y).backward(); optimizer.step()``.

DP-SGD (Abadi et al., arXiv 1607.00133): a Poisson sample, each example's gradient clipped to C, normal noise of
standard deviation σ·C on their sum, divided by the *expected* batch size. ε comes from Opacus's accountants.

The model and the optimizer stay the objects that they were. The criterion gives one loss an example; its ``backward``
clips and adds up, as often as there are micro-batches; ``step`` adds the noise once.
"""

import copy
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import torch
from opacus.accountants import create_accountant
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from plpkg.clipping.batches import leaves
from plpkg.clipping.clip import Clip
from plpkg.clipping.execution import EXECUTIONS, Execution
from plpkg.clipping.gradients import check_losses, zeros_for
from plpkg.clipping.planner import Plan
from plpkg.clipping.recorder import Recorder
from plpkg.clipping.training.accounting import ACCOUNTANTS, Mechanism, noise_for, spent
from plpkg.clipping.training.criterion import PrivateCriterion
from plpkg.clipping.training.loader import PoissonLoader, PoissonSampler, check_loader
from plpkg.clipping.training.processes import Processes, check_whole
from plpkg.clipping.training.randomness import Randomness
from plpkg.validation import number, one_of, whole_number


@dataclass
class Progress:
    """How far the Poisson sample of the next step has come, which may be given in several batches."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # by parameter, the clipped gradients
    samples: int = 0  # that the data loader has begun to give
    left: int = 0  # examples of the latest batch that have not gone backward
    last: bool = True  # whether that batch is the sample's last
    added: bool = False  # whether anything has gone backward since step() was called


class Private:
    """A private training, as :func:`make_private` returns it; unpacks into four.

    Attributes
    ----------
    model, optimizer
        The same objects as before, with hooks.
    criterion
        Its losses clip when they go backward.
    data_loader
        Gives Poisson samples; ``None`` where you sample yourself.
    mechanism, accountant, steps
        What is spent in a step, what has been spent, and in how many steps.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Callable,
        mechanism: Mechanism,
        expected_batch_size: float,
        execution: Execution,
        randomness: Randomness,
        processes: Processes,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.criterion = PrivateCriterion(criterion, self)
        self.data_loader: PoissonLoader | None = None
        self.mechanism, self.expected_batch_size = mechanism, expected_batch_size
        self.execution, self.randomness, self.processes = execution, randomness, processes
        self.accountant = create_accountant(mechanism.accountant)
        self.steps = 0
        self.progress = Progress()
        self.recorder = Recorder(model)
        self._released: dict[str, tuple[torch.Tensor, int]] = {}
        # Before the recorder's own hooks, and after: the model may be a layer itself. Closures, so that a copy of the
        # model does not copy all this.
        self._hooks = [
            model.register_forward_pre_hook(
                lambda module, args, kwargs: self._before_forward(module, args, kwargs), with_kwargs=True, prepend=True
            ),
            model.register_forward_hook(lambda module, args, output: self._after_forward(module), always_call=True),
            optimizer.register_step_pre_hook(self._release),
            register_optimizer_step_pre_hook(_not_by_others(weakref.ref(self))),
        ]
        weakref.finalize(self, self._hooks[-1].remove)

    def __iter__(self) -> Iterator:
        return iter((self.model, self.optimizer, self.criterion, self.data_loader))

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier σ, in units of C."""
        return self.mechanism.noise_multiplier

    @property
    def sampler(self) -> PoissonSampler | None:
        """What the data loader samples with."""
        return None if self.data_loader is None else self.data_loader.batch_sampler

    def epsilon(self, delta: float) -> float:
        """The ε spent so far, for a δ: adding or removing one example changes no probability by more.

        Raises
        ------
        ValueError
            ``delta`` is not between 0 and 1.
        """
        return spent(self.accountant, delta)

    def skip(self) -> None:
        """Where you sample yourself and nobody was chosen: a step of noise alone, which counts like any other.

        Raises
        ------
        RuntimeError
            Examples have gone backward since the last step, or a data loader samples (and does this by itself).
        """
        if self.progress.sums:
            raise RuntimeError("examples have gone backward since the last step: the sample is not empty")
        self.progress.added = True
        self.optimizer.step()

    def remove(self) -> None:
        """Make the model and the optimizer ordinary again; what has been spent stays spent."""
        self.recorder.remove()
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict:
        """What to save beside the model's and the optimizer's states: the accountant, and which sample comes next.

        Raises
        ------
        RuntimeError
            A sample is half done: call it after ``step`` and before the next batch.
        """
        if self.progress.sums or self.progress.added:
            raise RuntimeError("a sample is half done: save after step() and before the next batch's backward()")
        return {
            "accountant": copy.deepcopy(self.accountant.state_dict()),
            "steps": self.steps,
            "drawn": self.sampler.drawn if self.sampler else 0,
            "left": self.sampler.left if self.sampler else 0,
            "identity": asdict(self.mechanism),
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on where :meth:`state_dict` was called: the same ε, and with the same seed the same samples and noise.

        Raises
        ------
        ValueError
            The state is of another run.
        """
        try:
            identity, accountant = state["identity"], state["accountant"]
            steps, drawn, left = (whole_number(key, state[key], 0) for key in ("steps", "drawn", "left"))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the state of a private training: {error} is missing") from error
        now = asdict(self.mechanism)
        if identity != now:
            different = "; ".join(f"{k}={identity.get(k)!r}, now {v!r}" for k, v in now.items() if identity.get(k) != v)
            raise ValueError(f"the state is of a training with {different}")
        self.accountant.load_state_dict(copy.deepcopy(accountant))
        self.steps = steps
        self.restart()
        self.recorder.forget()
        if self.sampler:
            self.sampler.resume(drawn, left)

    def restart(self) -> None:
        """Drop a sample that was not finished: an epoch begins, whose first sample may be the same again."""
        self.progress = Progress()

    def begin(self, examples: int, last: bool) -> None:
        """The data loader gives a batch of so many examples, perhaps the last of its sample."""
        self.progress.samples += self.progress.last
        self.progress.last, self.progress.left = last, examples

    def check(self) -> None:
        """See that what learns is what was seen in the beginning.

        Raises
        ------
        RuntimeError
            A parameter learns that was not there, or one is gone; or processes are.
        """
        self.processes.check()
        known = {id(p) for p in self.recorder.parameters.values()}
        now = {id(p): name for name, p in self.model.named_parameters() if p.requires_grad}
        if known != now.keys():
            new = [name for key, name in now.items() if key not in known]
            gone = [name for name, p in self.recorder.parameters.items() if id(p) not in now]
            what = f"{new[0]} learns, which was not there" if new else f"{gone[0]} learns no more"
            raise RuntimeError(
                f"{what} when make_private was called: freeze, unfreeze and replace layers, and load with assign=True, "
                "before; or remove(), call make_private again, and go on with load_state_dict(state_dict())"
            )

    def add(self, losses: torch.Tensor) -> None:
        """Clip the gradients of one loss an example, and add them to the sample's.

        Raises
        ------
        RuntimeError
            There was no forward pass for these losses, or the examples are not those of one batch of the data loader.
        """
        recorder, progress = self.recorder, self.progress
        if not recorder.recording:
            raise RuntimeError("backward() needs a forward pass of the model in training mode, once for each")
        check_losses(losses, recorder.batch)
        if self.sampler and progress.samples > 1:
            raise RuntimeError(
                f"{progress.samples} samples before one step(): an example may be in each, and would count "
                f"{progress.samples} times; step after each batch, or take max_physical_batch_size for smaller ones"
            )
        if self.sampler and recorder.batch > progress.left:
            raise RuntimeError(
                f"the model was given {recorder.batch} examples where the data_loader's batch has {progress.left} "
                "left: an example may come once in a step, the batch must be the first dimension, and nothing may read "
                "ahead of the loop (accelerate's prepare(data_loader) does: iterate over the data_loader itself)"
            )
        try:
            sums, _ = recorder.clipped_sums(losses, self.mechanism.clip, self.execution)
        finally:
            recorder.recording = False
        for name, part in sums.items():
            if part is not None:
                progress.sums[name] = progress.sums[name].add_(part) if name in progress.sums else part
        progress.added = True
        progress.left -= recorder.batch

    def _release(self, optimizer, args, kwargs) -> None:
        """Before the optimizer's step: the noisy gradients, or none until the last batch of a sample."""
        if any(a is not None for a in (*args[1:], *kwargs.values())):
            raise RuntimeError("private training takes steps without a closure")
        self._check_step()
        for p in self.recorder.parameters.values():
            p.grad = None
        if not self.progress.last:
            self.progress.added = False
            return
        for name, total in self._noisy_sums().items():
            p = self.recorder.parameters[name]
            p.grad = (total / self.expected_batch_size if self.criterion.averages else total).to(p.dtype)
            self._released[name] = p.grad, p.grad._version
        self.accountant.step(noise_multiplier=self.noise_multiplier, sample_rate=self.mechanism.sample_rate)
        self.steps += 1
        self.progress = Progress()
        self.recorder.forget()

    def _check_step(self) -> None:
        """Refuse a step with gradients or parameters that were not clipped, or of less than a batch."""
        parameters, progress = self.recorder.parameters, self.progress
        learning = _learning(self.optimizer)
        if learning != {id(p) for p in parameters.values()}:
            raise RuntimeError(
                f"the optimizer has {len(learning)} parameters that learn, make_private saw {len(parameters)}: freeze "
                "and unfreeze before make_private"
            )
        for name, p in parameters.items():
            gradient, version = self._released.get(name, (None, None))
            known = p.grad is None or (p.grad is gradient and p.grad._version == version)
            if not known and p.grad.any():  # zero_grad(set_to_none=False) leaves zeros
                raise RuntimeError(
                    f"{name} has a gradient that was not clipped: only criterion(output, target).backward() may give it"
                )
        if not progress.added:
            raise RuntimeError("step() without criterion(output, target).backward() before it")
        if self.sampler and progress.samples == 0:
            raise RuntimeError("step() without a batch from the data_loader that make_private returned")
        if self.sampler and progress.left:
            raise RuntimeError(f"step() before {progress.left} examples of the data_loader's batch have gone backward")

    def _noisy_sums(self) -> dict[str, torch.Tensor]:
        clipped = self.progress.sums
        sums = {n: clipped[n] if n in clipped else zeros_for(p) for n, p in self.recorder.parameters.items()}
        std = self.noise_multiplier * self.mechanism.clip.sensitivity
        if std and self.processes.rank == 0:
            self.randomness.add_noise(sums, std, self.steps)
        return self.processes.sum(sums)

    def _before_forward(self, module, args, kwargs) -> None:
        """Record a forward pass in training mode, and see how many examples it has; let others pass."""
        recorder = self.recorder
        if module is not recorder.model:
            return
        self._recorded = recorder.recording
        if not module.training or not torch.is_grad_enabled():
            recorder.recording = False
            if not module.training:
                recorder.guard.flip()
            return
        self.check()
        counts = {leaf.shape[0] for leaf in leaves([*args, kwargs]) if leaf.ndim}
        if self.progress.left in counts:
            batch = self.progress.left
        elif len(counts - {1}) <= 1 and counts:
            batch = max(counts)
        else:
            raise ValueError(f"the model's tensors must have the batch first, got first dimensions {sorted(counts)}")
        if not recorder.recording or recorder.batch != batch:
            recorder.forget()
        recorder.recording, recorder.batch = True, batch

    def _after_forward(self, module) -> None:
        if module is self.recorder.model and not (module.training and torch.is_grad_enabled()):
            self.recorder.recording = self._recorded


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
        loss an example, or ``(batch, targets)``. The loss of an example with several targets is their mean (or
        sum). On outputs without a gradient, as in validation, the
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
        Where samples and noise come from: see :mod:`plpkg.clipping.training.randomness`.

    Returns
    -------
    Private
        It unpacks into ``model, optimizer, criterion, data_loader``.

    Raises
    ------
    TypeError
        A model, optimizer or criterion that is none.
    ValueError
        Bad arguments, a model in evaluation mode, layers that mix examples.

    Notes
    -----
    The model carries hooks until :meth:`Private.remove`: save its ``state_dict()``, not the object. In each forward
    pass a guard (:mod:`plpkg.clipping.guard`) sees that nothing has changed under the training that would breach it.

    Several processes (``torchrun``, ``accelerate launch``): give each the model itself and the whole data set. Each
    takes its share of every sample, and all have the sum of all and the same parameters.
    """
    _check(model, optimizer, criterion)
    check_whole(model)
    if not isinstance(execution, Plan):
        one_of("execution", execution, tuple(EXECUTIONS))
    one_of("accountant", accountant, ACCOUNTANTS)
    Clip(max_grad_norm, clipping)  # refuses what it cannot clip to
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
    mechanism, processes = Mechanism(accountant, sigma, sample_rate, max_grad_norm, clipping), Processes()
    examples = None if data_loader is None else len(data_loader.dataset)
    processes.agree(model, asdict(mechanism) | {"number of examples": examples, "batch size": expected_batch_size})
    private = Private(
        model,
        optimizer,
        criterion,
        mechanism,
        expected_batch_size,
        execution.execution if isinstance(execution, Plan) else EXECUTIONS[execution],
        Randomness(seed, secure=secure),
        processes,
    )
    if data_loader is not None:
        private.data_loader = PoissonLoader(data_loader, private, max_physical_batch_size)
    return private


def _not_by_others(private: weakref.ref) -> Callable:
    """Before any optimizer's step: refuse one that is not the private training's, but has its parameters."""

    def hook(optimizer, args, kwargs) -> None:
        training = private()
        if training is None or optimizer is training.optimizer:
            return
        if _learning(optimizer) & {id(p) for p in training.recorder.parameters.values()}:
            raise RuntimeError(
                f"a step of another {type(optimizer).__name__} with parameters of a private training, whose gradients "
                "are for the optimizer that make_private was given: remove(), and make_private again with this one"
            )

    return hook


def _check(model: torch.nn.Module, optimizer: torch.optim.Optimizer, criterion: Callable) -> None:
    for name, value, kind in (("model", model, torch.nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    if not callable(criterion):
        raise TypeError(f"criterion must be callable, got {type(criterion).__name__}")
    if not model.training:
        raise ValueError("the model is in evaluation mode: call model.train() first")
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    learning = _learning(optimizer)
    if missing := [name for key, name in names.items() if key not in learning]:
        raise ValueError(f"the optimizer lacks {', '.join(missing[:3])}: give it these, or set requires_grad=False")
    if foreign := learning - set(names):
        raise ValueError(f"the optimizer has {len(foreign)} parameters that are not the model's")


def _learning(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of the parameters that an optimizer changes."""
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}


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
